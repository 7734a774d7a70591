"""Drawn targets: the teacher's distribution, merged, and the same numbers whoever draws."""

import pytest
import torch
import torch.distributed as dist

from megatron_kd.teacher.engine import Head
from megatron_kd.teacher.sampling import draw_from_logits, sampled_targets, uniform_numbers
from megatron_kd.teacher.vocabulary import VocabularyShard
from tests.distributed import run_ranks
from tests.teacher.test_topk_parallel import dense_logits, labels_of, shard_of


@pytest.mark.parametrize("vocab_size", [1, 7, 129, 1000])
def test_evenly_spaced_numbers_recover_the_distribution(vocab_size):
    """With u = (i + ½)/n every id is drawn n·p ± 1 times, in whatever order the columns are walked.

    The bound adds what fp32 sums of blocks are off: 1e-6 of n.
    """
    draws = 20_000
    torch.manual_seed(vocab_size)
    logits = torch.randn(5, vocab_size) * 3
    labels = torch.arange(5) % vocab_size
    uniform = ((torch.arange(draws).double() + 0.5) / draws).expand(5, -1)
    mine, shard = shard_of(logits, 0, -(-vocab_size // 128) * 128, None)
    targets = draw_from_logits(mine, labels, uniform, shard, temperatures=(1.0, 2.0))
    wanted = logits.double().log_softmax(1)
    ids, present = targets.ids.long(), targets.ids >= 0
    found = torch.zeros(5, vocab_size, dtype=torch.float64)
    found.scatter_add_(1, ids.clamp(min=0), targets.logprobs.double().exp() * present)
    assert (found - wanted.exp()).abs().max() <= 1 / draws + 1e-6
    torch.testing.assert_close(found.sum(1), torch.ones(5).double(), rtol=1e-6, atol=0)  # fp32 logs of counts
    for temperature, logz in zip((1.0, 2.0), targets.logz.T.double()):
        torch.testing.assert_close(logz, (logits.double() / temperature).logsumexp(1), rtol=3e-7, atol=5e-7)
    label = wanted.gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(targets.label_logprob.double(), label, rtol=3e-7, atol=5e-7)
    assert (targets.tail_logprob == -torch.inf).all()


def test_equal_draws_are_one_entry():
    """Three ids of equal weight in the first, middle and last block; u just under 1 is the last."""
    logits = torch.full((1, 384), -torch.inf)
    logits[0, [3, 200, 383]] = 1.0
    uniform = torch.tensor([[0.99, 0.0, 0.5, 0.9, 0.4, 1 - 2**-53]]).double()
    shard = VocabularyShard(0, 384, 384, None)
    targets = draw_from_logits(logits, torch.tensor([3]), uniform, shard, temperatures=(1.0,))
    weights = {id: p for id, p in zip(targets.ids[0].tolist(), targets.logprobs[0].exp().tolist()) if id >= 0}
    assert weights == pytest.approx({3: 1 / 6, 200: 2 / 6, 383: 3 / 6}, rel=1e-6)


def test_numbers_belong_to_the_sample():
    both = uniform_numbers(7, [4, 9], 16, 5)
    assert both.shape == (2, 16, 5)
    assert torch.equal(both[1:], uniform_numbers(7, [9], 16, 5))
    assert not torch.equal(both[0], both[1])
    assert not torch.equal(both[1:], uniform_numbers(8, [9], 16, 5))


def test_the_head_is_projected_in_chunks_without_its_padding():
    torch.manual_seed(0)
    hidden, weight = torch.randn(30, 8), torch.randn(256, 8)
    weight[200:] = 50
    uniform = uniform_numbers(0, [0], 30, 12)[0]
    labels = torch.arange(30)
    arguments = {"vocab_size": 200, "temperatures": (1.0,)}
    whole = sampled_targets(hidden, Head(weight), labels, uniform, chunk_tokens=30, **arguments)
    parts = sampled_targets(hidden, Head(weight), labels, uniform, chunk_tokens=7, **arguments)
    assert torch.equal(whole.ids, parts.ids)
    assert whole.ids.max() < 200


def draws_on_a_rank(rank, ranks):
    results = []
    for vocab_size, rows in [(1000, 512), (129, 128)]:
        mine, shard = shard_of(dense_logits(vocab_size, rounded=True), rank, rows, dist.group.WORLD)
        uniform = uniform_numbers(1, [0], 40, 20)[0]
        targets = draw_from_logits(mine, labels_of(vocab_size), uniform, shard, temperatures=(1.0, 0.5))
        results.append([part.numpy() for part in targets])
    return results


def test_two_ranks_draw_what_one_draws():
    """All arrays, bit for bit."""
    expected = []
    for vocab_size, width in [(1000, 1024), (129, 256)]:
        mine, shard = shard_of(dense_logits(vocab_size, rounded=True), 0, width, None)
        uniform = uniform_numbers(1, [0], 40, 20)[0]
        expected.append(draw_from_logits(mine, labels_of(vocab_size), uniform, shard, temperatures=(1.0, 0.5)))
    for on_rank in run_ranks(draws_on_a_rank, 2):
        for targets, wanted in zip(on_rank, expected):
            for part, array, name in zip(wanted, targets, wanted._fields):
                assert array.tobytes() == part.numpy().tobytes(), name
