"""From hidden states to the stored targets: top-K log-probabilities, tail, normalisers, the label's log-probability.

For a chunk of C positions, with z = h·Wᵀ + b over the V true columns, S the K largest entries and τ a temperature:

    keys     64-bit integers that sort entries by falling logit, ties by lowest id; their K largest are S
    tail_τ   z_K/τ + log Σ_{v ∉ S} exp((z_v − z_K)/τ)     S masked out: nothing is computed as 1 − (something near 1)
    logZ_τ   logaddexp(tail_τ, logsumexp_S(z/τ))
    stored   z_S − logZ_1,  tail_1 − logZ_1,  logZ_τ for every τ,  z_label − logZ_1

The K-th logit z_K bounds every logit of the tail, so its sum neither overflows nor loses its largest terms. It is
summed in vocabulary blocks of 128, in fp32, and over the blocks in fp64 in their order, however many ranks hold them:
the same logits give the same bytes under every tensor-parallel size.

Shapes: N positions, D hidden, Vp vocabulary rows on this rank, K entries, T temperatures, C positions of a chunk.
Memory: one chunk of fp32 logits [C, Vp] in a buffer that is reused, a scratch of at most 64 MiB, O(N·K).
Collectives, per chunk: an all-gather of keys [C, K] and one of block sums [C, T·Vp/128 + 1].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_kd.teacher.engine import Head

SUM_BLOCK = 128  # columns summed as one; Megatron pads a rank's columns to a multiple of it
_CANDIDATE_BLOCK = 32  # columns whose maximum stands for them in the first round of the top-K
_SCRATCH_BYTES = 64 << 20
_LOW = 0xFFFFFFFF


class Targets(NamedTuple):
    """What the cache stores of N positions."""

    ids: Tensor  # [N, K] int32, by falling log-probability, ties by lowest id
    logprobs: Tensor  # [N, K] fp32, of the whole vocabulary's softmax at temperature 1
    tail_logprob: Tensor  # [N] fp32: log of the mass outside the entries; −inf where there is none
    logz: Tensor  # [N, T] fp32: logsumexp(z/τ)
    label_logprob: Tensor  # [N] fp32


class VocabularyShard(NamedTuple):
    """The columns of the vocabulary that this rank holds."""

    first: int  # id of its first column
    columns: int  # true ones among them
    vocab_size: int  # V, over all ranks
    group: dist.ProcessGroup | None  # the ranks that hold the others; None: there are none


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
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; at least 1 is needed")
    if not temperatures or temperatures[0] != 1.0:
        raise ValueError(f"temperatures are {tuple(temperatures)}; the first must be 1")
    shard = vocabulary_shard(head, vocab_size, group)
    chunks = [
        targets_of_logits(logits, labels[rows], shard, k=k, temperatures=temperatures)
        for rows, logits in project(hidden, head, shard, chunk_tokens)
    ]
    return Targets(*(torch.cat(parts) for parts in zip(*chunks)))


def vocabulary_shard(head: Head, vocab_size: int, group: dist.ProcessGroup | None) -> VocabularyShard:
    """Which columns the head's rows on this rank are. Raises `ValueError` when the ranks' rows do not suffice."""
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    rows = head.weight.shape[0]
    if rows * ranks < vocab_size:
        raise ValueError(
            f"the head has {rows} rows on each of {ranks} rank(s) but the tokenizer has {vocab_size} ids; "
            "teacher and tokenizer do not belong together"
        )
    if ranks > 1 and rows % SUM_BLOCK:
        raise ValueError(f"the head has {rows} rows on each of {ranks} ranks; a multiple of {SUM_BLOCK} is needed")
    first = rank * rows
    return VocabularyShard(first, max(min(vocab_size - first, rows), 0), vocab_size, group)


def project(hidden: Tensor, head: Head, shard: VocabularyShard, chunk_tokens: int) -> Iterator[tuple[slice, Tensor]]:
    """Logits of consecutive chunks: (rows, fp32 [C, Vp rounded up to whole blocks]) with −inf in padding columns.

    All chunks share one buffer: what is yielded is overwritten by the next.
    """
    width = -(-head.weight.shape[0] // SUM_BLOCK) * SUM_BLOCK  # the same on every rank
    count = len(hidden)
    buffer = hidden.new_full((min(chunk_tokens, count), width), -torch.inf, dtype=torch.float32)
    weight = head.weight[: shard.columns].T
    for begin in range(0, count, chunk_tokens):
        rows = slice(begin, min(begin + chunk_tokens, count))
        logits = buffer[: rows.stop - begin]
        columns = logits[:, : shard.columns]
        if weight.dtype == torch.float32:
            torch.mm(hidden[rows], weight, out=columns)
        else:
            columns.copy_(hidden[rows] @ weight)
        if head.bias is not None:
            columns += head.bias[: shard.columns]
        yield rows, logits


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
    label_logit = _local_logit(logits, labels, shard)
    entries, ids = _unpack(_largest(_gather(_top_keys(logits, k, shard), shard).flatten(1), k))
    _mask_out(logits, ids, shard)
    smallest = entries[:, -1:]
    sums = [_block_sums(logits, smallest, temperature) for temperature in temperatures]
    gathered = _gather(torch.cat([*sums, label_logit[:, None]], dim=1), shard)  # [C, ranks, T·blocks + 1]
    label_logit = gathered[:, :, -1].amax(dim=1).double()
    blocks = -(-shard.vocab_size // SUM_BLOCK)
    entries = entries.double()
    tails, normalisers = [], []
    for index, temperature in enumerate(temperatures):
        per_rank = gathered[:, :, index * sums[0].shape[1] : (index + 1) * sums[0].shape[1]]
        total = per_rank.flatten(1)[:, :blocks].double().sum(dim=1)
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


def _gather(local: Tensor, shard: VocabularyShard) -> Tensor:
    """[C, n] of every rank as [C, ranks, n]."""
    if shard.group is None:
        return local[:, None]
    ranks = dist.get_world_size(shard.group)
    everyone = local.new_empty((ranks * len(local), local.shape[1]))
    dist.all_gather_into_tensor(everyone, local.contiguous(), group=shard.group)
    return everyone.unflatten(0, (ranks, -1)).transpose(0, 1)


def _local_logit(logits: Tensor, ids: Tensor, shard: VocabularyShard) -> Tensor:
    """[C] the logit of one id per row; −inf where another rank holds it."""
    column = ids - shard.first
    here = (column >= 0) & (column < shard.columns)
    found = logits.gather(1, torch.where(here, column, 0)[:, None])[:, 0]
    return torch.where(here, found, -torch.inf)


def _mask_out(logits: Tensor, ids: Tensor, shard: VocabularyShard) -> None:
    """Writes −inf over those of the ids [C, K] that are on this rank."""
    column = ids - shard.first
    here = (column >= 0) & (column < shard.columns)
    bound = torch.where(here, -torch.inf, torch.inf)  # min with +inf leaves a column as it is
    logits.scatter_reduce_(1, torch.where(here, column, 0), bound, "amin")


def _block_sums(logits: Tensor, reference: Tensor, temperature: float) -> Tensor:
    """[C, blocks] sums of exp((z − reference)/τ) over blocks of 128 columns."""
    rows = max(_SCRATCH_BYTES // (4 * logits.shape[1]), 1)
    parts = [
        (part - bound).div_(temperature).exp_().unflatten(1, (-1, SUM_BLOCK)).sum(dim=2)
        for part, bound in zip(logits.split(rows), reference.split(rows))
    ]
    return torch.cat(parts)
