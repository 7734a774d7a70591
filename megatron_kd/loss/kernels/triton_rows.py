"""Chunk kernels in Triton: torch_rows' two functions, one program a row.

    row_statistics     write −inf at the support, then read the row once, keeping a running maximum m and
                       Σ exp((z − m)/τ), rescaled whenever m grows
    logit_gradient_    read and write the row once, in place, then write the entries

Arithmetic is fp32 (fp64 for fp64 logits) whatever the logits' type; τ is a constant of the compiled kernel, as an
argument would be fp32. Row offsets are 64-bit: at 14,135 rows of 151,936 columns a 32-bit one overflows.

Shapes: C rows, V columns of this rank's true vocabulary (rows may be further apart than V), E entries.
"""

# A kernel's arguments have no Python types.
# ruff: noqa: ANN001, ANN202
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_kd.loss.kernels import RowSums

_SMALLEST_BLOCK, _LARGEST_BLOCK = 256, 8192
_ENTRY_BLOCK = 128
_WARPS = 8


def row_statistics(logits: Tensor, support: Tensor, inverse_temperature: float, plain: bool) -> RowSums:
    """Max and sums of exponentials of each row off its support; see torch_rows.row_statistics."""
    rows, columns = logits.shape
    kind = torch.promote_types(logits.dtype, torch.float32)
    maximum = logits.new_full((rows,), -torch.inf, dtype=kind)
    total = torch.zeros_like(maximum)
    plain_total = torch.zeros_like(maximum) if plain else None
    if rows and columns:
        support = support.contiguous()
        _statistics[(rows,)](
            logits,
            logits.stride(0),
            columns,
            support,
            support.shape[1],
            maximum,
            total,
            total if plain_total is None else plain_total,
            INVERSE_TEMPERATURE=inverse_temperature,
            PLAIN=plain,
            WIDE=kind == torch.float64,
            BLOCK=_block(columns),
            ENTRY_BLOCK=_ENTRY_BLOCK,
            num_warps=_WARPS,
        )
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
    """Turn a chunk of logits into its gradient, in place; see torch_rows.logit_gradient_."""
    rows, columns = logits.shape
    if not rows or not columns:
        return
    kind = torch.promote_types(logits.dtype, torch.float32)
    entries, dense = entries.contiguous(), dense.to(kind)
    _gradient[(rows,)](
        logits,
        logits.stride(0),
        columns,
        entries,
        values.to(logits.dtype).contiguous(),
        entries.shape[1],
        shift.to(kind),
        dense,
        dense if plain is None else plain.to(kind),
        INVERSE_TEMPERATURE=inverse_temperature,
        PLAIN=plain is not None,
        WIDE=kind == torch.float64,
        BLOCK=_block(columns),
        ENTRY_BLOCK=_ENTRY_BLOCK,
        num_warps=_WARPS,
    )


def _block(columns: int) -> int:
    return max(_SMALLEST_BLOCK, min(_LARGEST_BLOCK, triton.next_power_of_2(columns)))


@triton.jit
def _statistics(  # type: ignore[no-untyped-def]
    logits,
    row_stride,
    columns,
    support,
    k,
    maximum,
    total,
    plain_total,
    INVERSE_TEMPERATURE: tl.constexpr,
    PLAIN: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    ENTRY_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    line = logits + row * row_stride
    for first in range(0, k, ENTRY_BLOCK):
        entry = first + tl.arange(0, ENTRY_BLOCK)
        column = tl.load(support + row * k + entry, mask=entry < k, other=-1)
        tl.store(line + column, -float("inf"), mask=column >= 0)
    # The loads below are other threads' stores above.
    tl.debug_barrier()

    top = tl.full((), -float("inf"), kind)
    sum_tau = tl.zeros((), kind)
    sum_plain = tl.zeros((), kind)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        z = tl.load(line + column, mask=column < columns, other=-float("inf")).to(kind)
        new_top = tl.maximum(top, tl.max(z, 0))
        # While the row has shown nothing but −inf, −inf − (−inf) must not be formed.
        origin = tl.where(new_top == -float("inf"), tl.zeros((), kind), new_top)
        z = z - origin
        correction = top - origin
        sum_tau = sum_tau * tl.exp(correction * INVERSE_TEMPERATURE) + tl.sum(tl.exp(z * INVERSE_TEMPERATURE), 0)
        if PLAIN:
            sum_plain = sum_plain * tl.exp(correction) + tl.sum(tl.exp(z), 0)
        top = new_top
    tl.store(maximum + row, top)
    tl.store(total + row, sum_tau)
    if PLAIN:
        tl.store(plain_total + row, sum_plain)


@triton.jit
def _gradient(  # type: ignore[no-untyped-def]
    logits,
    row_stride,
    columns,
    entries,
    values,
    e,
    shifts,
    dense,
    plain,
    INVERSE_TEMPERATURE: tl.constexpr,
    PLAIN: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    ENTRY_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    line = logits + row * row_stride
    shift = tl.load(shifts + row)
    coefficient = tl.load(dense + row)
    if PLAIN:
        plain_coefficient = tl.load(plain + row)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < columns
        z = tl.load(line + column, mask=inside, other=0.0).to(kind) - shift
        gradient = coefficient * tl.exp(z * INVERSE_TEMPERATURE)
        if PLAIN:
            gradient += plain_coefficient * tl.exp(z)
        tl.store(line + column, gradient.to(logits.dtype.element_ty), mask=inside)
    # The entries overwrite what other threads have just stored.
    tl.debug_barrier()
    for first in range(0, e, ENTRY_BLOCK):
        entry = first + tl.arange(0, ENTRY_BLOCK)
        column = tl.load(entries + row * e + entry, mask=entry < e, other=-1)
        value = tl.load(values + row * e + entry, mask=entry < e, other=0.0)
        tl.store(line + column, value, mask=column >= 0)
