"""Distillation from a resident teacher, both output layers inside: no one's logits exist for more than a chunk.

    loss_i = mask_i·(kd_weight·KD_i + ce_weight·CE_i),   KD = Σ_v p_v·(log p_v − log q_v)   over the whole vocabulary

with p = softmax(y/τ), y = the teacher's h'·W'ᵀ + b', and q = softmax(z/τ) of the student. Every kind of objective is
this one where the entries are the whole vocabulary: there is no tail. The gradient is

    ∂KD/∂(z_v/τ) = q_v − p_v                and CE adds softmax(z)_v − 1[v is the label]

Forward keeps three normalisers a row; backward projects both again: six head GEMMs, two of them with the teacher's
head, beside the teacher's own forward. The teacher gets no gradient.

Shapes: N positions, C rows of a chunk, D and Dt hidden, Vp columns of this rank, two buffers [C, Vp].
Collectives: vocab_parallel's: per chunk the gather of statistics, of hidden rows and the reduction of dh; once a call
the sum of divergences.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_kd.loss.chunked_head import Head, HeadGradients
from megatron_kd.loss.gemm import without_autocast
from megatron_kd.loss.kernels.torch_rows import row_blocks
from megatron_kd.loss.objective import KDLoss, KDObjective, TeacherHead, without_entries
from megatron_kd.loss.plan import check_teacher_head, make_plan
from megatron_kd.loss.weight_grad import open_main_grad


def online_kl(
    hidden: Tensor,
    weight: Tensor,
    teacher: TeacherHead,
    *,
    objective: KDObjective = KDObjective(),  # noqa: B008 (frozen)
    labels: Tensor | None = None,
    loss_mask: Tensor | None = None,
    bias: Tensor | None = None,
    vocab_size: int | None = None,
    **rest: Any,
) -> KDLoss:
    """Distillation loss of every position from the hidden states and heads of student and teacher.

    Args: as fused_linear_kl's, with
        teacher: its hidden states at the same positions, and its head; see TeacherHead.
        backward: has no meaning here; both heads are projected again.

    Returns:
        See KDLoss: tail is 0 and support is 1 at every position that counts.

    Raises:
        ValueError: a shape, type or combination that cannot be meant.
    """
    plan = make_plan(
        hidden,
        weight,
        None,
        objective=objective,
        labels=labels,
        loss_mask=loss_mask,
        bias=bias,
        vocab_size=vocab_size,
        **rest,
    )
    check_teacher_head(hidden, weight, teacher)
    needs = tuple(torch.is_grad_enabled() and x is not None and x.requires_grad for x in (hidden, weight, bias))
    teacher = TeacherHead(*(None if x is None else x.detach() for x in teacher))  # type: ignore[arg-type]
    return KDLoss(*_OnlineKL.apply(hidden, weight, bias, *teacher, labels, loss_mask, plan, needs))


class _Normalisers(NamedTuple):
    """fp64 [N], or [C] of a chunk."""

    student: Tensor  # log Σ_v exp(z_v/τ)
    teacher: Tensor  # log Σ_v exp(y_v/τ)
    plain: Tensor  # log Σ_v exp(z_v), the cross-entropy's


class _OnlineKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor | None, ...]:
        *tensors, plan, _ = arguments
        student, teacher = _heads(plan, tensors)
        with without_autocast(student.hidden.device):
            normalisers, divergence, label_logit = _forward_pass(student, teacher)
        ctx.save_for_backward(*tensors, *normalisers)
        ctx.plan, weight = plan, tensors[1]
        ctx.main_grad = getattr(weight, "main_grad", None) if plan.main_grad else None
        objective = plan.objective
        kd = divergence * objective.kd_scale
        ce = None if student.labels is None else normalisers.plain - label_logit
        fields = (objective.total(kd, ce), kd, ce, torch.zeros_like(kd), torch.ones_like(kd))
        outputs = tuple(None if x is None else student.finish(x) for x in fields)
        ctx.mark_non_differentiable(*(x for x in outputs[1:] if x is not None))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, of_student, of_teacher, plain = ctx.saved_tensors
        plan, weight = ctx.plan, tensors[1]
        main_grad = open_main_grad(weight, ctx.main_grad) if plan.main_grad and ctx.needs_input_grad[1] else None
        student, teacher = _heads(plan, tensors)
        gradients = HeadGradients(student, ctx.needs_input_grad[:3], main_grad)
        with without_autocast(upstream.device):
            normalisers = _Normalisers(of_student, of_teacher, plain)
            _backward_pass(student, teacher, normalisers, upstream.reshape(-1).double(), gradients)
        return (*gradients.deliver(tuple(tensors[:3]), main_grad, None), *(None,) * 7)


def _heads(plan: Any, tensors: Any) -> tuple[Head, Head]:
    hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, labels, mask = tensors
    labels, mask = (None if x is None else x.reshape(-1) for x in (labels, mask))
    none = without_entries(plan.positions, hidden.device)
    rows, teacher_rows = (x.reshape(-1, x.shape[-1]).contiguous() for x in (hidden, teacher_hidden))
    return (
        Head(plan, rows, weight, bias, none, labels, mask),
        Head(plan, teacher_rows, teacher_weight, teacher_bias, none, None, mask),
    )


def _forward_pass(student: Head, teacher: Head) -> tuple[_Normalisers, Tensor, Tensor]:
    """Normalisers, divergence and label's logit of all rows."""
    plan = student.plan
    shard, tau = plan.shard, plan.objective.temperature
    results = [student.hidden.new_empty(plan.positions, dtype=torch.float64) for _ in range(5)]
    for span, _, z, y in _logit_chunks(student, teacher):
        statistics = [_log_sum(student, z, tau), _log_sum(teacher, y, tau), _label_logit(student, span, z)]
        if tau != 1:
            statistics.append(_log_sum(student, z, 1))
        everyone = shard.gather_statistics(torch.stack(statistics)).wait()
        log_z, log_y = everyone[:, 0].logsumexp(0), everyone[:, 1].logsumexp(0)
        log_plain = log_z if tau == 1 else everyone[:, 3].logsumexp(0)
        values = (log_z, log_y, log_plain, _divergence(z, y, log_z, log_y, tau), everyone[:, 2].amax(0))
        for place, value in zip(results, values):
            shard.put(place, span, value)
    return _Normalisers(*results[:3]), shard.sum_(results[3]), results[4]


