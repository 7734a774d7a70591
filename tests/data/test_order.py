"""The order of samples: complete, reproducible, the same under every layout."""

import numpy as np
import pytest

from megatron_kd.data.order import AscendingOrder, SampleOrder, epoch_order


@pytest.mark.parametrize("count", [1, 15, 16, 17, 1000])
def test_an_epoch_is_a_permutation_and_epochs_differ(count):
    order = SampleOrder(count=count, block=16, seed=3, global_batch=4, window_blocks=4)
    first, second = epoch_order(order, 0), epoch_order(order, 1)
    assert sorted(first) == sorted(second) == list(range(count))
    if count >= 15:
        assert not np.array_equal(first, second)
        assert not np.array_equal(first, np.arange(count))


def test_steps_continue_across_epochs_without_a_gap():
    order = SampleOrder(count=10, block=4, seed=0, global_batch=7)
    sequence = np.concatenate([epoch_order(order, epoch) for epoch in range(5)])
    steps = np.concatenate([order.step(step) for step in range(7)])
    assert np.array_equal(steps, sequence[:49])


def test_ascending_steps_are_consecutive():
    order = AscendingOrder(count=10, block=4, seed=0, global_batch=4)
    assert [order.step(step).tolist() for step in (0, 2)] == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert [batch.tolist() for batch in order.micro_batches(1, 1, 2, 1)] == [[5], [7]]


@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 1), (1, 4), (2, 2), (4, 2), (8, 1)])
def test_a_steps_samples_do_not_depend_on_the_layout(ranks, micro_batch):
    order = SampleOrder(count=100, block=8, seed=1, global_batch=8)
    batches = [list(order.micro_batches(5, rank, ranks, micro_batch)) for rank in range(ranks)]
    assert all(len(batch) == micro_batch for rank in batches for batch in rank)
    together = np.stack([np.stack(rank) for rank in batches], axis=1).ravel()  # micro-batch by micro-batch
    assert np.array_equal(together, order.step(5))


def test_a_window_reads_whole_blocks():
    """Consecutive samples come from at most `window_blocks` blocks: a reader that keeps those decodes each once."""
    order = SampleOrder(count=256, block=8, seed=2, global_batch=8, window_blocks=2)
    windows = epoch_order(order, 0).reshape(-1, 16)
    assert all(len(set(window // 8)) == 2 for window in windows)


def test_what_does_not_divide_is_refused_with_the_numbers():
    order = SampleOrder(count=10, block=4, seed=0, global_batch=6)
    with pytest.raises(ValueError, match=r"global_batch = 6 does not divide by 4 data-parallel"):
        next(order.micro_batches(0, 0, 4, 1))
    with pytest.raises(ValueError, match="no sample"):
        SampleOrder(count=0, block=4, seed=0, global_batch=1)
