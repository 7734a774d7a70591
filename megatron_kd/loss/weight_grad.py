"""Where the head's gradients go: dh, dW and the bias gradient, chunk by chunk.

dW is summed over chunks in fp32 (fp64 for fp64 inputs), never chunk after chunk in half precision. It is summed

* straight into `weight.main_grad`, where Megatron accumulates over microbatches and main_grad has that type;
* into a scratch otherwise, added to main_grad once or returned, rounded once to the weight's type.

Megatron's contract for main_grad: set `grad_added_to_main_grad`, and return a dummy gradient, never None, since its
hooks hang on it. The dummy is a sparse tensor without entries: a gradient of zero that needs no memory, where a dense
one is 2·Vp·D bytes of nothing. With `zero_out_wgrad` Megatron adds the returned gradient to main_grad (a tied
embedding's share arrives in it), and gets dense zeros. Under Megatron-FSDP the main gradient is made by
`get_main_grad()` and overwritten.

Shapes: C rows, D hidden, Vp columns of this rank. Collectives: none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_kd.loss.gemm import accumulate


class WeightGradient:
    """The fp32 sum of dW over chunks."""

    def __init__(self, weight: Tensor, columns: int, main_grad: Tensor | None) -> None:
        kind = torch.promote_types(weight.dtype, torch.float32)
        self._direct = main_grad is not None and main_grad.dtype == kind
        self.sum = main_grad if self._direct and main_grad is not None else weight.new_zeros(weight.shape, dtype=kind)
        self._columns = columns

    def add(self, dlogits: Tensor, hidden: Tensor) -> None:
        """Add dlogitsᵀ·hidden over the true columns; padding rows are never touched."""
        accumulate(self.sum[: self._columns], dlogits, hidden)

    def deliver(self, weight: Tensor, main_grad: Tensor | None, scale: Tensor | None = None) -> Tensor:
        """What autograd gets for the weight; the sum is multiplied by `scale` first, and used up."""
        if scale is not None:
            self.sum.mul_(scale)
        if main_grad is None:
            return self.sum.to(weight.dtype)
        if not self._direct:
            main_grad.add_(self.sum)
        return _dummy_gradient(weight)


def takes_main_grad(weight: Tensor, accumulate_main_grad: bool | None) -> bool:
    """Whether dW goes to weight.main_grad; None: where Megatron has prepared the parameter for it."""
    has_main_grad = getattr(weight, "main_grad", None) is not None or hasattr(weight, "get_main_grad")
    if accumulate_main_grad is None:
        return has_main_grad and hasattr(weight, "grad_added_to_main_grad")
    trained = weight.requires_grad and torch.is_grad_enabled()
    if accumulate_main_grad and trained and not has_main_grad:
        raise ValueError(
            "accumulate_main_grad is True but weight has no main_grad: wrap the model in Megatron's "
            "DistributedDataParallel first, or leave accumulate_main_grad to None"
        )
    return accumulate_main_grad


def open_main_grad(weight: Tensor, held: Tensor | None) -> Tensor:
    """The main gradient to add to. Megatron-FSDP makes it at this point, with arbitrary contents, to be overwritten."""
    if hasattr(weight, "__fsdp_param__"):
        fresh: Tensor = weight.get_main_grad()  # type: ignore[attr-defined]
        weight.main_grad = fresh.zero_()  # type: ignore[attr-defined]
        return fresh
    assert held is not None
    return held


def _dummy_gradient(weight: Tensor) -> Tensor:
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    if getattr(weight, "zero_out_wgrad", False):
        return torch.zeros_like(weight)
    return torch.sparse_coo_tensor(
        torch.empty((2, 0), dtype=torch.long, device=weight.device),
        weight.new_empty((0,)),
        weight.shape,
        check_invariants=False,
    )
