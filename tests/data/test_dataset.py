"""The loader hands out the right samples, ahead of time, and its errors where they can be seen."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_kd.cache import CacheBatch, CacheError
from megatron_kd.config import LossConfig
from megatron_kd.data.dataset import BatchLoader, make_batch
from megatron_kd.data.order import SampleOrder

S, K = 6, 3


class NumberedCache:
    """Every value says which sample and position it belongs to."""

    def __init__(self, broken=None):
        self.broken = broken

    def read(self, samples, k=None, temperature=1.0):
        if self.broken in samples:
            raise CacheError(f"block of sample {self.broken} is damaged")
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


def _loader(cache):
    order = SampleOrder(count=10, block=4, seed=0, global_batch=4)
    settings = {"rank": 1, "ranks": 2, "micro_batch": 2, "first_step": 3, "packed": False}
    return order, BatchLoader(cache, order, LossConfig(k=2, temperature=2.0), device=torch.device("cpu"), **settings)


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


def test_packed_batches_are_the_same_values_end_to_end():
    read = NumberedCache().read(np.array([7, 2]))
    apart = make_batch(np.array([7, 2]), read, torch.device("cpu"), packed=False)
    joined = make_batch(np.array([7, 2]), read, torch.device("cpu"), packed=True)
    assert joined.tokens.shape == (1, 2 * S)
    for name in ("tokens", "labels", "loss_mask", "label_logprob"):
        assert torch.equal(getattr(joined, name).flatten(), getattr(apart, name).flatten())
    assert torch.equal(joined.teacher.ids[0], apart.teacher.ids.flatten(0, 1))
    assert joined.attention.packed.cu_seqlens_q.tolist() == [0, 4, 6, 10, 12]


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
