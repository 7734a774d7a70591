"""Which samples a step trains on: a function of the seed alone, whatever the number of ranks.

A step's global batch is a slice of one global sequence of sample numbers; data-parallel rank r of R takes, of every
micro-batch-sized group of R·b samples, the r-th b. The same samples meet in the same step under any layout, after any
restart.

Within an epoch, blocks of the cache are shuffled and samples are shuffled within windows of a few blocks: reads stay
whole-block, and a window mixes thousands of samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True)
class SampleOrder:
    """The global sequence of samples, addressed by step."""

    count: int  # samples in the cache
    block: int  # samples stored together
    seed: int
    global_batch: int  # samples a step
    window_blocks: int = 8  # blocks that are mixed with one another

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError("the cache holds no sample; at least one is needed to train")

    def step(self, number: int) -> np.ndarray:
        """The samples of one step's global batch; epochs follow one another without a gap. [global_batch] int64."""
        first = number * self.global_batch
        epochs = range(first // self.count, (first + self.global_batch - 1) // self.count + 1)
        start = first - epochs[0] * self.count
        return np.concatenate([epoch_order(self, epoch) for epoch in epochs])[start : start + self.global_batch]

    def micro_batches(self, number: int, rank: int, ranks: int, micro_batch: int) -> Iterator[np.ndarray]:
        """The micro-batches of one data-parallel rank in one step, each [micro_batch] int64."""
        if self.global_batch % (ranks * micro_batch):
            raise ValueError(
                f"train.global_batch = {self.global_batch} does not divide by {ranks} data-parallel rank(s) · "
                f"train.micro_batch = {micro_batch}"
            )
        yield from self.step(number).reshape(-1, ranks, micro_batch)[:, rank]


class AscendingOrder(SampleOrder):
    """Sample after sample, once: the order of whatever numbered them."""

    def step(self, number: int) -> np.ndarray:
        """The samples of one step's global batch, which may lie beyond the last one. [global_batch] int64."""
        return np.arange(number * self.global_batch, (number + 1) * self.global_batch)


@lru_cache(maxsize=2)  # a step needs one epoch, or two where it straddles their boundary
def epoch_order(order: SampleOrder, number: int) -> np.ndarray:
    """Every sample once, in the order of this epoch; [count] int64."""
    random = np.random.Generator(np.random.PCG64([order.seed, number]))
    blocks = random.permutation(-(-order.count // order.block))
    pieces = []
    for start in range(0, len(blocks), order.window_blocks):
        window = blocks[start : start + order.window_blocks]
        samples = (window[:, None] * order.block + np.arange(order.block)).ravel()
        pieces.append(random.permutation(samples[samples < order.count]))
    return np.concatenate(pieces)
