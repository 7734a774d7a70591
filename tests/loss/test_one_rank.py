"""fused_linear_kl on one rank against dense autograd, in double precision, over the grid of cases.

Bound 1e-10 relative: double precision rounds at 1e-16 and the sums have under 1e3 terms; a wrong formula misses by
far more than that.
"""

import math
from dataclasses import replace

import pytest
import torch

from megatron_kd.loss import KDObjective, TeacherTopK, fused_linear_kl
from tests.loss.cases import DEVICES, ONCE, Case, dense_results, fused, make, name, pairwise, relative_error, whole_grid

BOUND = 1e-10


def check_against_dense(case, device="cpu"):
    """The loss and all gradients, for two incoming gradients: one number for all rows, and another for each."""
    tensors = make(case, device)
    (wanted,), *wanted_gradients = dense_results(case)
    found = fused(case, tensors).loss
    assert found.shape == wanted.shape
    assert relative_error(found.cpu(), wanted) <= BOUND
    for upstream, gradients in zip((None, tensors.upstream), wanted_gradients):
        total = found.sum() * 2.5 if upstream is None else (found * upstream).sum()
        for x, y in zip(torch.autograd.grad(total, tensors.leaves(), retain_graph=True), gradients):
            assert relative_error(x.cpu(), y) <= BOUND


@pytest.mark.parametrize("case", [replace(case, layout=(1, False)) for case in pairwise()], ids=name)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.filterwarnings("ignore:fused_linear_kl")
def test_equals_dense_autograd(case, device):
    check_against_dense(case, device)


@ONCE
@pytest.mark.full
@pytest.mark.filterwarnings("ignore:fused_linear_kl")
def test_equals_dense_autograd_on_the_whole_grid():
    for case in whole_grid(1):
        try:
            check_against_dense(case)
        except AssertionError as error:
            raise AssertionError(name(case)) from error


@pytest.mark.parametrize("kind", ["ghost", "truncated", "renormalized"])
def test_gradcheck(kind):
    """Finite differences of the loss itself, so that reference and closed form cannot be wrong together."""
    case = Case(
        kind=kind,
        ce_weight=0.7,
        temperature=2.0,
        mask=True,
        bias=True,
        padding=3,
        positions=6,
        hidden=4,
        vocab=11,
        chunk=4,
    )
    tensors = make(case)
    tensors.hidden = tensors.hidden.detach().nan_to_num(0.3).requires_grad_()
    leaves = tensors.leaves()

    def loss(hidden, weight, bias):
        tensors.hidden, tensors.weight, tensors.bias = hidden, weight, bias
        return fused(case, tensors).loss

    assert torch.autograd.gradcheck(loss, leaves, atol=1e-7)


def two_columns(kind, p, q, entries=1):
    """A teacher (p, 1 − p) and a student (q, 1 − q) over two columns; the gradient is that of the logits."""
    hidden = torch.tensor([[math.log(q), math.log(1 - q)]], dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[0, 1]])[:, :entries]
    logprobs = torch.tensor([[p, 1 - p]], dtype=torch.float64).log()[:, :entries]
    out = fused_linear_kl(
        hidden, torch.eye(2, dtype=torch.float64), TeacherTopK(ids, logprobs), objective=KDObjective(kind)
    )
    (gradient,) = torch.autograd.grad(out.loss.sum(), hidden)
    return out, gradient[0].tolist()


def test_check_values():
    """Values worked out by hand: six decimals are given."""
    truncated, _ = two_columns("truncated", 0.6, 0.9)
    ghost, gradient = two_columns("ghost", 0.6, 0.9)
    assert truncated.loss.item() == pytest.approx(0.6 * math.log(0.6 / 0.9), abs=1e-12)
    assert truncated.loss.item() == pytest.approx(-0.243279, abs=1e-6)
    assert ghost.loss.item() == pytest.approx(0.311239, abs=1e-6)
    assert gradient == pytest.approx([0.3, -0.3], abs=1e-12)
    assert ghost.tail.item() == pytest.approx(0.4, abs=1e-12)
    assert ghost.support.item() == pytest.approx(0.9, abs=1e-12)


@pytest.mark.parametrize("kind", ["ghost", "truncated", "renormalized"])
def test_direction_is_teacher_to_student(kind):
    """KL((.9, .1)‖(.6, .4)) = 0.226289; the other direction gives 0.311239. K = V: every kind is the full KL."""
    out, _ = two_columns(kind, 0.9, 0.6, entries=2)
    assert out.loss.item() == pytest.approx(0.226289, abs=1e-6)
