"""Targets drawn from the teacher (random sampling KD): n draws a position, equal ones merged.

    F(b)     Σ_{v in blocks 0 … b} exp(z_v − max z)     over vocabulary blocks of 128 columns
    a draw   u in [0, 1) → the block where F passes u·F(last), then the column within it likewise
    stored   each id once, log(count / n); no tail: the counts are the whole target

The expectation of count/n is the teacher's probability, so the gradient of a KL against these targets is unbiased.
They have mass 1: the loss kind is `renormalized`. The numbers u depend on the seed, the sample and the position
alone, and the same logits give the same draws under every tensor-parallel size (vocabulary.py).

Shapes: N positions, n draws, V vocabulary, Vp head rows of this rank, C positions of a chunk, T temperatures.
Memory: that of vocabulary.py, and 1 KiB a position of a chunk and draw.
Collectives, per chunk: all-gathers of the maximum [C, 1], of block sums [C, T·Vp/128 + 1] and of the draws [C, n].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_kd.cache import merge_draws
from megatron_kd.teacher.engine import Head
from megatron_kd.teacher.targets import Targets, concatenated
from megatron_kd.teacher.vocabulary import (
    SUM_BLOCK,
    VocabularyShard,
    block_sums,
    blocks_in_order,
    gather,
    local_logit,
    project,
    require_temperatures,
    vocabulary_shard,
)


def uniform_numbers(seed: int, samples: Iterable[int], positions: int, draws: int) -> Tensor:
    """[samples, positions, draws] fp64 in [0, 1): those of a sample depend on the seed and its number alone."""
    generators = (np.random.Generator(np.random.Philox(key=[seed, sample])) for sample in samples)
    return torch.from_numpy(np.stack([generator.random((positions, draws)) for generator in generators]))


def sampled_targets(
    hidden: Tensor,
    head: Head,
    labels: Tensor,
    uniform: Tensor,
    *,
    vocab_size: int,
    temperatures: Sequence[float] = (1.0,),
    chunk_tokens: int = 512,
    group: dist.ProcessGroup | None = None,
) -> Targets:
    """The drawn targets of N positions; K is the number of draws, entries beyond the distinct ids are absent.

    Args:
        hidden: [N, D] final hidden states, the same on every rank of `group`.
        head: this rank's rows of the output projection.
        labels: [N] the next token of each position.
        uniform: [N, n] from `uniform_numbers`.
        vocab_size: true size of the vocabulary; head rows beyond it are padding.
        temperatures: whose normalisers are wanted; 1 comes first. Draws are at temperature 1.
        chunk_tokens: positions whose logits exist at a time.
        group: tensor-parallel ranks, each holding as many consecutive head rows.

    Raises:
        ValueError: a head too small for the vocabulary, no temperature 1 in front.
    """
    require_temperatures(temperatures)
    shard = vocabulary_shard(head, vocab_size, group)
    return concatenated(
        draw_from_logits(logits, labels[rows], uniform[rows], shard, temperatures=temperatures)
        for rows, logits in project(hidden, head, shard, chunk_tokens)
    )


def draw_from_logits(
    logits: Tensor, labels: Tensor, uniform: Tensor, shard: VocabularyShard, *, temperatures: Sequence[float]
) -> Targets:
    """The drawn targets of one chunk.

    Args:
        logits: fp32 [C, width], this rank's columns, padding −inf.
        labels: [C] ids.
        uniform: [C, n].
        shard: which columns these are.
        temperatures: 1 first.
    """
    largest = gather(logits.amax(dim=1, keepdim=True), shard).amax(dim=1)  # [C, 1]
    sums = [block_sums(logits, largest, temperature) for temperature in temperatures]
    gathered = gather(torch.cat([*sums, local_logit(logits, labels, shard)[:, None]], dim=1), shard)
    label_logit = gathered[:, :, -1].amax(dim=1).double()
    width = sums[0].shape[1]
    cumulated = [
        blocks_in_order(gathered[:, :, index * width : (index + 1) * width], shard).cumsum(dim=1)
        for index in range(len(temperatures))
    ]
    logz = [largest[:, 0].double() / t + total[:, -1].log() for t, total in zip(temperatures, cumulated)]
    draws = gather(_draw(logits, largest, cumulated[0], uniform, shard), shard).amax(dim=1)
    ids, logprobs = (torch.from_numpy(array).to(logits.device) for array in merge_draws(draws.cpu().numpy()))
    return Targets(
        ids=ids,
        logprobs=logprobs,
        tail_logprob=torch.full_like(largest[:, 0], -torch.inf),
        logz=torch.stack(logz, dim=1).float(),
        label_logprob=(label_logit - logz[0]).float(),
    )


def _draw(logits: Tensor, largest: Tensor, cumulated: Tensor, uniform: Tensor, shard: VocabularyShard) -> Tensor:
    """[C, n] drawn ids; −1 where the drawn block is another rank's."""
    total = cumulated[:, -1:]
    mass = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))  # u just under 1 may round to all
    block = torch.searchsorted(cumulated, mass, right=True)
    before = torch.where(block > 0, cumulated.gather(1, (block - 1).clamp(min=0)), 0)
    local = block - shard.first // SUM_BLOCK
    here = (local >= 0) & (local < logits.shape[1] // SUM_BLOCK)
    blocked = logits.unflatten(1, (-1, SUM_BLOCK))
    columns = blocked.gather(1, torch.where(here, local, 0)[:, :, None].expand(-1, -1, SUM_BLOCK))  # [C, n, 128]
    weights = (columns - largest[:, :, None]).exp_()
    passed = (weights.double().cumsum(dim=2) <= (mass - before)[:, :, None]).sum(dim=2)
    # A block's fp32 sum can exceed that of its columns by a rounding: such a draw is its last possible column.
    last = SUM_BLOCK - 1 - (weights > 0).flip(2).int().argmax(dim=2)
    return torch.where(here, block * SUM_BLOCK + torch.minimum(passed, last), -1)
