"""The losses that fused_linear_kl is compared with: same arguments, same numbers, by autograd over whole logits.

    dense_kl             offline dense: the teacher's entries become a dense [N, Vp] target, and log q is kept whole
    forward_chunked_kl   sparse targets; the logits are kept, their loss is formed and differentiated chunk by chunk

Both work over tensor-parallel ranks like fused_linear_kl. What concerns how gradients are formed (backward, kernels,
accumulate_main_grad) has no meaning here and is ignored: dW reaches weight.grad.

Shapes: N positions, C rows of a chunk, D hidden, Vp columns of this rank, K teacher entries.
Collectives: sums of [C] numbers over ranks; gather and reduction of hidden and dh, whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from megatron_kd.loss.objective import KDLoss, KDObjective, TeacherTopK, make_target
from megatron_kd.loss.plan import Plan, make_plan
from megatron_kd.loss.vocab_parallel import VocabShard


def dense_kl(hidden: Tensor, weight: Tensor, teacher: TeacherTopK, **arguments: Any) -> KDLoss:
    """fused_linear_kl's loss from dense targets and whole logits; arguments as there."""
    return _unfused(hidden, weight, teacher, dense=True, **arguments)


def forward_chunked_kl(hidden: Tensor, weight: Tensor, teacher: TeacherTopK, **arguments: Any) -> KDLoss:
    """fused_linear_kl's loss from sparse targets and whole logits, chunk by chunk; arguments as there."""
    return _unfused(hidden, weight, teacher, dense=False, **arguments)


def _unfused(
    hidden: Tensor,
    weight: Tensor,
    teacher: TeacherTopK,
    *,
    dense: bool,
    objective: KDObjective = KDObjective(),  # noqa: B008 (frozen)
    labels: Tensor | None = None,
    loss_mask: Tensor | None = None,
    bias: Tensor | None = None,
    vocab_size: int | None = None,
    **rest: Any,
) -> KDLoss:
    plan = make_plan(
        hidden,
        weight,
        teacher,
        objective=objective,
        labels=labels,
        loss_mask=loss_mask,
        bias=bias,
        vocab_size=vocab_size,
        **rest,
    )
    columns = plan.shard.columns
    mask = None if loss_mask is None else loss_mask.reshape(-1)
    rows = _AllRows.apply(hidden.reshape(-1, hidden.shape[-1]), plan.shard)
    if mask is not None:
        rows = rows.masked_fill((mask == 0)[:, None], 0)
    logits = functional.linear(rows, weight[:columns], None if bias is None else bias[:columns])

    tail = None if teacher.tail_logprob is None else teacher.tail_logprob.reshape(-1)
    teacher = TeacherTopK(teacher.ids.flatten(0, -2), teacher.logprobs.flatten(0, -2), tail)
    labels = None if labels is None else labels.reshape(-1)
    if dense:
        fields = _row_losses(logits, *teacher, labels, mask, plan, True)
    else:
        # Without the checkpoint every chunk's softmax would be kept, which is all of the dense one's memory.
        chunks = [
            checkpoint(_row_losses, *part, plan, False, use_reentrant=False, preserve_rng_state=False)
            for part in _chunks(plan, logits, *teacher, labels, mask)
        ]
        fields = torch.cat(chunks, dim=1)
    loss, *detached = (field.view(plan.leading) for field in fields)
    kd, ce, teacher_tail, support = (field.detach() for field in detached)
    return KDLoss(loss, kd, None if labels is None else ce, teacher_tail, support)


