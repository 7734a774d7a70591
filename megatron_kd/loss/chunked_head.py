"""The two passes over the sequence: statistics of every row, and gradients, one chunk of logits at a time.

    forward     for each chunk: logits = h·Wᵀ + b → gather the entries' logits → row statistics → all-gather
                → log Z → loss of the rows (→ gradients at once, in the in_forward mode)
    backward    for each chunk: logits = h·Wᵀ + b → dlogits in place → dh = dlogits·W → dW += dlogitsᵀ·h

The statistics of chunk i travel while chunk i + 1 is projected; where chunk i's logits are still needed then
(in_forward with several ranks) the buffer is split into two slots of half the rows. The reduction of dh travels
during the dW GEMM and the next chunk's projection; under sequence parallelism the next chunk's hidden rows are
gathered during this one's work.

Shapes: N positions, n of them on this rank, C rows of a chunk, D hidden, Vp columns, K entries, E = K or K + 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_kd.loss import gemm
from megatron_kd.loss import objective as rows
from megatron_kd.loss.objective import Entries, Partition, TeacherTopK
from megatron_kd.loss.plan import Plan
from megatron_kd.loss.vocab_parallel import Pending
from megatron_kd.loss.weight_grad import WeightGradient


@dataclass(frozen=True)
class Head:
    """A call's plan and its tensors, positions flattened."""

    plan: Plan
    hidden: Tensor  # [n, D]
    weight: Tensor  # [Vp, D]
    bias: Tensor | None  # [Vp]
    teacher: TeacherTopK  # [N, K], [N, K], [N]
    labels: Tensor | None  # [N]
    loss_mask: Tensor | None  # [N]

    def take(self, x: Tensor, span: slice) -> Tensor:
        """A chunk's rows of a tensor of the whole sequence."""
        return self.plan.shard.take(x, span)

    def dead(self, span: slice) -> Tensor | None:
        """[C]: which of a chunk's rows are masked; None: none can be."""
        return None if self.loss_mask is None else self.take(self.loss_mask, span) == 0

    def true_weight(self) -> Tensor:
        """[columns, D]: the weight without its padding."""
        return self.weight[: self.plan.shard.columns]

    def hidden_chunks(self, spans: list[slice]) -> Iterator[tuple[slice, Tensor]]:
        """Hidden rows of each chunk [C, D], 0 where masked; the next chunk's are gathered during this one's work."""
        gather = self.plan.shard.gather_rows
        gathering = gather(self.hidden[spans[0]]) if spans else None
        for index, span in enumerate(spans):
            assert gathering is not None
            hidden = gathering.wait()
            if index + 1 < len(spans):
                gathering = gather(self.hidden[spans[index + 1]])
            dead = self.dead(span)
            # 0·NaN is NaN: a masked row must not reach a GEMM as it is.
            yield span, hidden if dead is None else hidden.masked_fill(dead[:, None], 0)

    def buffers(self, spans: list[slice], slots: int) -> list[Tensor]:
        """Room for the logits of `slots` chunks; rows as wide as the padded vocabulary keep the GEMMs aligned."""
        longest = max((span.stop - span.start for span in spans), default=0) * self.plan.shard.parts
        return [self.weight.new_empty((longest, self.weight.shape[0])) for _ in range(slots)]

    def project(self, hidden: Tensor, buffer: Tensor) -> Tensor:
        """Logits of a chunk over this rank's true columns, in the buffer."""
        columns = self.plan.shard.columns
        bias = None if self.bias is None else self.bias[:columns]
        return gemm.project(hidden, self.true_weight(), bias, buffer[: hidden.shape[0], :columns])

    def finish(self, x: Tensor) -> Tensor:
        """A result of every position as the caller gets it: weighted by the mask, in the loss's type and shape."""
        mask, kind = self.loss_mask, torch.promote_types(self.hidden.dtype, torch.float32)
        if mask is not None:
            x = (x * mask).masked_fill(mask == 0, 0)
        return x.to(kind).view(self.plan.leading)


@dataclass(frozen=True)
class RowResults:
    """Per-position results of the forward pass (fp64 [N])."""

    partition: Partition
    on_support: Tensor  # Σ_S π·(log π − log q), over the entries of this rank until summed
    on_tail: Tensor  # T·(log T − log T_q)
    teacher_tail: Tensor
    label_logit: Tensor  # meaningless without labels

    @staticmethod
    def empty(head: Head) -> RowResults:
        """Room for N positions."""
        columns = [head.hidden.new_empty(head.plan.positions, dtype=torch.float64) for _ in range(8)]
        return RowResults(Partition(*columns[:4]), *columns[4:])


