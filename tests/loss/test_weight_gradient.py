"""Megatron's main_grad contract, and the precision of dW's sum over chunks."""

import pytest
import torch

from tests.loss.cases import Case, dense, fused, make, relative_error

MODES = ["recompute", "in_forward"]


def parameter(weight, main_dtype=torch.float32, **attributes):
    """A weight as Megatron's DistributedDataParallel leaves it."""
    weight = torch.nn.Parameter(weight.detach())
    weight.main_grad = torch.zeros_like(weight, dtype=main_dtype)
    weight.grad_added_to_main_grad = False
    for key, value in attributes.items():
        setattr(weight, key, value)
    return weight


@pytest.mark.parametrize("backward", MODES)
@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.filterwarnings("ignore:fused_linear_kl")
def test_main_grad_sums_microbatches(backward, uniform):
    """Four microbatches with their own loss scales: main_grad is the sum of autograd's gradients, to rounding.

    The parameter is double precision and so is main_grad, hence 1e-10. The returned dummy adds nothing.
    """
    weight, wanted = None, 0
    for step, scale in enumerate((1.0, 0.5, 1024.0, 3e-3)):
        case = Case(backward=backward, mask=True, padding=8, seed=step)
        tensors = make(case)
        if weight is None:
            weight = parameter(tensors.weight.clone(), torch.float64)
        tensors.weight = weight.detach().clone().requires_grad_()
        upstream = torch.ones_like(tensors.upstream) if uniform else tensors.upstream
        leaves = tensors.leaves()
        wanted = wanted + torch.autograd.grad((dense(case, tensors) * upstream).sum() * scale, leaves)[1]
        tensors.weight = weight
        weight.grad_added_to_main_grad = False
        loss = fused(case, tensors).loss
        before = weight.main_grad.clone()
        assert not weight.grad_added_to_main_grad
        ((loss.sum() if uniform else (loss * upstream).sum()) * scale).backward()
        assert weight.grad_added_to_main_grad
        assert not torch.equal(weight.main_grad, before)
        assert weight.grad.shape == weight.shape
        assert weight.grad.to_dense().abs().sum() == 0
    assert relative_error(weight.main_grad, wanted) <= 1e-10
    assert weight.main_grad[case.vocab :].abs().max() == 0


@pytest.mark.parametrize("backward", MODES)
def test_forward_never_touches_main_grad(backward):
    case = Case(backward=backward)
    tensors = make(case)
    tensors.weight = parameter(tensors.weight, torch.float64)
    loss = fused(case, tensors).loss
    assert tensors.weight.main_grad.abs().max() == 0
    del loss
    assert tensors.weight.main_grad.abs().max() == 0
    assert not tensors.weight.grad_added_to_main_grad


@pytest.mark.parametrize("backward", MODES)
@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
def test_bf16_weight_accumulates_in_fp32(backward, main_dtype):
    """dW of 64 chunks of one row; with an fp32 main_grad the error is that of rounding each dlogit to bf16 (2⁻⁹),
    averaged over rows; a bf16 main_grad adds one rounding of the sum, not one a chunk.
    """
    case = Case(backward=backward, chunk=1, positions=64, hidden=32, dtype=torch.bfloat16)
    tensors = make(case)
    exact = make(case)
    exact.hidden, exact.weight = (x.detach().double().requires_grad_() for x in exact.leaves())
    wanted = torch.autograd.grad(dense(case, exact).sum(), exact.leaves())[1]
    tensors.weight = parameter(tensors.weight, main_dtype)
    fused(case, tensors).loss.sum().backward()
    # The logits too are bf16: their own rounding, common to every implementation, is most of the error.
    assert relative_error(tensors.weight.main_grad, wanted) <= 2e-2
    assert tensors.weight.grad.dtype == torch.bfloat16


def test_zero_out_wgrad_returns_dense_zeros():
    """A tied weight: the embedding's gradient is added to what the head returns, and must survive."""
    case = Case()
    tensors = make(case)
    tensors.weight = weight = parameter(tensors.weight, torch.float64, zero_out_wgrad=True)
    (fused(case, tensors).loss.sum() + weight.sum()).backward()
    assert not weight.grad.is_sparse
    assert torch.equal(weight.grad, torch.ones_like(weight))
    tensors.weight = other = parameter(weight.detach(), torch.float64)
    fused(case, tensors).loss.sum().backward()
    assert torch.equal(weight.main_grad, other.main_grad)


def test_dummy_gradient_joins_a_dense_one():
    """A weight used twice, as by multi-token prediction: autograd adds the dummy to the other gradient."""
    case = Case()
    tensors = make(case)
    tensors.weight = weight = parameter(tensors.weight, torch.float64)
    (fused(case, tensors).loss.sum() + fused(case, tensors).loss.sum() + weight.sum()).backward()
    assert torch.equal(weight.grad.to_dense(), torch.ones_like(weight))


@pytest.mark.parametrize("backward", MODES)
def test_fsdp_main_grad_is_overwritten(backward):
    """Megatron-FSDP hands out a buffer with arbitrary contents."""
    case = Case(backward=backward)
    tensors = make(case)
    wanted = torch.autograd.grad(dense(case, tensors).sum(), tensors.leaves())[1]
    tensors.weight = weight = parameter(tensors.weight.detach(), torch.float64, __fsdp_param__=True)
    buffer = torch.full_like(weight, torch.nan, dtype=torch.float64)
    weight.get_main_grad = lambda: buffer
    fused(case, tensors).loss.sum().backward()
    assert weight.main_grad is buffer
    assert relative_error(buffer, wanted) <= 1e-10


@pytest.mark.parametrize("backward", MODES)
def test_frozen_weight_with_main_grad(backward):
    case = Case(backward=backward)
    tensors = make(case)
    wanted = torch.autograd.grad(dense(case, tensors).sum(), tensors.leaves())[0]
    tensors.weight = weight = parameter(tensors.weight.detach(), torch.float64).requires_grad_(False)
    (found,) = torch.autograd.grad(fused(case, tensors).loss.sum(), tensors.hidden)
    assert relative_error(found, wanted) <= 1e-10
    assert weight.main_grad.abs().max() == 0


def test_the_caller_decides():
    """False returns dW although main_grad is there; True uses an unmarked one; True without any is an error."""
    case = Case()
    tensors = make(case)
    wanted = torch.autograd.grad(dense(case, tensors).sum(), tensors.leaves())[1]
    plain = tensors.weight.detach()
    tensors.weight = weight = parameter(plain, torch.float64)
    fused(case, tensors, accumulate_main_grad=False).loss.sum().backward()
    assert weight.main_grad.abs().max() == 0
    assert relative_error(weight.grad, wanted) <= 1e-10

    tensors.weight = weight = torch.nn.Parameter(plain)
    weight.main_grad = torch.zeros_like(plain)
    fused(case, tensors, accumulate_main_grad=True).loss.sum().backward()
    assert relative_error(weight.main_grad, wanted) <= 1e-10
    tensors.weight = torch.nn.Parameter(plain)
    with pytest.raises(ValueError, match="weight has no main_grad"):
        fused(case, tensors, accumulate_main_grad=True)
    with torch.no_grad():  # as in an evaluation
        fused(case, tensors, accumulate_main_grad=True)
