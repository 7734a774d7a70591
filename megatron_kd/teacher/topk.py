"""From hidden states to the stored targets: top-K log-probabilities, tail, normalisers, the label's log-probability.

For a chunk of C positions, with z = h·Wᵀ + b over the V true columns, S the K largest entries and τ a temperature:

    keys     64-bit integers that sort entries by falling logit, ties by lowest id; their K largest are S
    tail_τ   z_K/τ + log Σ_{v ∉ S} exp((z_v − z_K)/τ)     S masked out: nothing is computed as 1 − (something near 1)
    logZ_τ   logaddexp(tail_τ, logsumexp_S(z/τ))
    stored   z_S − logZ_1,  tail_1 − logZ_1,  logZ_τ for every τ,  z_label − logZ_1

The K-th logit z_K bounds every logit of the tail, so its sum neither overflows nor loses its largest terms. The same
logits give the same bytes under every tensor-parallel size (vocabulary.py).

Shapes: N positions, D hidden, Vp vocabulary rows on this rank, K entries, T temperatures, C positions of a chunk.
Memory: that of vocabulary.py, and O(N·K).
Collectives, per chunk: an all-gather of keys [C, K] and one of block sums [C, T·Vp/128 + 1].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_kd.teacher.engine import Head
from megatron_kd.teacher.targets import Targets, concatenated
from megatron_kd.teacher.vocabulary import (
    VocabularyShard,
    block_sums,
    blocks_in_order,
    gather,
    local_logit,
    project,
    require_temperatures,
    vocabulary_shard,
)

_CANDIDATE_BLOCK = 32  # columns whose maximum stands for them in the first round of the top-K
_LOW = 0xFFFFFFFF


def topk_targets(
    hidden: Tensor,
    head: Head,
    labels: Tensor,
    *,
    k: int,
    vocab_size: int,
    temperatures: Sequence[float] = (1.0,),
    chunk_tokens: int = 512,
    group: dist.ProcessGroup | None = None,
) -> Targets:
    """The targets of N positions, projected `chunk_tokens` at a time.

    Args:
        hidden: [N, D] final hidden states, the same on every rank of `group`.
        head: this rank's rows of the output projection.
        labels: [N] the next token of each position.
        k: entries to keep.
        vocab_size: true size of the vocabulary; head rows beyond it are padding.
        temperatures: whose normalisers are wanted; 1 comes first.
        chunk_tokens: positions whose logits exist at a time.
        group: tensor-parallel ranks, each holding as many consecutive head rows.

    Raises:
        ValueError: k beyond the vocabulary, a head too small for it, no temperature 1 in front.
    """
    if not 1 <= k <= vocab_size:
        raise ValueError(f"k is {k} but the vocabulary has {vocab_size} entries; 1 ≤ k ≤ {vocab_size} is needed")
    require_temperatures(temperatures)
    shard = vocabulary_shard(head, vocab_size, group)
    return concatenated(
        targets_of_logits(logits, labels[rows], shard, k=k, temperatures=temperatures)
        for rows, logits in project(hidden, head, shard, chunk_tokens)
    )


def targets_of_logits(
    logits: Tensor, labels: Tensor, shard: VocabularyShard, *, k: int, temperatures: Sequence[float]
) -> Targets:
    """The targets of one chunk.

    Args:
        logits: fp32 [C, width], this rank's columns, padding −inf; columns of the K entries hold −inf on return.
        labels: [C] ids.
        shard: which columns these are.
        k: entries to keep.
        temperatures: 1 first.
    """
    label_logit = local_logit(logits, labels, shard)
    entries, ids = _unpack(_largest(gather(_top_keys(logits, k, shard), shard).flatten(1), k))
    _mask_out(logits, ids, shard)
    smallest = entries[:, -1:]
    sums = [block_sums(logits, smallest, temperature) for temperature in temperatures]
    gathered = gather(torch.cat([*sums, label_logit[:, None]], dim=1), shard)  # [C, ranks, T·blocks + 1]
    label_logit = gathered[:, :, -1].amax(dim=1).double()
    entries = entries.double()
    tails, normalisers = [], []
    for index, temperature in enumerate(temperatures):
        width = sums[index].shape[1]
        total = blocks_in_order(gathered[:, :, index * width : (index + 1) * width], shard).sum(dim=1)
        tail = entries[:, -1] / temperature + total.log()
        tails.append(tail)
        normalisers.append(torch.logaddexp(tail, (entries / temperature).logsumexp(dim=1)))
    logz = normalisers[0]
    return Targets(
        ids=ids.int(),
        logprobs=(entries - logz[:, None]).float(),
        tail_logprob=(tails[0] - logz).float(),
        logz=torch.stack(normalisers, dim=1).float(),
        label_logprob=(label_logit - logz).float(),
    )


def _top_keys(logits: Tensor, k: int, shard: VocabularyShard) -> Tensor:
    """[C, min(k, width)] keys of this rank's largest entries.

    The K best entries lie in the K blocks with the best maxima: a block left out has K entries better than its own
    best before it, ties by lowest id included. So the vocabulary is read once, for its maxima.
    """
    blocked = logits.unflatten(1, (-1, _CANDIDATE_BLOCK))  # [C, blocks, 32]
    numbers = torch.arange(blocked.shape[1], device=logits.device)
    within = torch.arange(_CANDIDATE_BLOCK, device=logits.device)
    maxima = _largest(_pack(blocked.amax(dim=2), numbers), k)
    _, chosen = _unpack(maxima)
    candidates = blocked.gather(1, chosen[:, :, None].expand(-1, -1, _CANDIDATE_BLOCK))
    ids = chosen[:, :, None] * _CANDIDATE_BLOCK + within + shard.first
    return _largest(_pack(candidates, ids).flatten(1), k)


def _pack(values: Tensor, ids: Tensor) -> Tensor:
    """int64 keys whose order is: larger value first, then lower id.

    The upper half is the float's bits made monotone (negative floats have theirs inverted), the lower the id counted
    down. Adding 0.0 turns −0.0 into 0.0, which it equals.
    """
    bits = (values + 0.0).view(torch.int32)
    return (_monotone(bits).long() << 32) | (_LOW - ids)


def _unpack(keys: Tensor) -> tuple[Tensor, Tensor]:
    """(values fp32, ids int64) of keys."""
    return _monotone((keys >> 32).int()).view(torch.float32), _LOW - (keys & _LOW)


def _monotone(bits: Tensor) -> Tensor:
    """Float bits ↔ integers in the floats' order; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _largest(keys: Tensor, k: int) -> Tensor:
    return keys.topk(min(k, keys.shape[1]), dim=1).values


def _mask_out(logits: Tensor, ids: Tensor, shard: VocabularyShard) -> None:
    """Writes −inf over those of the ids [C, K] that are on this rank."""
    column = ids - shard.first
    here = (column >= 0) & (column < shard.columns)
    bound = torch.where(here, -torch.inf, torch.inf)  # min with +inf leaves a column as it is
    logits.scatter_reduce_(1, torch.where(here, column, 0), bound, "amin")
