"""The two passes over the sequence: statistics of every row, and gradients, one chunk of logits at a time.

    forward     for each chunk: logits = h·Wᵀ + b → gather the entries' logits → row statistics → all-gather
                → log Z → loss of the rows (→ gradients at once, in the in_forward mode)
    backward    for each chunk: logits = h·Wᵀ + b → dlogits in place → dh = dlogits·W → dW += dlogitsᵀ·h

The statistics of chunk i travel while chunk i + 1 is projected; where chunk i's logits are still needed then
(in_forward with several ranks) the buffer is split into two slots of half the rows. The reduction of dh travels
during the dW GEMM and the next chunk's projection.

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
class HeadInputs:
    """The tensors of a call, positions flattened."""

    hidden: Tensor  # [n, D]
    weight: Tensor  # [Vp, D]
    bias: Tensor | None  # [Vp]
    teacher: TeacherTopK  # [N, K], [N, K], [N]
    labels: Tensor | None  # [N]
    loss_mask: Tensor | None  # [N]


@dataclass(frozen=True)
class RowResults:
    """Per-position results of the forward pass (fp64 [N])."""

    partition: Partition
    on_support: Tensor  # Σ_S π·(log π − log q) over the entries of this rank
    on_tail: Tensor  # T·(log T − log T_q)
    teacher_tail: Tensor
    label_logit: Tensor  # meaningless without labels

    @staticmethod
    def empty(hidden: Tensor, positions: int) -> RowResults:
        """Room for N positions."""
        columns = [hidden.new_empty(positions, dtype=torch.float64) for _ in range(8)]
        return RowResults(Partition(*columns[:4]), *columns[4:])


class HeadGradients:
    """Running gradients of one pass; a tensor that needs none is None."""

    def __init__(
        self, inputs: HeadInputs, plan: Plan, needs: tuple[bool, bool, bool], main_grad: Tensor | None
    ) -> None:
        need_hidden, need_weight, need_bias = needs
        self.hidden = torch.empty_like(inputs.hidden) if need_hidden else None
        self.weight = WeightGradient(inputs.weight, plan.shard.columns, main_grad) if need_weight else None
        wide = torch.promote_types(inputs.weight.dtype, torch.float32)
        self.bias = torch.zeros_like(inputs.weight[:, 0], dtype=wide) if need_bias else None
        self._reducing: Pending | None = None

    def add(self, inputs: HeadInputs, plan: Plan, span: slice, hidden: Tensor, dlogits: Tensor) -> None:
        """Add a chunk's share."""
        weight = inputs.weight[: plan.shard.columns]
        if self.hidden is not None:
            self.wait()
            out = self.hidden[span]
            partial = torch.empty_like(hidden) if plan.shard.sequence_parallel else out
            self._reducing = plan.shard.reduce_rows(gemm.multiply(dlogits, weight, partial), out)
        if self.weight is not None:
            self.weight.add(dlogits, hidden)
        if self.bias is not None:
            self.bias[: plan.shard.columns] += dlogits.sum(0, dtype=self.bias.dtype)

    def wait(self) -> None:
        """Until dh is complete for everything added so far."""
        if self._reducing is not None:
            self._reducing.wait()
            self._reducing = None


def forward_pass(inputs: HeadInputs, plan: Plan, gradients: HeadGradients | None) -> RowResults:
    """Statistics and losses of all rows; with `gradients`, also those of the sum of the weighted losses."""
    results = RowResults.empty(inputs.hidden, plan.positions)
    # With one rank there is nothing to wait for and a chunk is finished before the next is projected.
    slots = 2 if gradients is not None and plan.shard.size > 1 else 1
    spans = plan.spans(slots)
    buffers = _buffers(inputs, plan, spans, slots)
    previous: _Chunk | None = None
    for index, (span, hidden) in enumerate(_hidden_chunks(inputs, plan, spans)):
        logits = _project(hidden, inputs, plan, buffers[index % slots])
        if previous is not None:
            _finish(previous, inputs, plan, results, gradients)
        previous = _measure(span, hidden, logits, inputs, plan)
        if plan.shard.size == 1:
            _finish(previous, inputs, plan, results, gradients)
            previous = None
    if previous is not None:
        _finish(previous, inputs, plan, results, gradients)
    if gradients is not None:
        gradients.wait()
    plan.shard.sum_(results.on_support)
    return results


