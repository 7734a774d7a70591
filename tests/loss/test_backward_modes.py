"""When in_forward saves a projection, and that it is exact when it cannot.

GEMM work is counted in floating-point operations: one projection of the head is 2·N·D·V.
"""

import importlib
import warnings

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.loss.cases import Case, dense, fused, make, relative_error

CASE = Case(ce_weight=0.7, mask=True, batch=2, backward="in_forward", chunk=7)
BOUND = 1e-10  # double precision; see test_one_rank


def projection(case):
    """Operations of one projection of all positions."""
    return 2 * case.positions * case.hidden * case.vocab


def projections(case, reduce):
    """Head GEMMs of a forward and backward through `reduce`, in projections."""
    tensors = make(case)
    leaves = tensors.leaves()
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(reduce(fused(case, tensors).loss), leaves)
    return counter.get_total_flops() / projection(case)


UNIFORM = {
    "sum": lambda loss: loss.sum(),
    "view": lambda loss: loss.view(-1).sum(),
    "transpose": lambda loss: loss.transpose(0, 1).contiguous().sum(),
    "quotient": lambda loss: loss.sum() / 7,
}
OTHER = {
    "product": lambda loss: (loss * torch.ones_like(loss)).sum(),
    "mean": lambda loss: loss.mean(),
    "index": lambda loss: loss[1:].sum(),
    "cat": lambda loss: torch.cat([loss, loss]).sum(),
}


@pytest.mark.parametrize("reduction", UNIFORM)
def test_uniform_gradients_take_three_gemms(reduction):
    assert projections(CASE, UNIFORM[reduction]) == 3


@pytest.mark.filterwarnings("ignore:fused_linear_kl")
@pytest.mark.parametrize("reduction", OTHER)
def test_other_gradients_are_recomputed(reduction):
    """Three in forward, whose result is dropped, and three again."""
    assert projections(CASE, OTHER[reduction]) == 6


def test_recompute_takes_four_gemms():
    assert projections(Case(chunk=7), UNIFORM["sum"]) == 4


def test_nothing_is_formed_without_gradients():
    """One projection under no_grad, and when nothing requires a gradient."""
    tensors = make(CASE)
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled), FlopCounterMode(display=False) as counter:
            assert not fused(CASE, tensors).loss.requires_grad
        assert counter.get_total_flops() == projection(CASE)
        for leaf in tensors.leaves():
            leaf.requires_grad_(False)


def test_the_fallback_warns_once():
    importlib.import_module("megatron_kd.loss.fused_linear_kl")._warned = False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            projections(CASE, OTHER["product"])
    assert len([w for w in caught if "in_forward" in str(w.message)]) == 1


@pytest.mark.filterwarnings("ignore:fused_linear_kl")
@pytest.mark.parametrize("backward", ["recompute", "in_forward"])
def test_any_sequence_of_backwards(backward):
    """Uniform, then different a row, strided, zero and uniform again, on one graph: each equals autograd's."""
    case = Case(ce_weight=0.7, mask=True, batch=2, bias=True, backward=backward)
    tensors = make(case)
    leaves = tensors.leaves()
    wanted, found = dense(case, tensors), fused(case, tensors).loss
    wide = torch.stack([tensors.upstream, tensors.upstream], dim=-1)
    for upstream in (
        torch.tensor(2.5, dtype=torch.float64).expand_as(found),
        tensors.upstream,
        wide[..., 0],  # strides (4, 2)
        tensors.upstream.t().contiguous().t(),
        torch.zeros_like(found),
        torch.tensor(0.0, dtype=torch.float64).expand_as(found),
        tensors.upstream[:, :1].expand_as(found),  # stride 0 in one dimension only
        torch.tensor(-1.0, dtype=torch.float64).expand_as(found),
    ):
        for x, y in zip(
            torch.autograd.grad(found, leaves, upstream, retain_graph=True),
            torch.autograd.grad(wanted, leaves, upstream, retain_graph=True),
        ):
            assert relative_error(x, y) <= BOUND
            assert x.is_contiguous()


def test_gradients_of_one_backward_are_not_touched_by_the_next():
    """in_forward scales what it formed in place, so it must not hand the same memory out twice."""
    tensors = make(CASE)
    leaves = tensors.leaves()
    loss = fused(CASE, tensors).loss.sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    copies = [x.clone() for x in first]
    second = torch.autograd.grad(loss * 3, leaves)
    for x, copy, y in zip(first, copies, second):
        assert torch.equal(x, copy)
        assert relative_error(y, 3 * copy) <= BOUND


@pytest.mark.parametrize("backward", ["recompute", "in_forward"])
@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_frozen_inputs(backward, frozen):
    """What is frozen gets no gradient and costs no GEMM; the others are as before."""
    case = Case(bias=True, backward=backward)
    tensors = make(case)
    everything = torch.autograd.grad(dense(case, tensors).sum(), tensors.leaves())
    wanted = dict(zip(("hidden", "weight", "bias"), everything))
    free = [name for name in wanted if name != frozen]
    leaves = [getattr(tensors, name) for name in free]
    getattr(tensors, frozen).requires_grad_(False)
    for x, name in zip(torch.autograd.grad(fused(case, tensors).loss.sum(), leaves), free):
        assert relative_error(x, wanted[name]) <= BOUND
    if frozen != "bias":
        saved = projections(case, UNIFORM["sum"]) - 1
        with FlopCounterMode(display=False) as counter:
            torch.autograd.grad(fused(case, tensors).loss.sum(), leaves)
        assert counter.get_total_flops() == saved * projection(case)


def test_activation_checkpointing():
    """A forward without gradients, then one with, as torch.utils.checkpoint runs them."""
    tensors = make(CASE)
    leaves = tensors.leaves()
    wanted = torch.autograd.grad(dense(CASE, tensors).sum(), leaves)
    for reentrant in (True, False):

        def head(hidden, weight):
            tensors.hidden, tensors.weight = hidden, weight
            return fused(CASE, tensors).loss

        loss = torch.utils.checkpoint.checkpoint(head, *leaves, use_reentrant=reentrant).sum()
        for x in leaves:
            x.grad = None
        loss.backward()
        for x, y in zip(leaves, wanted):
            assert relative_error(x.grad, y) <= BOUND
