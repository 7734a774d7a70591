"""Chunk kernels in plain torch, for the CPU and as the reference of the Triton ones.

Both work on blocks of rows small enough to stay in cache, in one scratch of the arithmetic's type: a half-precision
chunk is never copied whole to fp32, and an fp32 chunk is read from memory once.

Shapes: C rows, V columns of this rank's true vocabulary (rows may be further apart than V), E entries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_kd.loss.kernels import RowSums

# Elements of one block: 1 MiB of fp32 on a CPU, where the scratch should stay in the second-level cache;
# elsewhere more, as every block costs launches.
_CPU_BLOCK = 1 << 18
_DEVICE_BLOCK = 1 << 20


def row_statistics(logits: Tensor, support: Tensor, inverse_temperature: float, plain: bool) -> RowSums:
    """Max and sums of exponentials of each row off its support.

    Args:
        logits: [C, V], any floating type, any row stride. Support columns hold −inf on return.
        support: [C, K] column numbers; −1 where the entry lives on another rank.
        inverse_temperature: 1/τ.
        plain: whether the sum at τ = 1 is wanted too.

    Returns:
        See RowSums. A row without columns off the support returns −inf and 0.
    """
    rows, columns = logits.shape
    kind = _arithmetic(logits)
    maximum = logits.new_full((rows,), -math.inf, dtype=kind)
    total = torch.zeros_like(maximum)
    plain_total = torch.zeros_like(maximum) if plain else None
    if columns == 0:
        return RowSums(maximum, total, plain_total)
    _overwrite_(logits, support, logits.new_full((), -math.inf).expand(support.shape))
    for block, scratch in row_blocks(logits):
        chunk = logits[block]
        if chunk.dtype != kind:
            chunk = scratch.copy_(chunk)
        torch.amax(chunk, 1, out=maximum[block])
        # A row with no column left has −inf − (−inf): shift it by 0 instead, and its sums are 0.
        shift = maximum[block].masked_fill(maximum[block] == -math.inf, 0)[:, None]
        torch.sub(chunk, shift, out=scratch)
        if plain_total is not None:
            torch.sum(scratch.exp(), 1, out=plain_total[block])
        if inverse_temperature != 1:
            scratch.mul_(inverse_temperature)
        torch.sum(scratch.exp_(), 1, out=total[block])
    return RowSums(maximum, total, plain_total)


def logit_gradient_(
    logits: Tensor,
    entries: Tensor,
    values: Tensor,
    shift: Tensor,
    dense: Tensor,
    plain: Tensor | None,
    inverse_temperature: float,
) -> None:
    """Turn a chunk of logits into its gradient, in place.

    Column v of a row becomes dense·exp((z_v − shift)/τ) + plain·exp(z_v − shift); the entries become `values`.

    Args:
        logits: [C, V], any floating type, any row stride.
        entries: [C, E] column numbers, −1 where absent here.
        values: [C, E] their gradients, any floating type; rounded once to the logits' type.
        shift, dense, plain: [C], any floating type; plain None: no second term.
        inverse_temperature: 1/τ.
    """
    if logits.shape[1] == 0:
        return
    kind = _arithmetic(logits)
    shift, dense = shift.to(kind)[:, None], dense.to(kind)[:, None]
    plain = None if plain is None else plain.to(kind)[:, None]
    for block, scratch in row_blocks(logits):
        chunk = logits[block]
        work = chunk if chunk.dtype == kind else scratch
        torch.sub(chunk, shift[block], out=work)
        second = None if plain is None else work.exp().mul_(plain[block])
        if inverse_temperature != 1:
            work.mul_(inverse_temperature)
        work.exp_().mul_(dense[block])
        if second is not None:
            work.add_(second)
        if work is not chunk:
            chunk.copy_(work)
    _overwrite_(logits, entries, values.to(logits.dtype))


def _overwrite_(logits: Tensor, columns: Tensor, values: Tensor) -> None:
    """logits[c, columns[c, e]] = values[c, e] where columns ≥ 0.

    Scatter has no mask, and selecting the present entries would wait for the device: an absent entry repeats the
    first present one of its row, and a row without any writes its column 0 back.
    """
    if columns.shape[1] == 0:
        return
    present = columns >= 0
    first = present.to(torch.uint8).argmax(1, keepdim=True)
    filler = torch.where(present.any(1, keepdim=True), values.gather(1, first), logits[:, :1])
    column = torch.where(present, columns, columns.gather(1, first).clamp_(min=0))
    logits.scatter_(1, column, torch.where(present, values, filler))


def _arithmetic(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def row_blocks(logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Slices of rows, each with a scratch [rows, V] of the arithmetic's type."""
    rows, columns = logits.shape
    if columns == 0:
        return
    elements = _CPU_BLOCK if logits.device.type == "cpu" else _DEVICE_BLOCK
    step = min(rows, max(1, elements // columns))
    scratch = logits.new_empty((step, columns), dtype=_arithmetic(logits))
    for first in range(0, rows, step):
        last = min(first + step, rows)
        yield slice(first, last), scratch[: last - first]