def _backward_pass(
    student: Head, teacher: Head, normalisers: _Normalisers, upstream: Tensor, gradients: HeadGradients
) -> None:
    """Gradients of Σ upstream·loss, upstream [N] without the mask's weights."""
    for span, hidden, z, y in _logit_chunks(student, teacher):
        rows = _Normalisers(*(student.take(x, span) for x in normalisers))
        weights = student.take(upstream, span)
        dead = student.dead(span)
        if student.loss_mask is not None and dead is not None:
            weights = (weights * student.take(student.loss_mask, span).double()).masked_fill_(dead, 0)
        _differentiate_(student, span, z, y, rows, weights)
        gradients.add(student, span, hidden, z)
    gradients.wait()


def _logit_chunks(student: Head, teacher: Head) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """(span, the student's hidden rows [C, D], its logits and the teacher's [C, columns]) of each chunk."""
    spans = student.plan.spans(1)
    (buffer,), (teacher_buffer,) = student.buffers(spans, 1), teacher.buffers(spans, 1)
    for (span, hidden), (_, theirs) in zip(student.hidden_chunks(spans), teacher.hidden_chunks(spans)):
        yield span, hidden, student.project(hidden, buffer), teacher.project(theirs, teacher_buffer)


def _log_sum(head: Head, logits: Tensor, tau: float) -> Tensor:
    """[C] fp64: log Σ exp(logits/τ) over this rank's columns."""
    sums = head.plan.kernels.row_statistics(
        logits, logits.new_empty((len(logits), 0), dtype=torch.long), 1 / tau, False
    )
    return sums.maximum.double() / tau + sums.total.double().log()


def _label_logit(head: Head, span: slice, logits: Tensor) -> Tensor:
    """[C] fp64: −inf where another rank holds the label, or there is none."""
    result = logits.new_full((len(logits),), -torch.inf, dtype=torch.float64)
    if head.labels is None or logits.shape[1] == 0:
        return result
    column = head.plan.shard.local_columns(head.take(head.labels, span))
    return torch.where(column >= 0, logits.gather(1, column.clamp(min=0)[:, None])[:, 0].double(), result)


def _divergence(z: Tensor, y: Tensor, log_z: Tensor, log_y: Tensor, tau: float) -> Tensor:
    """[C] fp64: Σ p·(log p − log q) over this rank's columns, summed column by column: it does not cancel."""
    result = torch.zeros_like(log_z)
    for block, log_q in row_blocks(z):
        _log_softmax(z[block], log_z[block], tau, out=log_q)
        log_p = _log_softmax(y[block], log_y[block], tau, out=torch.empty_like(log_q))
        torch.sub(log_p, log_q, out=log_q)
        result[block] = log_q.mul_(log_p.exp_()).sum(1)
    return result


def _differentiate_(student: Head, span: slice, z: Tensor, y: Tensor, rows: _Normalisers, weights: Tensor) -> None:
    """Turn the student's logits of a chunk into their gradient, in place."""
    objective, shard = student.plan.objective, student.plan.shard
    tau, kd, ce = objective.temperature, objective.kd_factor * weights, objective.ce_weight * weights
    with_ce = student.labels is not None and objective.ce_weight != 0
    for block, q in row_blocks(z):
        _log_softmax(z[block], rows.student[block], tau, out=q).exp_()
        p = _log_softmax(y[block], rows.teacher[block], tau, out=torch.empty_like(q)).exp_()
        gradient = torch.sub(q, p, out=p).mul_(kd[block, None].to(q.dtype))
        if with_ce:
            assert student.labels is not None
            column = shard.local_columns(student.take(student.labels, span)[block])[:, None]
            q1 = q if tau == 1 else _log_softmax(z[block], rows.plain[block], 1, out=q).exp_()
            q1.scatter_add_(1, column.clamp(min=0), -(column >= 0).to(q.dtype))
            gradient.addcmul_(q1, ce[block, None].to(q.dtype))
        z[block] = gradient


def _log_softmax(logits: Tensor, log_sum: Tensor, tau: float, out: Tensor) -> Tensor:
    """Rows of logits/τ less their normaliser, in the arithmetic's type."""
    out.copy_(logits)
    if tau != 1:
        out.mul_(1 / tau)
    return out.sub_(log_sum[:, None].to(out.dtype))
