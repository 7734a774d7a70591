"""Kernels over the [C, V] chunk, in torch and in Triton, under one signature.

They are the only code that touches every logit: one pass for the statistics, one in place for the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Literal, NamedTuple

import torch
from torch import Tensor

KernelChoice = Literal["auto", "torch", "triton"]


class RowSums(NamedTuple):
    """Statistics of each row of a chunk off the support: fp32 [C], fp64 for fp64 logits."""

    maximum: Tensor  # max z; −inf where the row has no column left
    total: Tensor  # Σ exp((z − max)/τ)
    plain: Tensor | None  # Σ exp(z − max), when asked for


class RowKernels(NamedTuple):
    """The two kernels of one implementation; see torch_rows for what they do."""

    row_statistics: Callable[[Tensor, Tensor, float, bool], RowSums]
    logit_gradient_: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, float], None]


def select(choice: KernelChoice, device: torch.device) -> RowKernels:
    """Kernels by name; "auto" is Triton on CUDA where it is installed, torch elsewhere."""
    if choice not in ("auto", "torch", "triton"):
        raise ValueError(f"kernels is {choice!r}; known kernels are auto, torch, triton")
    triton_installed = find_spec("triton") is not None
    if choice == "triton" and not triton_installed:
        raise ValueError("kernels is 'triton' but triton is not installed: install it or use kernels='torch'")
    if choice == "triton" or (choice == "auto" and device.type == "cuda" and triton_installed):
        from megatron_kd.loss.kernels import triton_rows

        return RowKernels(triton_rows.row_statistics, triton_rows.logit_gradient_)
    from megatron_kd.loss.kernels import torch_rows

    return RowKernels(torch_rows.row_statistics, torch_rows.logit_gradient_)