def backward_pass(
    inputs: HeadInputs, plan: Plan, partition: Partition, upstream: Tensor, gradients: HeadGradients
) -> None:
    """Gradients of Σ upstream·loss, upstream [N] fp64 without the mask's weights; projects every chunk again."""
    spans = plan.spans(1)
    (buffer,) = _buffers(inputs, plan, spans, 1)
    for span, hidden in _hidden_chunks(inputs, plan, spans):
        logits = _project(hidden, inputs, plan, buffer)
        entries = _entries(inputs, plan, span)
        z = _gather(logits, entries)
        part = Partition(*(plan.shard.take(x, span) for x in partition))
        _differentiate(logits, z, entries, part, plan.shard.take(upstream, span), inputs, plan, span)
        gradients.add(inputs, plan, span, hidden, logits)
    gradients.wait()


@dataclass(frozen=True)
class _Chunk:
    """A chunk whose statistics are on their way."""

    span: slice
    hidden: Tensor  # [C, D]
    logits: Tensor  # [C, columns]; support columns hold −inf
    entries: Entries
    z: Tensor  # [C, E] fp64; the entries' logits, −inf where another rank holds them
    statistics: Pending  # [t, n, C]


def _measure(span: slice, hidden: Tensor, logits: Tensor, inputs: HeadInputs, plan: Plan) -> _Chunk:
    """Reduce a chunk on this rank and send its statistics: max and log-sums of the tail, and of the entries."""
    tau = plan.objective.temperature
    entries = _entries(inputs, plan, span)
    z = _gather(logits, entries)
    k = inputs.teacher.ids.shape[1]
    sums = plan.kernels.row_statistics(logits, entries.columns[:, :k], 1 / tau, plan.two_partitions)
    maximum = sums.maximum.double()
    support = z[:, :k]
    columns = [maximum, maximum / tau + sums.total.double().log(), (support / tau).logsumexp(1)]
    if entries.is_label is not None:
        columns.append(z.masked_fill(~entries.is_label, -torch.inf).amax(1))
    if sums.plain is not None:
        columns.append(torch.logaddexp(maximum + sums.plain.double().log(), support.logsumexp(1)))
    return _Chunk(span, hidden, logits, entries, z, plan.shard.gather_statistics(torch.stack(columns)))


def _finish(
    chunk: _Chunk, inputs: HeadInputs, plan: Plan, results: RowResults, gradients: HeadGradients | None
) -> None:
    """Combine a chunk's statistics over ranks and write its rows' results."""
    everyone = chunk.statistics.wait()
    shift, log_tail, log_support = everyone[:, 0].amax(0), everyone[:, 1].logsumexp(0), everyone[:, 2].logsumexp(0)
    log_z = torch.logaddexp(log_tail, log_support)
    log_plain = everyone[:, -1].logsumexp(0) if plan.two_partitions else log_z
    part = Partition(shift.masked_fill(shift == -torch.inf, 0), log_z, log_tail, log_plain)

    target = _target(inputs, plan, chunk.span)
    put = plan.shard.put
    for where, values in zip(results.partition, part):
        put(where, chunk.span, values)
    divergence = rows.support_divergence(target, chunk.z, chunk.entries, log_z, plan.objective.temperature)
    put(results.on_support, chunk.span, divergence)
    put(results.on_tail, chunk.span, rows.tail_divergence(target, part))
    put(results.teacher_tail, chunk.span, target.teacher_tail)
    if inputs.labels is not None:
        put(results.label_logit, chunk.span, everyone[:, 3].amax(0))
    if gradients is not None:
        ones = torch.ones_like(log_z)
        _differentiate(chunk.logits, chunk.z, chunk.entries, part, ones, inputs, plan, chunk.span)
        gradients.add(inputs, plan, chunk.span, chunk.hidden, chunk.logits)


