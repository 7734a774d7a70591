"""The loader hands out the right samples, ahead of time, and its errors where they can be seen."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_kd.cache import CacheBatch, CacheError, TokenBatch
from megatron_kd.config import LossConfig
from megatron_kd.data.dataset import BatchLoader, Place, make_batch, take_context, targets_of, with_targets
from megatron_kd.data.order import SampleOrder
from tests.distributed import run_ranks

S, K = 8, 3
CPU = torch.device("cpu")


class NumberedCache:
    """Every value says which sample and position it belongs to."""

    manifest = SimpleNamespace(k=K)

    def __init__(self, broken=None):
        self.broken, self.reads = broken, 0

    def read(self, samples, k=None, temperature=1.0):
        if self.broken in samples:
            raise CacheError(f"block of sample {self.broken} is damaged")
        self.reads += 1
        number = np.asarray(samples)[:, None]
        place = 100 * number + np.arange(S)
        return CacheBatch(
            tokens=(100 * number + np.arange(S + 1)).astype(np.int32),
            ids=np.broadcast_to(place[..., None], (len(samples), S, k or K)).astype(np.int32),
            logprobs=np.zeros((len(samples), S, k or K), np.float32) - temperature,
            tail_logprob=place.astype(np.float32),
            label_logprob=place.astype(np.float32),
            loss_mask=(place % 2).astype(np.uint8),
            segment=np.broadcast_to(np.arange(S) // 4, place.shape).astype(np.int32),
        )

    def read_tokens(self, samples):
        reads, batch = self.reads, self.read(samples)
        self.reads = reads
        return TokenBatch(batch.tokens, batch.loss_mask, batch.segment)


SECOND_OF_TWO = Place(rank=1, ranks=2)


def _loader(cache, place=SECOND_OF_TWO):
    order = SampleOrder(count=10, block=4, seed=0, global_batch=4)
    settings = {"micro_batch": 2, "first_step": 3, "device": CPU, "packed": False}
    return order, BatchLoader(cache, order, LossConfig(k=2, temperature=2.0), place, **settings)


def test_batches_are_this_ranks_samples_from_the_given_step_on_with_targets_in_place():
    order, loader = _loader(NumberedCache())
    for step in (3, 4, 5):
        batch = next(loader)
        expected = order.step(step).reshape(2, 2)[1]
        assert batch.samples == tuple(expected)
        place = torch.from_numpy(100 * expected[:, None] + np.arange(S))
        assert torch.equal(batch.tokens, place)
        assert torch.equal(batch.labels, place + 1)
        assert torch.equal(batch.teacher.ids[..., 1].long(), place)  # the target of position t stands at t
        assert batch.teacher.ids.shape[-1] == 2
        assert (batch.teacher.logprobs == -2).all()
        assert torch.equal(batch.loss_mask, (place % 2).float())
        assert list(loader.recent_samples) == list(expected)
    loader.close()


def batch_of(samples, *, packed):
    read = NumberedCache().read(np.array(samples))
    return with_targets(make_batch(np.array(samples), read, CPU, packed=packed), targets_of(read, CPU))


def test_packed_batches_are_the_same_values_end_to_end():
    apart, joined = batch_of([7, 2], packed=False), batch_of([7, 2], packed=True)
    assert joined.tokens.shape == (1, 2 * S)
    for name in ("tokens", "labels", "loss_mask", "label_logprob"):
        assert torch.equal(getattr(joined, name).flatten(), getattr(apart, name).flatten())
    assert torch.equal(joined.teacher.ids[0], apart.teacher.ids.flatten(0, 1))
    assert joined.attention.packed.cu_seqlens_q.tolist() == [0, 4, 8, 12, 16]


@pytest.mark.parametrize("packed", [False, True])
def test_context_parallel_ranks_get_targets_labels_and_tokens_of_the_same_positions(packed):
    """Documents of four positions are cut in four where they are packed, whole samples of eight where they are not."""
    places = {False: [[0, 1, 6, 7], [2, 3, 4, 5]], True: [[0, 3, 4, 7], [1, 2, 5, 6]]}[packed]
    batch = batch_of([7, 2], packed=packed)
    for rank in range(2):
        mine = take_context(batch, rank, 2)
        positions = torch.tensor([[100 * sample + place for place in places[rank]] for sample in (7, 2)])
        positions = positions.reshape(1, -1) if packed else positions
        assert torch.equal(mine.tokens, positions)
        assert torch.equal(mine.labels, positions + 1)
        assert torch.equal(mine.teacher.ids[..., 0].long(), positions)
        assert torch.equal(mine.teacher.tail_logprob, positions.float())
        assert torch.equal(mine.label_logprob, positions.float())
        assert torch.equal(mine.position_ids, positions % 100)
        assert mine.attention is batch.attention


def batches_of_sharers(rank, world_size):
    """Two ranks on the same samples, of which the second must not need to read a target."""
    cache = NumberedCache()
    _, loader = _loader(cache, Place(rank=0, ranks=2, sharers=torch.distributed.group.WORLD))
    batches = [next(loader) for _ in range(3)]
    loader.close()
    return cache.reads, [
        (b.samples, b.tokens.numpy(), *(x.numpy() for x in b.teacher), b.label_logprob.numpy()) for b in batches
    ]


def test_one_rank_reads_targets_and_the_others_receive_them():
    (reads, wanted), (other_reads, found) = run_ranks(batches_of_sharers, 2)
    assert reads >= 3
    assert other_reads == 0
    for mine, theirs in zip(wanted, found):
        for x, y in zip(mine, theirs):
            np.testing.assert_array_equal(x, y)


def test_a_stage_without_the_head_reads_no_target():
    cache = NumberedCache()
    _, loader = _loader(cache, Place(rank=1, ranks=2, head=False))
    batch = next(loader)
    loader.close()
    assert cache.reads == 0
    assert batch.teacher is None
    assert batch.label_logprob is None
    assert batch.tokens.shape == (2, S)


def test_a_readers_error_is_raised_where_the_batch_was_to_be_taken():
    order, loader = _loader(SimpleNamespace(read=NumberedCache().read))
    broken = int(order.step(4).reshape(2, 2)[1][0])
    loader.close()
    _, loader = _loader(NumberedCache(broken))
    if broken not in order.step(3).reshape(2, 2)[1]:
        next(loader)
    with pytest.raises(CacheError, match=f"sample {broken} is damaged"):
        next(loader)
    loader.close()
