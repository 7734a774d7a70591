"""The losses that fused_linear_kl and online_kl are compared with: same arguments and numbers, by autograd.

    dense_kl             offline dense: the teacher's entries become a dense [N, V] target, and log q is kept whole
    online_dense_kl      the same with the target of a resident teacher: its own softmax over the vocabulary
    forward_chunked_kl   sparse targets; the logits are kept, their loss is formed and differentiated chunk by chunk

The dense ones are what is usually written: every rank gathers the logits of the whole vocabulary, so that log-softmax
and divergence are torch's own functions, and tensor parallelism saves none of their memory. The paper's figures fit
that: its dense head takes about 20 bytes a logit of the whole vocabulary, on one rank and on two alike. The chunked
one stays vocabulary-parallel. What concerns how gradients are formed (backward, kernels, accumulate_main_grad) has no
meaning here and is ignored: dW reaches weight.grad.

Shapes: N positions, C rows of a chunk, D hidden, V vocabulary, Vp columns of this rank, K teacher entries.
Collectives: gather of logits (dense), sums of [C] numbers over ranks (chunked); gather and reduction of hidden and dh.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from megatron_kd.loss.objective import KDLoss, KDObjective, TeacherHead, TeacherTopK, make_target, without_entries
from megatron_kd.loss.plan import Plan, check_teacher_head, make_plan
from megatron_kd.loss.vocab_parallel import VocabShard


def dense_kl(hidden: Tensor, weight: Tensor, teacher: TeacherTopK, **arguments: Any) -> KDLoss:
    """fused_linear_kl's loss from dense targets and whole logits; arguments as there."""
    call = _Call.of(hidden, weight, teacher, **arguments)
    return call.result(_dense_losses(call, call.whole(call.logits(weight.shape[0])), None))


def online_dense_kl(hidden: Tensor, weight: Tensor, teacher: TeacherHead, **arguments: Any) -> KDLoss:
    """online_kl's loss from the whole logits of student and teacher; arguments as there."""
    call = _Call.of(hidden, weight, None, **arguments)
    check_teacher_head(hidden, weight, teacher)
    return call.result(_dense_losses(call, call.whole(call.logits(weight.shape[0])), _teacher_logits(call, teacher)))


def forward_chunked_kl(hidden: Tensor, weight: Tensor, teacher: TeacherTopK, **arguments: Any) -> KDLoss:
    """fused_linear_kl's loss from sparse targets and whole logits, chunk by chunk; arguments as there."""
    call = _Call.of(hidden, weight, teacher, **arguments)
    # Without the checkpoint every chunk's softmax would be kept, which is all of the dense one's memory.
    chunks = [
        checkpoint(_row_losses, *part, call.plan, use_reentrant=False, preserve_rng_state=False)
        for part in call.chunks(call.logits(call.plan.shard.columns))
    ]
    return call.result(torch.cat(chunks, dim=1))


