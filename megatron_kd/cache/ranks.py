"""Ids as ranks: small numbers for the ids that a teacher is likely to list.

Which ids are among the top K depends on the token just read. The table holds, for each input token x, a list of the ids
that followed it most often in the first block (its context), and one list of the whole vocabulary by frequency:

    rank = place of the id in the list of x, where it is there
           length of the list of x + place in id_by_rank, elsewhere

Measured on real logits this takes a tenth off the ids' bytes against id_by_rank alone. Reading back, with
L(x) = context_start[x+1] − context_start[x], is one gather:

    id = context_ids[context_start[x] + rank] if rank < L(x) else id_by_rank[rank − L(x)]

The table follows from the first block's targets alone, so that every run makes the same.

Shapes: n samples, S positions, K entries, V vocabulary, E context ids in all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_kd.cache.schema import CONTEXT_LIMIT, TABLES, CacheError, rank_bytes


@dataclass(frozen=True)
class RankTable:
    """The lists."""

    id_by_rank: np.ndarray  # int32 [V], a permutation
    context_start: np.ndarray  # int32 [V+1], where the list of each token begins
    context_ids: np.ndarray  # int32 [E+1]; the last is −1 and belongs to no list

    def __post_init__(self) -> None:
        for name in TABLES:
            object.__setattr__(self, name, np.ascontiguousarray(getattr(self, name), "<i4"))

    @classmethod
    def without_contexts(cls, id_by_rank: np.ndarray) -> RankTable:
        """Ranks by frequency alone."""
        return cls(id_by_rank, np.zeros(id_by_rank.size + 1), np.full(1, -1))

    def check(self, vocab_size: int) -> None:
        """Raise unless the table belongs to a vocabulary of this size."""
        if not np.array_equal(np.sort(self.id_by_rank), np.arange(vocab_size)):
            raise ValueError(
                f"id_by_rank of shape {self.id_by_rank.shape} is not a permutation of the {vocab_size} ids: "
                "make it with rank_table or frequency_table"
            )
        lengths, ids = np.diff(self.context_start), self.context_ids[:-1]
        if (
            self.context_start.shape != (vocab_size + 1,)
            or self.context_start[0] != 0
            or self.context_start[-1] != ids.size
            or not ((lengths >= 0) & (lengths <= CONTEXT_LIMIT)).all()
            or not ((ids >= 0) & (ids < vocab_size)).all()
            or self.context_ids[-1] != -1
        ):
            raise ValueError("context_start and context_ids are no lists of ids: make them with rank_table")


def frequency_table(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """Vocabulary ids by falling frequency in `ids`, ties by lowest id: int32 [vocab_size].

    Args:
        ids: integers of any shape, token ids or top-K entries of the first block; negative ones are ignored.
        vocab_size: V; every id lies below it.
    """
    flat = np.asarray(ids).reshape(-1)
    flat = flat[flat >= 0]
    if flat.size and flat.max() >= vocab_size:
        raise ValueError(f"ids hold {flat.max()} but vocab_size is {vocab_size}: every id must lie below it")
    return np.argsort(-np.bincount(flat, minlength=vocab_size), kind="stable").astype(np.int32)


def rank_table(
    tokens: np.ndarray, ids: np.ndarray, vocab_size: int, minimum: int = 2, positions: int = 1 << 16
) -> RankTable:
    """The table of some targets, those of the first block.

    Args:
        tokens: [n, S+1]; position t's entries follow tokens[:, t].
        ids: [n, S, K] top-K entries, −1 = absent.
        vocab_size: V.
        minimum: how often an id must have followed a token to enter its list.
        positions: look at no more than the samples that begin within so many positions: twice as many take two
            percent off the ids, and the lists should stay in the processor's cache.
    """
    tokens, ids = np.asarray(tokens), np.asarray(ids)
    looked_at = -(-positions // ids.shape[1])
    tokens, ids = tokens[:looked_at], ids[:looked_at]
    id_by_rank = frequency_table(ids, vocab_size)
    rank = np.empty(vocab_size, np.int64)
    rank[id_by_rank] = np.arange(vocab_size)
    pairs = (tokens[:, :-1, None].astype(np.int64) * vocab_size + ids)[ids >= 0]
    pair, count = np.unique(pairs, return_counts=True)
    pair, count = pair[count >= minimum], count[count >= minimum]
    token, followed_by = pair // vocab_size, pair % vocab_size
    order = np.lexsort((rank[followed_by], -count, token))
    token, followed_by = token[order], followed_by[order]
    first = np.searchsorted(token, np.arange(vocab_size + 1))
    kept = np.arange(token.size) - first[token] < CONTEXT_LIMIT
    start = np.searchsorted(token[kept], np.arange(vocab_size + 1))
    return RankTable(id_by_rank, start, np.append(followed_by[kept], -1))


class RankCoder:
    """Ids ↔ byte planes of their ranks, [n, S, K] ↔ uint8 [n, P, S, K], lowest byte first. Absent: all bits set."""

    def __init__(self, table: RankTable) -> None:
        v, entries = table.id_by_rank.size, table.context_ids.size - 1
        self.planes = rank_bytes(v)
        self.dtype = np.dtype("<u2" if self.planes == 2 else "<u4")  # of the numbers that the planes make up
        self._table = table
        self._rank = np.empty(v, np.int64)
        self._rank[table.id_by_rank] = np.arange(v)
        self._length = np.diff(table.context_start).astype(self.dtype)
        # One gather serves both lists: the contexts, then the vocabulary, then −1 for whatever lies beyond.
        self._lists = np.concatenate([table.context_ids[:-1], table.id_by_rank, np.full(1, -1, np.int32)])
        # What to add to a rank beyond the context's list, and what to add further to one within it.
        self._elsewhere = entries - self._length.astype(np.int32)
        self._back = table.context_start[:-1] - self._elsewhere

    def encode(self, tokens: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Byte planes of the ranks of `ids` after `tokens` [n, S]."""
        k, v = ids.shape[-1], self._rank.size
        flat_tokens, flat_ids = tokens.reshape(-1), ids.reshape(-1, k)
        order = np.argsort(flat_tokens, kind="stable")
        distinct, first = np.unique(flat_tokens[order], return_index=True)
        flat_ranks = np.empty(flat_ids.shape, np.int64)
        of_id = np.empty(v + 1, np.int64)  # ranks after one token; the last stands for id −1
        for token, rows in zip(distinct.tolist(), np.split(order, first[1:])):
            start, length = self._table.context_start[token], self._length[token]
            np.add(self._rank, length, out=of_id[:-1])
            of_id[self._table.context_ids[start : start + length]] = np.arange(length)
            of_id[-1] = 256**self.planes - 1
            flat_ranks[rows] = of_id[flat_ids[rows]]
        ranks = flat_ranks.reshape(ids.shape)
        return np.stack([(ranks >> 8 * p).astype(np.uint8) for p in range(self.planes)], axis=1)

    def decode(self, tokens: np.ndarray, rank: np.ndarray, out: np.ndarray, scratch: RankScratch) -> None:
        """Ids of one sample, −1 = absent.

        Args:
            tokens: [S].
            rank: [S, K] of type `dtype`.
            out: int32 [S, K], the ids.
            scratch: memory for what comes in between.
        """
        inside, place = scratch.inside, scratch.place
        np.less(rank, self._length[tokens][:, None], out=inside)
        np.multiply(inside.view(np.int8), self._back[tokens][:, None], out=place)
        place += self._elsewhere[tokens][:, None]
        np.add(place, rank, out=place, casting="unsafe")  # an absent rank of 3 bytes stays far below 2³¹
        # 32 bits keep the arithmetic above in the processor's cache; a gather wants machine words.
        np.copyto(scratch.word, place)
        # An absent entry's rank exceeds every length plus V, so it is clipped onto the −1 at the end.
        np.take(self._lists, scratch.word, mode="clip", out=out)


class RankScratch:
    """Memory for decoding [S, K] ranks, of one thread."""

    def __init__(self, s: int, k: int) -> None:
        self.inside = np.empty((s, k), bool)
        self.place = np.empty((s, k), np.int32)
        self.word = np.empty((s, k), np.intp)


def table_from_arrays(arrays: dict[str, np.ndarray], vocab_size: int) -> RankTable:
    """The table as read from a cache."""
    table = RankTable(**arrays)
    try:
        table.check(vocab_size)
    except ValueError as error:
        raise CacheError(f"the cache's table is damaged ({error}): restore it from a copy") from error
    return table
