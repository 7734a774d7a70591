"""fused_linear_kl over 2 and 4 gloo ranks against dense autograd on one.

Every rank knows the whole problem, so each compares its own loss, dh, dW shard and bias shard with the dense ones.
Bound 1e-10 relative in double precision, as on one rank.
"""

import warnings

import pytest
import torch
import torch.distributed as dist

from megatron_kd.loss import fused_linear_kl
from tests.distributed import run_ranks
from tests.loss.cases import ONCE, dense_results, make, name, pairwise, relative_error, whole_grid

BOUND = 1e-10


def shard(case, tensors, rank):
    """This rank's leaves: its slice of hidden (sequence parallel) and its shards of weight and bias."""
    tp, sequence_parallel = case.layout
    hidden, weight, bias = tensors.hidden, tensors.weight, tensors.bias
    if sequence_parallel:
        hidden = hidden.chunk(tp)[rank]
    weight = weight.chunk(tp)[rank]
    bias = None if bias is None else bias.chunk(tp)[rank]
    return [x.detach().clone().requires_grad_() for x in (hidden, weight, bias) if x is not None]


def fused_on_rank(case, tensors, leaves, function=fused_linear_kl, **changes):
    """The fused loss, or another of its signature, from this rank's leaves."""
    hidden, weight, *bias = leaves
    return function(
        hidden,
        weight,
        tensors.teacher,
        **{
            "objective": case.objective,
            "labels": tensors.labels,
            "loss_mask": tensors.loss_mask,
            "bias": bias[0] if bias else None,
            "vocab_size": case.vocab,
            "chunk_tokens": case.chunk_tokens,
            "backward": case.backward,
            "tp_group": dist.group.WORLD,
            "sequence_parallel": case.layout[1],
        }
        | changes,
    )


def errors_of_cases(rank, world_size, cases):
    """{case: worst relative error of this rank} over loss and gradients, two incoming gradients each."""
    warnings.simplefilter("ignore")
    worst = {}
    for case in cases:
        tensors = make(case)
        leaves = shard(case, tensors, rank)
        (wanted,), *wanted_gradients = dense_results(case)
        found = fused_on_rank(case, tensors, leaves).loss
        errors = [relative_error(found, wanted)]
        for upstream, gradients in zip((None, tensors.upstream), wanted_gradients):
            total = found.sum() * 2.5 if upstream is None else (found * upstream).sum()
            for mine, whole in zip(torch.autograd.grad(total, leaves, retain_graph=True), gradients):
                assert mine.is_contiguous()
                part = whole if mine.shape == whole.shape else whole.chunk(world_size)[rank]
                # A shard of padding has no largest value of its own, so the whole tensor's is the scale.
                difference = (mine - part).abs().max() / whole.abs().max()
                errors.append(float("inf") if difference.isnan() else difference.item())
        worst[case] = max(errors)
    return worst


def check_cases(cases, ranks, timeout):
    for worst in run_ranks(errors_of_cases, ranks, cases, timeout=timeout):
        assert len(worst) == len(cases)
        assert {name(case): error for case, error in worst.items() if not error <= BOUND} == {}


@pytest.mark.parametrize("ranks", [2, 4])
def test_equals_dense_autograd(ranks):
    check_cases([case for case in pairwise() if case.layout[0] == ranks], ranks, timeout=600)


@ONCE
@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
def test_equals_dense_autograd_on_the_whole_grid(ranks):
    """Every case on two ranks, every fourth on four: more ranks add nothing to a case but time."""
    check_cases(whole_grid(ranks)[:: 4 if ranks == 4 else 1], ranks, timeout=6000)
