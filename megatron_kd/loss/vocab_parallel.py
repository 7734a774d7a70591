"""The vocabulary shard of this rank, and every collective of the loss.

The head's weight is split by vocabulary over the t ranks of a tensor-parallel group; each rank holds Vp columns of
which `columns` are true ones. Under sequence parallelism each rank also holds only N/t of the positions, in sequence
order: rank r has positions r·N/t … (r+1)·N/t − 1, and a chunk takes the same local rows of every rank, so its global
rows are {r·N/t + local}.

Collectives: per chunk one all-gather of the row statistics, the gather of hidden rows (sequence parallel) and the
reduction of their gradient; once a call, the sum of per-entry divergences; for the dense baselines, the gather of
logits. With one rank none of them runs.
Shapes: N positions of the whole sequence, C rows of a chunk, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

# torch renamed them and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending(NamedTuple):
    """A tensor that a collective may still be writing."""

    tensor: Tensor
    work: dist.Work | None = None

    def wait(self) -> Tensor:
        """The tensor, complete (on a GPU: for everything issued after this call)."""
        if self.work is not None:
            self.work.wait()
        return self.tensor


@dataclass(frozen=True)
class VocabShard:
    """This rank's place in the tensor-parallel group."""

    group: dist.ProcessGroup | None
    rank: int
    size: int
    first: int  # global id of this rank's first column
    columns: int  # true columns of this rank; the weight may hold more, which are padding
    sequence_parallel: bool

    @staticmethod
    def of(
        weight_rows: int, vocab_size: int | None, group: dist.ProcessGroup | None, sequence_parallel: bool
    ) -> VocabShard:
        """The shard of a rank that holds `weight_rows` columns of the padded vocabulary."""
        rank, size = (0, 1) if group is None else (group.rank(), group.size())
        first = rank * weight_rows
        true = weight_rows if vocab_size is None else min(max(vocab_size - first, 0), weight_rows)
        return VocabShard(group, rank, size, first, true, sequence_parallel and size > 1)

    @property
    def parts(self) -> int:
        """Number of slices the sequence is cut into."""
        return self.size if self.sequence_parallel else 1

    def local_columns(self, ids: Tensor) -> Tensor:
        """This rank's column numbers of global ids; −1 for ids that live elsewhere or are absent."""
        local = ids.long() - self.first
        return local.masked_fill_((local < 0) | (local >= self.columns) | (ids < 0), -1)

    def take(self, x: Tensor, span: slice) -> Tensor:
        """Rows of one chunk, [N, …] → [C, …]; a view unless the sequence is split."""
        return x.unflatten(0, (self.parts, -1))[:, span].flatten(0, 1)

    def put(self, x: Tensor, span: slice, values: Tensor) -> None:
        """Write one chunk's rows [C, …] into [N, …]."""
        x.unflatten(0, (self.parts, -1))[:, span] = values.unflatten(0, (self.parts, -1))

    def gather_rows(self, hidden: Tensor) -> Pending:
        """[c, D] of this rank → [C, D] of all; the same rows without sequence parallelism."""
        if not self.sequence_parallel:
            return Pending(hidden)
        rows = hidden.new_empty((self.size * hidden.shape[0], hidden.shape[1]))
        return Pending(rows, _all_gather(rows, hidden, group=self.group, async_op=True))

    def reduce_rows(self, partial: Tensor, out: Tensor) -> Pending:
        """Sum the [C, D] partial gradients over ranks; each keeps the rows `out` it owns.

        Without sequence parallelism the caller has written the partial sums into `out` itself.
        """
        if self.size == 1:
            return Pending(out)
        if self.sequence_parallel:
            return Pending(out, _reduce_scatter(out, partial, group=self.group, async_op=True))
        return Pending(out, dist.all_reduce(out, group=self.group, async_op=True))

    def gather_statistics(self, local: Tensor) -> Pending:
        """[n, C] of this rank → [t, n, C] of all ranks."""
        if self.size == 1:
            return Pending(local[None])
        everyone = local.new_empty((self.size * local.shape[0], local.shape[1]))
        work = _all_gather(everyone, local, group=self.group, async_op=True)
        return Pending(everyone.unflatten(0, (self.size, -1)), work)

    def gather_columns(self, logits: Tensor) -> Tensor:
        """[N, Vp] of this rank → [N, t·Vp] of all."""
        if self.size == 1:
            return logits.view_as(logits)
        everyone = logits.new_empty((self.size * logits.shape[0], logits.shape[1]))
        _all_gather(everyone, logits, group=self.group)
        return everyone.unflatten(0, (self.size, -1)).transpose(0, 1).flatten(1)

    def sum_(self, x: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x