def _differentiate(
    logits: Tensor,
    z: Tensor,
    entries: Entries,
    part: Partition,
    upstream: Tensor,
    inputs: HeadInputs,
    plan: Plan,
    span: slice,
) -> None:
    """Turn a chunk of logits into dlogits in place."""
    target = _target(inputs, plan, span)
    dense, plain = rows.dense_coefficients(plan.objective, target, part)
    values = rows.entry_gradients(plan.objective, target, part, z, entries)
    if inputs.loss_mask is not None:
        weight = plan.shard.take(inputs.loss_mask, span).double()
        dead = weight == 0
        # A masked row's gradient is exactly 0, also where its upstream gradient is not a number.
        upstream = (upstream * weight).masked_fill_(dead, 0)
        values = values.masked_fill_(dead[:, None], 0)
        dense = dense.masked_fill_(dead, 0)
    plain = None if plain is None else plain * upstream
    plan.kernels.logit_gradient_(
        logits,
        entries.columns,
        values * upstream[:, None],
        part.shift,
        dense * upstream,
        plain,
        1 / plan.objective.temperature,
    )


def _entries(inputs: HeadInputs, plan: Plan, span: slice) -> Entries:
    """Columns of the support and of the label; a label on the support is marked there, not listed twice."""
    ids = plan.shard.take(inputs.teacher.ids, span).long()
    if inputs.labels is None:
        return Entries(plan.shard.local_columns(ids), None)
    label = plan.shard.take(inputs.labels, span).long()[:, None]
    off_support = label.masked_fill((ids == label).any(1, keepdim=True), -1)
    ids = torch.cat([ids, off_support], dim=1)
    return Entries(plan.shard.local_columns(ids), (ids == label) & (label >= 0))


def _gather(logits: Tensor, entries: Entries) -> Tensor:
    """[C, E] fp64: the entries' logits; −inf for those this rank does not hold."""
    if logits.shape[1] == 0:
        return logits.new_full(entries.columns.shape, -torch.inf, dtype=torch.float64)
    z = logits.gather(1, entries.columns.clamp(min=0)).double()
    return z.masked_fill_(entries.columns < 0, -torch.inf)


def _target(inputs: HeadInputs, plan: Plan, span: slice) -> rows.Target:
    take, teacher = plan.shard.take, inputs.teacher
    tail = None if teacher.tail_logprob is None else take(teacher.tail_logprob, span)
    chunk = TeacherTopK(take(teacher.ids, span), take(teacher.logprobs, span), tail)
    return rows.make_target(plan.objective.kind, chunk, _dead(inputs, plan, span))


def _dead(inputs: HeadInputs, plan: Plan, span: slice) -> Tensor | None:
    return None if inputs.loss_mask is None else plan.shard.take(inputs.loss_mask, span) == 0


def _hidden_chunks(inputs: HeadInputs, plan: Plan, spans: list[slice]) -> Iterator[tuple[slice, Tensor]]:
    """Hidden rows of each chunk [C, D], 0 where masked; the next chunk's are gathered during this one's work."""
    gathering = plan.shard.gather_rows(inputs.hidden[spans[0]]) if spans else None
    for index, span in enumerate(spans):
        assert gathering is not None
        hidden = gathering.wait()
        if index + 1 < len(spans):
            gathering = plan.shard.gather_rows(inputs.hidden[spans[index + 1]])
        dead = _dead(inputs, plan, span)
        # 0·NaN is NaN: a masked row must not reach a GEMM as it is.
        yield span, hidden if dead is None else hidden.masked_fill(dead[:, None], 0)


def _buffers(inputs: HeadInputs, plan: Plan, spans: list[slice], slots: int) -> list[Tensor]:
    """Room for the logits of `slots` chunks; rows as wide as the padded vocabulary keep the GEMMs aligned."""
    longest = max((span.stop - span.start for span in spans), default=0) * plan.shard.parts
    return [inputs.weight.new_empty((longest, inputs.weight.shape[0])) for _ in range(slots)]


def _project(hidden: Tensor, inputs: HeadInputs, plan: Plan, buffer: Tensor) -> Tensor:
    """Logits of a chunk over this rank's true columns, in the buffer."""
    columns = plan.shard.columns
    bias = None if inputs.bias is None else inputs.bias[:columns]
    return gemm.project(hidden, inputs.weight[:columns], bias, buffer[: hidden.shape[0], :columns])
