"""Reading a cache by sample id: any order, any repetition, fewer entries than stored, any stored temperature.

At temperature τ ≠ 1, with the stored normalisers logz_1 and logz_τ, the teacher's logit of an entry is
logprob + logz_1, so

    logprob_τ = (logprob + logz_1)/τ − logz_τ        tail_τ = log(1 − Σ_k exp(logprob_τ,k))

With K′ < K the dropped entries' probability joins the tail, which keeps its meaning: all that is not an entry.

Shapes: n samples asked for, S positions, K′ entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_kd.cache.blocks import BlockStore, Stored
from megatron_kd.cache.encode import decode_logprobs
from megatron_kd.cache.ranks import RankCoder
from megatron_kd.cache.schema import Manifest
from megatron_kd.cache.store import HeldStore, LocalStore, Url, open_store


@dataclass(frozen=True)
class CacheBatch:
    """Samples in the order asked for. Position t holds the teacher's distribution for tokens[:, t + 1]."""

    tokens: np.ndarray  # int32 [n, S+1]: inputs are [:, :-1], labels [:, 1:]
    ids: np.ndarray  # int32 [n, S, K′], −1 = absent
    logprobs: np.ndarray  # float32 [n, S, K′], falling; −inf where absent
    tail_logprob: np.ndarray  # float32 [n, S]: log of the mass outside the K′ entries
    label_logprob: np.ndarray  # float32 [n, S]: of the label, at temperature 1
    loss_mask: np.ndarray  # uint8 [n, S]: 1 = train on it
    segment: np.ndarray  # int32 [n, S]: document number in a packed sample


_COPIED = ("tokens", "label_logprob", "loss_mask", "segment")


class TeacherCache:
    """A cache opened for reading. Holds no open file; safe to use from several threads and after a fork."""

    def __init__(self, blocks: BlockStore, threads: int = 1) -> None:
        self._blocks = blocks
        self._ranks = RankCoder(blocks.table)
        self._threads = threads

    @classmethod
    def open(
        cls,
        url: Url,
        storage_options: Mapping[str, Any] | None = None,
        threads: int = 1,
        hold_bytes: int | None = None,
    ) -> TeacherCache:
        """Open a cache, checking its metadata.

        Args:
            url: a folder or any fsspec URL.
            storage_options: passed to fsspec.
            threads: samples decoded at once in one call of `read`.
            hold_bytes: fetch objects whole and hold up to so many bytes of them, still compressed; 0: read only the
                ranges needed. None: 0 for a local folder, 1 GiB elsewhere. For samples drawn at random from a remote
                cache much larger than this, 0 is better.
        """
        store = open_store(url, storage_options)
        if hold_bytes is None:
            hold_bytes = 0 if isinstance(store, LocalStore) else 1 << 30
        return cls(BlockStore(HeldStore(store, hold_bytes) if hold_bytes else store), threads)

    @property
    def manifest(self) -> Manifest:
        """What the cache holds."""
        return self._blocks.manifest

    def read(self, samples: Sequence[int] | np.ndarray, k: int | None = None, temperature: float = 1.0) -> CacheBatch:
        """Targets of `samples`, in that order; duplicates are fine.

        Args:
            samples: sample ids in [0, N).
            k: entries per position, at most the stored ones; None for all.
            temperature: one of `manifest.temperatures`.
        """
        ids = np.asarray(samples, np.int64).reshape(-1).tolist()
        k = self._check(ids, k, temperature)
        batch = self._empty(len(ids), k)
        arrays = [*_COPIED, "topk_rank", "topk_logprob_step", "tail_logprob" if temperature == 1.0 else "logz"]

        def one(row: int) -> None:
            index, place = divmod(ids[row], self.manifest.block)
            self._decode(self._blocks.sample(index, place, arrays, k), batch, row, temperature)

        if self._threads > 1 and len(ids) > 1:
            with ThreadPoolExecutor(self._threads) as pool:
                list(pool.map(one, range(len(ids))))
        else:
            for row in range(len(ids)):
                one(row)
        return batch

    def read_block(self, index: int, k: int | None = None, temperature: float = 1.0) -> CacheBatch:
        """All samples of a block; recomputes its commit word."""
        k = self._check([], k, temperature)
        stored = self._blocks.block(index)
        batch = self._empty(len(stored["tokens"]), k)
        for row in range(len(batch.tokens)):
            self._decode({name: array[row] for name, array in stored.items()}, batch, row, temperature)
        return batch

    def _check(self, samples: list[int], k: int | None, temperature: float) -> int:
        m = self.manifest
        for sample in samples:
            if not 0 <= sample < m.samples:
                raise IndexError(f"sample {sample} does not exist: the cache has {m.samples} samples")
        k = m.k if k is None else k
        if not 1 <= k <= m.k:
            raise ValueError(f"k is {k} but the cache stores {m.k} entries per position: ask for at most that")
        if temperature not in m.temperatures:
            raise ValueError(
                f"temperature {temperature} is not stored: the cache has {m.temperatures}; "
                "use one of them, or make the cache again with manifest.temperatures including it"
            )
        if m.entries == "sampled" and (k < m.k or temperature != 1.0):
            raise ValueError(
                f"k is {k} and temperature {temperature}, but sampled entries stand for the teacher only all {m.k} "
                "together and at temperature 1: leave both out"
            )
        return k

    def _empty(self, n: int, k: int) -> CacheBatch:
        s = self.manifest.seq_length
        return CacheBatch(
            tokens=np.empty((n, s + 1), np.int32),
            ids=np.empty((n, s, k), np.int32),
            logprobs=np.empty((n, s, k), np.float32),
            tail_logprob=np.empty((n, s), np.float32),
            label_logprob=np.empty((n, s), np.float32),
            loss_mask=np.empty((n, s), np.uint8),
            segment=np.empty((n, s), np.int32),
        )

    def _decode(self, stored: Stored, batch: CacheBatch, row: int, temperature: float) -> None:
        """One sample's stored arrays into a row of the batch."""
        m, k = self.manifest, batch.ids.shape[-1]
        for name in _COPIED:
            getattr(batch, name)[row] = stored[name]
        self._ranks.decode(stored["tokens"][:-1], stored["topk_rank"][..., :k], batch.ids[row])
        logprobs = batch.logprobs[row] if k == m.k else np.empty((m.seq_length, m.k), np.float32)
        decode_logprobs(stored["topk_logprob_step"], logprobs)
        if temperature == 1.0:
            tail = stored["tail_logprob"].astype(np.float32)
        else:
            logz = stored["logz"][:, m.temperatures.index(temperature)]
            logprobs += stored["logz"][:, :1]
            logprobs /= np.float32(temperature)
            logprobs -= logz[:, None]
            tail = _log_rest(logprobs)
        if k < m.k:
            tail = np.logaddexp(tail, _logsumexp(logprobs[:, k:]))
            batch.logprobs[row] = logprobs[:, :k]
        batch.tail_logprob[row] = tail


def _logsumexp(values: np.ndarray) -> np.ndarray:
    """Over the last axis, whose entries fall: the first is the largest."""
    largest = np.where(np.isfinite(values[..., :1]), values[..., :1], 0)
    with np.errstate(divide="ignore"):
        return largest[..., 0] + np.log(np.exp(values - largest).sum(axis=-1))


def _log_rest(logprobs: np.ndarray) -> np.ndarray:
    """log(1 − Σ exp(logprobs)); −inf where rounding leaves nothing."""
    with np.errstate(divide="ignore"):
        return np.log(np.maximum(1 - np.exp(logprobs.astype(np.float64)).sum(axis=-1), 0))
