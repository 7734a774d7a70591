"""The head's three GEMMs, in the parameters' type, into memory that exists; and the bias's share of the last.

    project      logits = hidden·Wᵀ + b
    multiply     dh     = dlogits·W
    accumulate   dW    += dlogitsᵀ·hidden, in fp32

GPUs add half-precision products into fp32 at full speed. CPUs have no GEMM with a wider result, and those without
half-precision instructions none worth the name (80 times slower): there the product is formed in fp32 from slices of
the vocabulary, whose copies stay within 64 MiB.

Shapes: C rows, D hidden, V columns. Collectives: none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_SLICE_BYTES = 64 << 20


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Products stay in the parameters' type, into memory of that type."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def project(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """[C, D], [V, D], [V] → out [C, V]."""
    if _widened(hidden):
        wide = hidden.float()
        for part in _slices(weight.shape[0], sum(hidden.shape)):
            product = torch.mm(wide, weight[part].float().t())
            out[:, part] = product if bias is None else product.add_(bias[part])
        return out
    if bias is None:
        return torch.mm(hidden, weight.t(), out=out)
    return torch.addmm(bias, hidden, weight.t(), out=out)


def multiply(dlogits: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """[C, V], [V, D] → out [C, D]."""
    if _widened(out):
        total = torch.zeros_like(out, dtype=torch.float32)
        for part in _slices(weight.shape[0], sum(out.shape)):
            torch.addmm(total, dlogits[:, part].float(), weight[part].float(), out=total)
        return out.copy_(total)
    return torch.mm(dlogits, weight, out=out)


def accumulate(total: Tensor, dlogits: Tensor, hidden: Tensor) -> None:
    """Add dlogitsᵀ [V, C] times hidden [C, D] to total [V, D], which is fp32 or wider."""
    if dlogits.dtype == total.dtype:
        torch.addmm(total, dlogits.t(), hidden, out=total)
    elif dlogits.device.type != "cpu":
        torch.addmm(total, dlogits.t(), hidden, out_dtype=total.dtype, out=total)
    else:
        wide = hidden.to(total.dtype)
        for part in _slices(total.shape[0], sum(hidden.shape)):
            torch.addmm(total[part], dlogits[:, part].t().to(total.dtype), wide, out=total[part])


def add_column_sums(total: Tensor, dlogits: Tensor) -> None:
    """Add the column sums of dlogits [C, V] to total [V], which is fp32 or wider."""
    if dlogits.dtype == total.dtype or dlogits.device.type != "cpu":
        total += dlogits.sum(0, dtype=total.dtype)
    else:  # a CPU would widen the whole chunk first
        for part in _slices(total.shape[0], dlogits.shape[0]):
            total[part] += dlogits[:, part].sum(0, dtype=total.dtype)


def _widened(x: Tensor) -> bool:
    """Whether products of this type are formed in fp32 slices."""
    if x.device.type != "cpu":
        return False
    if x.dtype == torch.bfloat16:
        return not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return x.dtype == torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported()


def _slices(columns: int, width: int) -> Iterator[slice]:
    """Slices of the vocabulary whose fp32 copies, `width` numbers a column, fit the scratch."""
    step = max(1, _SLICE_BYTES // (4 * max(1, width)))
    for first in range(0, columns, step):
        yield slice(first, min(first + step, columns))
