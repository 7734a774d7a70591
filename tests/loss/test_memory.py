"""Peak bytes beyond the inputs, by allocator events, against the sum of what must exist.

With fp32 parameters: dh 4·N·D, dW 4·Vp·D, one chunk of logits 4·C·Vp. Bound 5 %: the [N] and [C, K] quantities and
the cache-sized scratch are the rest.
"""

import pytest
import torch

from megatron_kd.loss import TeacherTopK, fused_linear_kl
from megatron_kd.plan.allocator import measure
from tests.loss.cases import DEVICES, ONCE


def head(n, d, v, k, dtype=torch.float32, device="cpu"):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, d, generator=g).to(device, dtype).requires_grad_()
    weight = (torch.randn(v, d, generator=g) / d**0.5).to(device, dtype).requires_grad_()
    ids = torch.randint(0, v // k, (n, k), generator=g) + torch.arange(k) * (v // k)
    logprobs = torch.log_softmax(torch.randn(n, k, generator=g), -1) - 0.1
    return hidden, weight, TeacherTopK(ids.to(device), logprobs.to(device))


def peak(hidden, weight, teacher, **arguments):
    def step():
        loss = fused_linear_kl(hidden, weight, teacher, **arguments).loss.sum()
        return torch.autograd.grad(loss, (hidden, weight))

    return measure(step, hidden.device).peak


@pytest.mark.parametrize(
    ("n", "d", "v", "k", "chunk", "backward"),
    [
        (128, 256, 32_768, 20, 64, "recompute"),
        (128, 256, 32_768, 20, 64, "in_forward"),
        pytest.param(4096, 1024, 65_536, 100, 512, "in_forward", marks=[ONCE, pytest.mark.full]),
    ],
)
def test_fp32_peak_is_the_sum(n, d, v, k, chunk, backward):
    found = peak(*head(n, d, v, k), chunk_tokens=chunk, backward=backward)
    wanted = 4 * (n * d + v * d + chunk * v)
    assert found <= 1.05 * wanted
    assert found >= wanted


@pytest.mark.parametrize(("backward", "main_grad"), [("recompute", True), ("recompute", False), ("in_forward", True)])
@pytest.mark.parametrize("device", DEVICES)
def test_bf16_peak_is_the_sum(backward, main_grad, device):
    """dW: in main_grad nothing (recompute), a scratch of 4·Vp·D (in_forward), or scratch and result, 6·Vp·D.

    On a CPU the GEMMs widen slices of the chunk and the weight: up to 64 MiB or 4·(C + D)·Vp, whichever is less, and
    two of 4·C·D.
    """
    n, d, v, k, chunk = 128, 64, 65_536, 20, 64
    hidden, weight, teacher = head(n, d, v, k, torch.bfloat16, device)
    if main_grad:
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(v, d, device=device), False
    found = peak(hidden, weight, teacher, chunk_tokens=chunk, backward=backward)
    dw = 6 * v * d if not main_grad else 4 * v * d if backward == "in_forward" else 0
    wanted = 2 * n * d + dw + 2 * chunk * v
    slices = min(64 << 20, 4 * (chunk + d) * v) + 8 * chunk * d if device == "cpu" else 0
    if not main_grad:  # the result is made when the chunk and its slices are gone
        wanted, slices = 2 * n * d + max(dw, 4 * v * d + 2 * chunk * v + slices), 0
    assert found <= 1.05 * wanted + slices + (1 << 20)  # the cache-sized scratch counts at this size


def test_peak_does_not_grow_with_the_vocabulary_beyond_chunk_and_weight():
    """Twice the columns add their share of the chunk and of dW, and nothing else."""
    n, d, k, chunk = 128, 128, 50, 16
    small, large = (peak(*head(n, d, v, k), chunk_tokens=chunk) for v in (16_384, 32_768))
    assert large - small <= 1.02 * 4 * 16_384 * (d + chunk)


def test_forward_keeps_row_statistics_only():
    """After a recompute forward nothing larger than a few numbers a row is alive."""
    n, d, v, k, chunk = 256, 64, 32_768, 20, 64
    hidden, weight, teacher = head(n, d, v, k)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        fused_linear_kl(hidden, weight, teacher, chunk_tokens=chunk)
    inputs = {x.untyped_storage().data_ptr() for x in (hidden, weight, *teacher[:2])}
    own = sum(x.nbytes for x in kept if x.untyped_storage().data_ptr() not in inputs)
    assert own <= 4 * 8 * n
