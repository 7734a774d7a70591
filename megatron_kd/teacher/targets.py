"""What the cache stores of each position, whichever way its entries were chosen.

Shapes: N positions, K entries, T temperatures.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor


class Targets(NamedTuple):
    """What the cache stores of N positions; the fields are named as `CacheWriter.write_block` wants them."""

    ids: Tensor  # [N, K] int32; top-K by falling log-probability, ties by lowest id; −1: no entry
    logprobs: Tensor  # [N, K] fp32, of the whole vocabulary's softmax at temperature 1; where drawn, log(count / draws)
    tail_logprob: Tensor  # [N] fp32: log of the mass outside the entries; −inf where there is none
    logz: Tensor  # [N, T] fp32: logsumexp(z/τ)
    label_logprob: Tensor  # [N] fp32, of the whole vocabulary's softmax


def concatenated(chunks: Iterable[Targets]) -> Targets:
    """The targets of consecutive chunks as one."""
    return Targets(*(torch.cat(parts) for parts in zip(*chunks)))
