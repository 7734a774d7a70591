"""The vocabulary dimension: which columns a rank holds, their logits chunk by chunk, and sums that do not depend on it.

Sums over the vocabulary are taken in blocks of 128 columns, in fp32, and over the blocks in fp64 in their order,
however many ranks hold them: the same logits give the same bytes under every tensor-parallel size.

Shapes: N positions, D hidden, Vp head rows of this rank, C positions of a chunk, K entries, T temperatures.
Memory: one chunk of fp32 logits [C, Vp] in a buffer that is reused, and in the head's dtype where that is another;
a scratch of at most 64 MiB.
Collectives: `gather` only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_kd.teacher.engine import Head

SUM_BLOCK = 128  # columns summed as one; Megatron pads a rank's columns to a multiple of it
# Rows whose exponentials exist at a time: what stays in a CPU's cache, what keeps a GPU busy.
_CPU_SCRATCH_BYTES, _GPU_SCRATCH_BYTES = 4 << 20, 64 << 20


class VocabularyShard(NamedTuple):
    """The columns of the vocabulary that this rank holds."""

    first: int  # id of its first column
    columns: int  # true ones among them
    vocab_size: int  # V, over all ranks
    group: dist.ProcessGroup | None  # the ranks that hold the others; None: there are none


def vocabulary_shard(head: Head, vocab_size: int, group: dist.ProcessGroup | None) -> VocabularyShard:
    """Which columns the head's rows on this rank are. Raises `ValueError` when the ranks' rows do not suffice."""
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    rows = head.weight.shape[0]
    if rows * ranks < vocab_size:
        raise ValueError(
            f"the head has {rows} rows on each of {ranks} rank(s) but the tokenizer has {vocab_size} ids; "
            "teacher and tokenizer do not belong together"
        )
    if ranks > 1 and rows % SUM_BLOCK:
        raise ValueError(f"the head has {rows} rows on each of {ranks} ranks; a multiple of {SUM_BLOCK} is needed")
    first = rank * rows
    return VocabularyShard(first, max(min(vocab_size - first, rows), 0), vocab_size, group)


def project(hidden: Tensor, head: Head, shard: VocabularyShard, chunk_tokens: int) -> Iterator[tuple[slice, Tensor]]:
    """Logits of consecutive chunks: (rows, fp32 [C, Vp rounded up to whole blocks]) with −inf in padding columns.

    All chunks share one buffer: what is yielded is overwritten by the next.

    Raises:
        ValueError: chunk_tokens below 1.
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; at least 1 is needed")
    width = -(-head.weight.shape[0] // SUM_BLOCK) * SUM_BLOCK  # the same on every rank
    count = len(hidden)
    buffer = hidden.new_full((min(chunk_tokens, count), width), -torch.inf, dtype=torch.float32)
    weight = head.weight[: shard.columns].T
    for begin in range(0, count, chunk_tokens):
        rows = slice(begin, min(begin + chunk_tokens, count))
        logits = buffer[: rows.stop - begin]
        columns = logits[:, : shard.columns]
        if weight.dtype == torch.float32:
            torch.mm(hidden[rows], weight, out=columns)
        else:
            columns.copy_(hidden[rows] @ weight)
        if head.bias is not None:
            columns += head.bias[: shard.columns]
        yield rows, logits


def require_temperatures(temperatures: Sequence[float]) -> None:
    """Raises `ValueError` unless temperature 1, at which log-probabilities are stored, comes first."""
    if not temperatures or temperatures[0] != 1.0:
        raise ValueError(f"temperatures are {tuple(temperatures)}; the first must be 1")


def blocks_in_order(gathered: Tensor, shard: VocabularyShard) -> Tensor:
    """[C, ⌈V/128⌉] fp64, from every rank's block sums [C, ranks, blocks]; blocks of padding are left out."""
    return gathered.flatten(1)[:, : -(-shard.vocab_size // SUM_BLOCK)].double()


def gather(local: Tensor, shard: VocabularyShard) -> Tensor:
    """[C, n] of every rank as [C, ranks, n]."""
    if shard.group is None:
        return local[:, None]
    ranks = dist.get_world_size(shard.group)
    everyone = local.new_empty((ranks * len(local), local.shape[1]))
    dist.all_gather_into_tensor(everyone, local.contiguous(), group=shard.group)
    return everyone.unflatten(0, (ranks, -1)).transpose(0, 1)


def local_logit(logits: Tensor, ids: Tensor, shard: VocabularyShard) -> Tensor:
    """[C] the logit of one id per row; −inf where another rank holds it."""
    column = ids - shard.first
    here = (column >= 0) & (column < shard.columns)
    found = logits.gather(1, torch.where(here, column, 0)[:, None])[:, 0]
    return torch.where(here, found, -torch.inf)


def block_sums(logits: Tensor, reference: Tensor, temperature: float) -> Tensor:
    """[C, blocks] sums of exp((z − reference)/τ) over blocks of 128 columns."""
    scratch = _CPU_SCRATCH_BYTES if logits.device.type == "cpu" else _GPU_SCRATCH_BYTES
    rows = max(scratch // (4 * logits.shape[1]), 1)
    parts = [
        (part - bound).div_(temperature).exp_().unflatten(1, (-1, SUM_BLOCK)).sum(dim=2)
        for part, bound in zip(logits.split(rows), reference.split(rows))
    ]
    return torch.cat(parts)