def _chunks(plan: Plan, *tensors: Tensor | None) -> Iterator[tuple[Tensor | None, ...]]:
    """The same rows of several tensors, chunk by chunk."""
    count = -(-plan.positions // plan.chunk_tokens)
    return zip(*((None,) * count if x is None else x.split(plan.chunk_tokens) for x in tensors))


def _row_losses(
    logits: Tensor,
    ids: Tensor,
    logprobs: Tensor,
    tail_logprob: Tensor | None,
    labels: Tensor | None,
    mask: Tensor | None,
    plan: Plan,
    dense: bool,
) -> Tensor:
    """[5, C]: KDLoss's fields for rows of logits [C, columns]."""
    objective, shard = plan.objective, plan.shard
    kind = torch.promote_types(logits.dtype, torch.float32)
    dead = None if mask is None else mask == 0
    target = make_target(objective.kind, TeacherTopK(ids, logprobs, tail_logprob), dead)
    probs, tail, teacher_tail = target.log_probs.exp().to(kind), target.tail.to(kind), target.teacher_tail.to(kind)
    columns = shard.local_columns(ids)
    held = columns >= 0
    columns = columns.clamp(min=0)

    z = logits.to(kind)
    z_tau = z / objective.temperature
    log_z, _ = _logsumexp(z_tau, shard)
    log_z_here = _OnEachRank.apply(log_z, shard)
    on_support = torch.zeros_like(z, dtype=torch.int8).scatter_add_(1, columns, held.to(torch.int8)) > 0
    if dense:
        p = torch.zeros_like(z).scatter_add_(1, columns, probs * held)
        log_q = z_tau - log_z_here[:, None]
        divergence, mass = torch.xlogy(p, p) - p * log_q, log_q.detach().exp() * on_support
    else:
        log_q = z_tau.gather(1, columns) - log_z_here[:, None]
        divergence, mass = (torch.xlogy(probs, probs) - probs * log_q) * held, log_q.detach().exp() * held
    kd, support = _SumOverRanks.apply(divergence.sum(1), shard), _SumOverRanks.apply(mass.sum(1), shard)
    if objective.kind == "ghost":
        log_tail, no_tail = _logsumexp(z_tau.masked_fill(on_support, -torch.inf), shard)
        tail = tail.masked_fill(no_tail, 0)
        kd = kd + torch.xlogy(tail, tail) - tail * (log_tail - log_z)
    kd = kd * objective.kd_scale
    loss, ce = objective.kd_weight * kd, torch.zeros_like(kd)
    if labels is not None:
        label = shard.local_columns(labels)[:, None]
        z_label = z.gather(1, label.clamp(min=0)) * (label >= 0)
        ce = _logsumexp(z, shard)[0] - _SumOverRanks.apply(z_label[:, 0], shard)
        loss = loss + objective.ce_weight * ce
    fields = torch.stack([loss, kd, ce, teacher_tail, support])
    return fields if mask is None else (fields * mask.to(kind)).masked_fill(mask == 0, 0)


def _logsumexp(z: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Log-sum of exponentials of each row over all ranks, and whether the row holds nothing but −inf (0 there)."""
    largest = z.detach().amax(1) if z.shape[1] else z.new_full((z.shape[0],), -torch.inf)
    if shard.size > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=shard.group)
    empty = largest == -torch.inf
    largest = largest.masked_fill(empty, 0)
    total = _SumOverRanks.apply((z - largest[:, None]).exp().sum(1), shard)
    return torch.where(empty, 1, total).log() + largest, empty


class _SumOverRanks(torch.autograd.Function):
    """Sum over ranks; what follows is the same on every rank, so its gradient is every rank's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: VocabShard) -> Tensor:
        return shard.sum_(x.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _OnEachRank(torch.autograd.Function):
    """What is the same on every rank, for use in a term that is not; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: VocabShard) -> Tensor:
        ctx.shard = shard
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.shard.sum_(gradient.clone()), None


class _AllRows(torch.autograd.Function):
    """Hidden rows of the whole sequence; backward sums their gradient over ranks, each keeping its own rows."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, shard: VocabShard) -> Tensor:
        ctx.shard, ctx.shape = shard, hidden.shape
        rows = shard.gather_rows(hidden).wait()
        return rows.view_as(rows)  # an input must not be returned as it is

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        out = gradient.new_empty(ctx.shape) if ctx.shard.sequence_parallel else gradient.clone()
        return ctx.shard.reduce_rows(gradient, out).wait(), None