class HeadGradients:
    """Running gradients of one pass; one that is not needed is None."""

    def __init__(self, head: Head, needs: tuple[bool, bool, bool], main_grad: Tensor | None) -> None:
        need_hidden, need_weight, need_bias = needs
        self.hidden = torch.empty_like(head.hidden) if need_hidden else None
        self.weight = WeightGradient(head.weight, head.plan.shard.columns, main_grad) if need_weight else None
        wide = torch.promote_types(head.weight.dtype, torch.float32)
        self.bias = head.weight.new_zeros(head.weight.shape[0], dtype=wide) if need_bias else None
        self._reducing: Pending | None = None

    def add(self, head: Head, span: slice, hidden: Tensor, dlogits: Tensor) -> None:
        """Add a chunk's share."""
        shard = head.plan.shard
        if self.hidden is not None:
            self.wait()
            out = self.hidden[span]
            partial = torch.empty_like(hidden) if shard.sequence_parallel else out
            self._reducing = shard.reduce_rows(gemm.multiply(dlogits, head.true_weight(), partial), out)
        if self.weight is not None:
            self.weight.add(dlogits, hidden)
        if self.bias is not None:
            gemm.add_column_sums(self.bias[: shard.columns], dlogits)

    def deliver(
        self, inputs: tuple[Tensor, Tensor, Tensor | None], main_grad: Tensor | None, scale: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of hidden, weight and bias as autograd wants them, times `scale`."""
        hidden, weight, bias = inputs
        if scale is not None:
            for gradient in (self.hidden, self.bias):
                if gradient is not None:
                    gradient.mul_(scale)
        return (
            None if self.hidden is None else self.hidden.view(hidden.shape),
            None if self.weight is None else self.weight.deliver(weight, main_grad, scale),
            None if self.bias is None or bias is None else self.bias.to(bias.dtype),
        )

    def wait(self) -> None:
        """Until dh is complete for everything added so far."""
        if self._reducing is not None:
            self._reducing.wait()
            self._reducing = None


def forward_pass(head: Head, gradients: HeadGradients | None) -> RowResults:
    """Statistics and losses of all rows; with `gradients`, also those of the sum of the weighted losses."""
    results = RowResults.empty(head)
    # With one rank there is nothing to wait for, and a chunk is finished before the next is projected.
    alone = head.plan.shard.size == 1
    slots = 2 if gradients is not None and not alone else 1
    spans = head.plan.spans(slots)
    buffers = head.buffers(spans, slots)
    previous: _Chunk | None = None
    for index, (span, hidden) in enumerate(head.hidden_chunks(spans)):
        logits = head.project(hidden, buffers[index % slots])
        if previous is not None:
            _finish(head, previous, results, gradients)
        previous = _measure(head, span, hidden, logits)
        if alone:
            _finish(head, previous, results, gradients)
            previous = None
    if previous is not None:
        _finish(head, previous, results, gradients)
    if gradients is not None:
        gradients.wait()
    head.plan.shard.sum_(results.on_support)
    return results


def backward_pass(head: Head, partition: Partition, upstream: Tensor, gradients: HeadGradients) -> None:
    """Gradients of Σ upstream·loss, upstream [N] fp64 without the mask's weights; projects every chunk again."""
    spans = head.plan.spans(1)
    (buffer,) = head.buffers(spans, 1)
    for span, hidden in head.hidden_chunks(spans):
        logits = head.project(hidden, buffer)
        entries = _entries(head, span)
        chunk = _Chunk(span, hidden, logits, entries, _gather(logits, entries), None)
        part = Partition(*(head.take(x, span) for x in partition))
        _differentiate(head, chunk, _target(head, span), part, head.take(upstream, span))
        gradients.add(head, span, hidden, logits)
    gradients.wait()


@dataclass(frozen=True)
class _Chunk:
    """A chunk in work."""

    span: slice
    hidden: Tensor  # [C, D]
    logits: Tensor  # [C, columns]; once measured, support columns hold −inf
    entries: Entries
    z: Tensor  # [C, E] fp64; the entries' logits, −inf where another rank holds them
    statistics: Pending | None  # [t, n, C], on their way


def _measure(head: Head, span: slice, hidden: Tensor, logits: Tensor) -> _Chunk:
    """Reduce a chunk on this rank and send its statistics: max and log-sums of the tail, and of the entries."""
    plan, tau = head.plan, head.plan.objective.temperature
    entries = _entries(head, span)
    z = _gather(logits, entries)
    k = head.teacher.ids.shape[1]
    sums = plan.kernels.row_statistics(logits, entries.columns[:, :k], 1 / tau, plan.two_partitions)
    maximum, support = sums.maximum.double(), z[:, :k]
    columns = [maximum, maximum / tau + sums.total.double().log(), (support / tau).logsumexp(1)]
    if entries.is_label is not None:
        columns.append(z.masked_fill(~entries.is_label, -torch.inf).amax(1))
    if sums.plain is not None:
        columns.append(torch.logaddexp(maximum + sums.plain.double().log(), support.logsumexp(1)))
    return _Chunk(span, hidden, logits, entries, z, plan.shard.gather_statistics(torch.stack(columns)))


def _finish(head: Head, chunk: _Chunk, results: RowResults, gradients: HeadGradients | None) -> None:
    """Combine a chunk's statistics over ranks and write its rows' results."""
    assert chunk.statistics is not None
    everyone = chunk.statistics.wait()
    shift, log_tail, log_support = everyone[:, 0].amax(0), everyone[:, 1].logsumexp(0), everyone[:, 2].logsumexp(0)
    log_z = torch.logaddexp(log_tail, log_support)
    log_plain = everyone[:, -1].logsumexp(0) if head.plan.two_partitions else log_z
    part = Partition(shift.masked_fill(shift == -torch.inf, 0), log_z, log_tail, log_plain)

    target = _target(head, chunk.span)
    values = [
        *part,
        rows.support_divergence(target, chunk.z, chunk.entries, log_z, head.plan.objective.temperature),
        rows.tail_divergence(target, part),
        target.teacher_tail,
    ]
    if head.labels is not None:
        values.append(everyone[:, 3].amax(0))
    places = (*results.partition, results.on_support, results.on_tail, results.teacher_tail, results.label_logit)
    for place, value in zip(places, values):
        head.plan.shard.put(place, chunk.span, value)
    if gradients is not None:
        _differentiate(head, chunk, target, part, torch.ones_like(log_z))
        gradients.add(head, chunk.span, chunk.hidden, chunk.logits)


def _differentiate(head: Head, chunk: _Chunk, target: rows.Target, part: Partition, upstream: Tensor) -> None:
    """Turn a chunk's logits into dlogits in place."""
    objective = head.plan.objective
    dense, plain = rows.dense_coefficients(objective, target, part)
    values = rows.entry_gradients(objective, target, part, chunk.z, chunk.entries)
    dead = head.dead(chunk.span)
    if head.loss_mask is not None and dead is not None:
        # A masked row's gradient is exactly 0, also where its upstream gradient is not a number.
        upstream = (upstream * head.take(head.loss_mask, chunk.span).double()).masked_fill_(dead, 0)
    head.plan.kernels.logit_gradient_(
        chunk.logits,
        chunk.entries.columns,
        values * upstream[:, None],
        part.shift,
        dense * upstream,
        None if plain is None else plain * upstream,
        1 / objective.temperature,
    )


def _entries(head: Head, span: slice) -> Entries:
    """Columns of the support and of the label; a label on the support is marked there, not listed twice."""
    ids = head.take(head.teacher.ids, span).long()
    local = head.plan.shard.local_columns
    if head.labels is None:
        return Entries(local(ids), None)
    label = head.take(head.labels, span).long()[:, None]
    off_support = label.masked_fill((ids == label).any(1, keepdim=True), -1)
    ids = torch.cat([ids, off_support], dim=1)
    return Entries(local(ids), (ids == label) & (label >= 0))


def _gather(logits: Tensor, entries: Entries) -> Tensor:
    """[C, E] fp64: the entries' logits; −inf for those this rank does not hold."""
    if logits.shape[1] == 0:
        return logits.new_full(entries.columns.shape, -torch.inf, dtype=torch.float64)
    z = logits.gather(1, entries.columns.clamp(min=0)).double()
    return z.masked_fill(entries.columns < 0, -torch.inf)


def _target(head: Head, span: slice) -> rows.Target:
    ids, logprobs, tail = (None if x is None else head.take(x, span) for x in head.teacher)
    assert ids is not None
    assert logprobs is not None
    return rows.make_target(head.plan.objective.kind, TeacherTopK(ids, logprobs, tail), head.dead(span))