@dataclass(frozen=True)
class _Call:
    """The arguments of one call, positions flattened."""

    plan: Plan
    hidden: Tensor  # [n, …, D]
    weight: Tensor  # [Vp, D]
    bias: Tensor | None
    teacher: TeacherTopK  # [N, K], [N, K], [N]
    labels: Tensor | None  # [N]
    mask: Tensor | None  # [N]
    vocab: int  # V

    @staticmethod
    def of(
        hidden: Tensor,
        weight: Tensor,
        teacher: TeacherTopK | None,
        *,
        objective: KDObjective = KDObjective(),  # noqa: B008 (frozen)
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        bias: Tensor | None = None,
        vocab_size: int | None = None,
        **rest: Any,
    ) -> _Call:
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
        if teacher is None:
            teacher = without_entries(plan.positions, hidden.device)
        tail = None if teacher.tail_logprob is None else teacher.tail_logprob.reshape(-1)
        return _Call(
            plan=plan,
            hidden=hidden,
            weight=weight,
            bias=bias,
            teacher=TeacherTopK(teacher.ids.flatten(0, -2), teacher.logprobs.flatten(0, -2), tail),
            labels=None if labels is None else labels.reshape(-1),
            mask=None if loss_mask is None else loss_mask.reshape(-1),
            vocab=weight.shape[0] * plan.shard.size if vocab_size is None else vocab_size,
        )

    def rows(self, hidden: Tensor) -> Tensor:
        """[N, D]: hidden states of the whole sequence, 0 where masked."""
        rows = _AllRows.apply(hidden.reshape(-1, hidden.shape[-1]), self.plan.shard)
        return rows if self.mask is None else rows.masked_fill((self.mask == 0)[:, None], 0)

    def logits(self, columns: int) -> Tensor:
        """[N, columns]: this rank's."""
        bias = None if self.bias is None else self.bias[:columns]
        return functional.linear(self.rows(self.hidden), self.weight[:columns], bias)

    def whole(self, logits: Tensor) -> Tensor:
        """[N, V]: the logits of all ranks."""
        return _AllColumns.apply(logits, self.plan.shard)[:, : self.vocab]

    def chunks(self, logits: Tensor) -> Iterator[tuple[Tensor | None, ...]]:
        """The same rows of logits, teacher, labels and mask, chunk by chunk."""
        tensors = (logits, *self.teacher, self.labels, self.mask)
        count = -(-self.plan.positions // self.plan.chunk_tokens)
        return zip(*((None,) * count if x is None else x.split(self.plan.chunk_tokens) for x in tensors))

    def result(self, fields: Tensor) -> KDLoss:
        """KDLoss from its fields [5, N]."""
        loss, *detached = (field.view(self.plan.leading) for field in fields)
        kd, ce, teacher_tail, support = (field.detach() for field in detached)
        return KDLoss(loss, kd, None if self.labels is None else ce, teacher_tail, support)


@torch.no_grad()
def _teacher_logits(call: _Call, teacher: TeacherHead) -> Tensor:
    return call.whole(functional.linear(call.rows(teacher.hidden), teacher.weight, teacher.bias))


def _dense_losses(call: _Call, logits: Tensor, theirs: Tensor | None) -> Tensor:
    """[5, N]: KDLoss's fields from logits [N, V] and, of a resident teacher, its own [N, V]."""
    objective, tau = call.plan.objective, call.plan.objective.temperature
    log_q = _log_softmax(logits, tau)
    ce = None
    if call.labels is not None:
        log_q1 = log_q if tau == 1 else _log_softmax(logits, 1)
        log_q1 = log_q1 if objective.ce_weight else log_q1.detach()  # reported only
        ce = -log_q1.gather(1, call.labels.long().clamp(0, call.vocab - 1)[:, None])[:, 0]
    del logits  # nothing below needs them, and the largest tensors come now
    if theirs is not None:
        log_p = _log_softmax(theirs, tau)
        del theirs
        kd = functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(1)
        return _fields(objective, kd, ce, torch.zeros_like(kd), torch.ones_like(kd), call.mask)

    target = make_target(objective.kind, call.teacher, None if call.mask is None else call.mask == 0)
    probs, ids = target.log_probs.exp().to(log_q.dtype), call.teacher.ids.long()
    present, ids = ids >= 0, ids.clamp(0, call.vocab - 1)  # masked rows may hold anything
    p = torch.zeros_like(log_q).scatter_add_(1, ids, probs)
    kd = functional.kl_div(log_q, p, reduction="none").sum(1)
    if objective.kind == "ghost":
        on_support = torch.zeros_like(p, dtype=torch.int8).scatter_add_(1, ids, present.to(torch.int8)) > 0
        log_tail, no_tail = _logsumexp(log_q.masked_fill(on_support, -torch.inf), None)
        tail = target.tail.to(log_q.dtype).masked_fill(no_tail, 0)
        kd = kd + torch.xlogy(tail, tail) - tail * log_tail
    support = (log_q.detach().gather(1, ids).exp() * present).sum(1)
    return _fields(objective, kd, ce, target.teacher_tail.to(log_q.dtype), support, call.mask)


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    scaled = logits if temperature == 1 else logits / temperature
    return torch.log_softmax(scaled, 1, dtype=torch.promote_types(logits.dtype, torch.float32))


def _row_losses(
    logits: Tensor,
    ids: Tensor,
    logprobs: Tensor,
    tail_logprob: Tensor | None,
    labels: Tensor | None,
    mask: Tensor | None,
    plan: Plan,
) -> Tensor:
    """[5, C]: KDLoss's fields for rows of logits [C, columns]."""
    objective, shard = plan.objective, plan.shard
    kind = torch.promote_types(logits.dtype, torch.float32)
    dead = None if mask is None else mask == 0
    target = make_target(objective.kind, TeacherTopK(ids, logprobs, tail_logprob), dead)
    probs = target.log_probs.exp().to(kind)
    columns = shard.local_columns(ids)
    held = columns >= 0
    columns = columns.clamp(min=0)

    z = logits.to(kind)
    z_tau = z if objective.temperature == 1 else z / objective.temperature
    log_z, _ = _logsumexp(z_tau, shard)
    log_q = z_tau.gather(1, columns) - _OnEachRank.apply(log_z, shard)[:, None]
    kd = _SumOverRanks.apply(((torch.xlogy(probs, probs) - probs * log_q) * held).sum(1), shard)
    support = _SumOverRanks.apply((log_q.detach().exp() * held).sum(1), shard)
    if objective.kind == "ghost":
        on_support = torch.zeros_like(z, dtype=torch.int8).scatter_add_(1, columns, held.to(torch.int8)) > 0
        log_tail, no_tail = _logsumexp(z_tau.masked_fill(on_support, -torch.inf), shard)
        tail = target.tail.to(kind).masked_fill(no_tail, 0)
        kd = kd + torch.xlogy(tail, tail) - tail * (log_tail - log_z)
    ce = None
    if labels is not None:
        label = shard.local_columns(labels)[:, None]
        log_z1 = log_z if objective.temperature == 1 else _logsumexp(z, shard)[0]
        if not objective.ce_weight:  # reported only
            z, log_z1 = z.detach(), log_z1.detach()
        z_label = z.gather(1, label.clamp(min=0)) * (label >= 0)
        ce = log_z1 - _SumOverRanks.apply(z_label[:, 0], shard)
    return _fields(objective, kd, ce, target.teacher_tail.to(kind), support, mask)


def _fields(
    objective: KDObjective, kd: Tensor, ce: Tensor | None, tail: Tensor, support: Tensor, mask: Tensor | None
) -> Tensor:
    kd = kd * objective.kd_scale
    fields = torch.stack([objective.total(kd, ce), kd, torch.zeros_like(kd) if ce is None else ce, tail, support])
    return fields if mask is None else (fields * mask.to(kd.dtype)).masked_fill(mask == 0, 0)


def _logsumexp(z: Tensor, shard: VocabShard | None) -> tuple[Tensor, Tensor]:
    """Log-sum of exponentials of each row, over all ranks of a shard; and whether it holds only −inf (0 there)."""
    largest = z.detach().amax(1) if z.shape[1] else z.new_full((z.shape[0],), -torch.inf)
    if shard is not None and shard.size > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=shard.group)
    empty = largest == -torch.inf
    largest = largest.masked_fill(empty, 0)
    total = (z - largest[:, None]).exp().sum(1)
    if shard is not None:
        total = _SumOverRanks.apply(total, shard)
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


class _AllColumns(torch.autograd.Function):
    """Logits of the whole vocabulary; what follows is the same on every rank, so backward keeps this rank's columns."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, shard: VocabShard) -> Tensor:
        ctx.shard = shard
        return shard.gather_columns(logits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(ctx.shard.size, 1)[ctx.shard.rank].contiguous(), None
