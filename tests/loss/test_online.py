"""The losses on a resident teacher against dense fp64 autograd: full KL is any objective with K = V.

Bound 1e-10 relative in double precision, as for the losses on entries.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron_kd.loss import TeacherHead, TeacherTopK, online_dense_kl, online_kl, reference
from megatron_kd.plan.allocator import measure
from tests.distributed import run_ranks
from tests.loss.cases import Case, make, name, relative_error
from tests.loss.test_tensor_parallel import shard

BOUND = 1e-10
CASES = [
    Case(kind="truncated"),
    Case(kind="truncated", ce_weight=0.7, mask=True, bias=True, batch=2, chunk=1),
    Case(kind="truncated", ce_weight=0.7, temperature=2.0, mask=True, padding=8, chunk=0),
    Case(kind="truncated", temperature=0.5, squared=False, padding=8, bias=True, chunk=-1, batch=1),
]


def teacher_of(case, tensors):
    """A teacher with another hidden size; garbage where the student's positions are masked, and in the padding."""
    g = torch.Generator().manual_seed(1)
    shape = (*tensors.hidden.shape[:-1], 4)
    hidden = torch.randn(shape, generator=g, dtype=case.dtype)
    weight = torch.randn(case.vocab + case.padding, 4, generator=g, dtype=case.dtype)
    weight[case.vocab :] *= 100
    bias = torch.randn(case.vocab + case.padding, generator=g, dtype=case.dtype)
    if tensors.loss_mask is not None:
        hidden[tensors.loss_mask == 0] = torch.nan
    return TeacherHead(hidden, weight, bias if case.bias else None)


def wanted_loss(case, tensors, teacher):
    y = teacher.hidden @ teacher.weight.t() + (0 if teacher.bias is None else teacher.bias)
    log_p = (y[..., : case.vocab] / case.temperature).log_softmax(-1)
    ids = torch.arange(case.vocab).expand(log_p.shape)
    rest = {"labels": tensors.labels, "loss_mask": tensors.loss_mask, "bias": tensors.bias, "vocab_size": case.vocab}
    targets = TeacherTopK(ids, log_p)
    return reference(tensors.hidden, tensors.weight, targets, objective=case.objective, **rest)


def arguments(case, tensors, bias):
    return {
        "objective": case.objective,
        "labels": tensors.labels,
        "loss_mask": tensors.loss_mask,
        "bias": bias,
        "vocab_size": case.vocab,
        "chunk_tokens": case.chunk_tokens,
    }


@pytest.mark.parametrize("function", [online_kl, online_dense_kl])
def test_equals_reference(function):
    for case in CASES:
        tensors = make(case)
        teacher = teacher_of(case, tensors)
        wanted = wanted_loss(case, tensors, teacher)
        found = function(tensors.hidden, tensors.weight, teacher, **arguments(case, tensors, tensors.bias))
        assert relative_error(found.loss, wanted) <= BOUND, name(case)
        both = (torch.autograd.grad((x * tensors.upstream).sum(), tensors.leaves()) for x in (found.loss, wanted))
        for x, y in zip(*both):
            assert relative_error(x, y) <= BOUND, name(case)
        counted = torch.ones_like(found.kd) if case.mask is False else tensors.loss_mask.double()
        assert torch.equal(found.support, counted)
        assert found.tail.abs().max() == 0


def errors_on_rank(rank, ranks):
    worst = {}
    for function in (online_kl, online_dense_kl):
        for sequence_parallel in (False, True):
            for case in (replace(case, layout=(ranks, sequence_parallel)) for case in CASES):
                tensors = make(case)
                teacher = teacher_of(case, tensors)
                wanted = wanted_loss(case, tensors, teacher)
                whole = torch.autograd.grad((wanted * tensors.upstream).sum(), tensors.leaves())
                leaves = shard(case, tensors, rank)
                theirs = TeacherHead(
                    teacher.hidden.chunk(ranks)[rank] if sequence_parallel else teacher.hidden,
                    teacher.weight.chunk(ranks)[rank],
                    None if teacher.bias is None else teacher.bias.chunk(ranks)[rank],
                )
                found = function(
                    *leaves[:2],
                    theirs,
                    **arguments(case, tensors, leaves[2] if case.bias else None),
                    tp_group=dist.group.WORLD,
                    sequence_parallel=sequence_parallel,
                ).loss
                mine = torch.autograd.grad((found * tensors.upstream).sum(), leaves)
                parts = (y if x.shape == y.shape else y.chunk(ranks)[rank] for x, y in zip(mine, whole))
                # A shard of padding has no largest value of its own, so the whole tensor's is the scale.
                errors = [((x - y).abs().max() / z.abs().max()).item() for x, y, z in zip(mine, parts, whole)]
                worst[function.__name__, name(case)] = max(relative_error(found, wanted), *errors)
    return worst


def test_tensor_parallel():
    """Two ranks, with and without sequence parallelism; with 8 columns of padding the last rank holds 8 true ones."""
    for worst in run_ranks(errors_on_rank, 2):
        assert len(worst) == 4 * len(CASES)
        assert {case: error for case, error in worst.items() if not error <= BOUND} == {}


def test_main_grad_and_frozen_head():
    case = CASES[1]
    tensors = make(case)
    teacher, rest = teacher_of(case, tensors), arguments(case, tensors, tensors.bias)
    wanted = torch.autograd.grad(
        online_kl(tensors.hidden, tensors.weight, teacher, **rest).loss.sum(), tensors.leaves()
    )
    weight = tensors.weight.detach().clone().requires_grad_()
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
    online_kl(tensors.hidden, weight, teacher, **rest).loss.sum().backward()
    assert weight.grad_added_to_main_grad
    assert relative_error(weight.main_grad, wanted[1]) <= BOUND
    frozen = online_kl(tensors.hidden, weight.detach(), teacher, **rest).loss.sum()
    assert relative_error(torch.autograd.grad(frozen, tensors.hidden)[0], wanted[0]) <= BOUND


def test_teacher_must_fit():
    case = CASES[0]
    tensors = make(case)
    teacher = teacher_of(case, tensors)
    for function in (online_kl, online_dense_kl):
        for wrong, message in (
            (teacher._replace(hidden=teacher.hidden[:-1]), "teacher.hidden is .* both must hold the same positions"),
            (teacher._replace(weight=teacher.weight[:-1]), "teacher.weight's rows is 23 but weight's is 24"),
        ):
            with pytest.raises(ValueError, match=message):
                function(tensors.hidden, tensors.weight, wrong)


def test_peak_is_two_chunks_and_the_gradients():
    """fp32: dh 4·N·D, dW 4·V·D, two buffers 4·C·V; 5 % for [N] numbers and the cache-sized scratch."""
    n, d, v, chunk = 128, 256, 32_768, 64
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=g).requires_grad_() for shape in ((n, d), (v, d)))
    teacher = TeacherHead(torch.randn(n, 16, generator=g), torch.randn(v, 16, generator=g))

    def step():
        return torch.autograd.grad(online_kl(hidden, weight, teacher, chunk_tokens=chunk).loss.sum(), (hidden, weight))

    step()  # thread pools and the like
    found = measure(step, torch.device("cpu")).peak
    assert found <= 1.05 * 4 * (n * d + v * d + 2 * chunk * v) + 4 * (1 << 20) * 4
