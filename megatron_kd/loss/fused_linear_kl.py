"""Distillation loss with the output projection inside: the student's logits exist one chunk of positions at a time.

    loss_i = mask_i·(kd_weight·KD_i + ce_weight·CE_i),   z_i = h_i·Wᵀ + b

The forward pass keeps four numbers a row. `recompute` projects every chunk again in backward: four head GEMMs in
all. `in_forward` forms the gradients of Σ loss during forward, three GEMMs, and backward only scales them; that is
exact when every row's incoming gradient is the same number, which an incoming gradient of stride 0 proves without
looking at its values (loss.sum() gives one; (loss·mask).sum() and loss.mean() do not, so masks belong in loss_mask).
Anything else is recomputed, as exactly.

Shapes: N positions (s·b), D hidden, Vp columns of this rank, K teacher entries. Kept for backward: hidden, weight and
targets, which exist anyway, and [N] statistics; in_forward also dh and an fp32 dW until the first backward.
Collectives: vocab_parallel's, in chunked_head's order.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_kd.loss.chunked_head import Head, HeadGradients, RowResults, backward_pass, forward_pass
from megatron_kd.loss.gemm import without_autocast
from megatron_kd.loss.kernels import KernelChoice
from megatron_kd.loss.objective import KDLoss, KDObjective, Partition, TeacherTopK
from megatron_kd.loss.plan import BackwardMode, Plan, make_plan
from megatron_kd.loss.weight_grad import open_main_grad


def fused_linear_kl(
    hidden: Tensor,
    weight: Tensor,
    teacher: TeacherTopK,
    *,
    objective: KDObjective = KDObjective(),  # noqa: B008 (frozen)
    labels: Tensor | None = None,
    loss_mask: Tensor | None = None,
    bias: Tensor | None = None,
    vocab_size: int | None = None,
    chunk_tokens: int | None = None,
    backward: BackwardMode = "recompute",
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    kernels: KernelChoice = "auto",
    accumulate_main_grad: bool | None = None,
) -> KDLoss:
    """Distillation loss of every position from hidden states and the head's weight.

    Args:
        hidden: [N, D] or [s, b, D]; under sequence parallelism this rank's [s/t, b, D].
        weight: [Vp, D], this rank's shard of the head, in hidden's type.
        teacher: entries of the whole sequence, in hidden's order; see TeacherTopK.
        objective: what is minimised; see KDObjective.
        labels: [N] or [s, b] integer, whole sequence; needed where ce_weight ≠ 0, otherwise only reported as ce.
        loss_mask: [N] or [s, b], whole sequence; 0: the position costs nothing whatever stands in its hidden row and
            targets; any other value is the position's weight.
        bias: [Vp].
        vocab_size: true vocabulary; columns at or past it are padding. Required with several ranks.
        chunk_tokens: positions whose logits exist at a time; None: choose_chunk_tokens.
        backward: "recompute" or "in_forward"; for fp16 always the former, as gradients not yet multiplied by the loss
            scale would underflow.
        tp_group: tensor-parallel group over which the vocabulary is split; None: one rank.
        sequence_parallel: hidden is split over that group by sequence.
        kernels: "auto", "torch" or "triton".
        accumulate_main_grad: add dW to weight.main_grad rather than return it, with Megatron's contract
            (weight_grad.py). None: where the parameter has grad_added_to_main_grad.

    Returns:
        See KDLoss. The whole sequence's loss on every rank. Gradients: dh is summed over ranks (under sequence
        parallelism: this rank's slice), contiguous; dW is this rank's shard's, exactly 0 on padding rows.

    Raises:
        ValueError: a shape, type or combination that cannot be meant; values are checked by validate.
    """
    plan = make_plan(
        hidden,
        weight,
        teacher,
        objective=objective,
        labels=labels,
        loss_mask=loss_mask,
        bias=bias,
        vocab_size=vocab_size,
        chunk_tokens=chunk_tokens,
        backward=backward,
        tp_group=tp_group,
        sequence_parallel=sequence_parallel,
        kernels=kernels,
        accumulate_main_grad=accumulate_main_grad,
    )
    # Inside a function autograd looks disabled, so what will be differentiated is settled here.
    needs = tuple(torch.is_grad_enabled() and x is not None and x.requires_grad for x in (hidden, weight, bias))
    return KDLoss(*_FusedLinearKL.apply(hidden, weight, bias, *teacher, labels, loss_mask, plan, needs))


class _FusedLinearKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        logprobs: Tensor,
        tail_logprob: Tensor | None,
        labels: Tensor | None,
        loss_mask: Tensor | None,
        plan: Plan,
        needs: tuple[bool, bool, bool],
    ) -> tuple[Tensor | None, ...]:
        tensors = (hidden, weight, bias, ids, logprobs, tail_logprob, labels, loss_mask)
        head = _flatten(plan, tensors)
        ctx.formed = HeadGradients(head, needs, None) if plan.in_forward and any(needs) else None
        with without_autocast(hidden.device):
            results = forward_pass(head, ctx.formed)
        ctx.save_for_backward(*tensors, *results.partition)
        ctx.plan = plan
        # Megatron's own linear keeps main_grad on ctx too: it changes between forward and backward, which
        # save_for_backward would take for a fault.
        ctx.main_grad = getattr(weight, "main_grad", None) if plan.main_grad else None
        outputs = _losses(head, results)
        ctx.mark_non_differentiable(*(x for x in outputs[1:] if x is not None))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, shift, log_z, log_tail, log_plain = ctx.saved_tensors
        plan, weight = ctx.plan, tensors[1]
        main_grad = open_main_grad(weight, ctx.main_grad) if plan.main_grad and ctx.needs_input_grad[1] else None
        gradients, scale = ctx.formed, None
        ctx.formed = None
        if gradients is not None and _uniform(upstream):
            scale = upstream[(0,) * upstream.dim()]
        else:
            if gradients is not None:
                _warn_once()
            del gradients
            head = _flatten(plan, tensors)
            gradients = HeadGradients(head, ctx.needs_input_grad[:3], main_grad)
            with without_autocast(upstream.device):
                partition = Partition(shift, log_z, log_tail, log_plain)
                backward_pass(head, partition, upstream.reshape(-1).double(), gradients)
        return (*gradients.deliver(tuple(tensors[:3]), main_grad, scale), *(None,) * 7)


def _flatten(plan: Plan, tensors: Any) -> Head:
    """Positions in one dimension; views unless a caller's tensor is strided."""
    hidden, weight, bias, ids, logprobs, tail_logprob, labels, loss_mask = tensors
    flat = [None if x is None else x.reshape(-1) for x in (tail_logprob, labels, loss_mask)]
    teacher = TeacherTopK(ids.flatten(0, -2), logprobs.flatten(0, -2), flat[0])
    return Head(plan, hidden.reshape(-1, hidden.shape[-1]).contiguous(), weight, bias, teacher, flat[1], flat[2])


def _losses(head: Head, results: RowResults) -> tuple[Tensor | None, ...]:
    """KDLoss's fields from the rows' results."""
    part, objective = results.partition, head.plan.objective
    kd = (results.on_support + results.on_tail) * objective.kd_scale
    ce = None if head.labels is None else part.log_plain - results.label_logit
    # 1 − T_q would do as well here, as nothing is differentiated; expm1 keeps a small support exact.
    support = -torch.expm1(part.log_tail - part.log_z)
    fields = (objective.total(kd, ce), kd, ce, results.teacher_tail, support)
    return tuple(None if x is None else head.finish(x) for x in fields)


def _uniform(upstream: Tensor) -> bool:
    """Whether all elements are one and the same memory."""
    return all(stride == 0 for size, stride in zip(upstream.shape, upstream.stride()) if size > 1)


_warned = False


def _warn_once() -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            "fused_linear_kl: backward='in_forward' met an incoming gradient that is not one number expanded "
            "(loss.sum() gives one; masks belong in loss_mask): recomputing, six head GEMMs instead of three",
            stacklevel=2,
        )
