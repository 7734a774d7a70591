"""Reading a cache by sample id: any order, any repetition, fewer entries than stored, any stored temperature.

At temperature τ ≠ 1, with the stored normalisers logz_1 and logz_τ, the teacher's logit of an entry is
logprob + logz_1, so

    logprob_τ = (logprob + logz_1)/τ − logz_τ        tail_τ = log(1 − Σ_k exp(logprob_τ,k))

With K′ < K the dropped entries' probability joins the tail, which keeps its meaning: all that is not an entry.

Shapes: n samples asked for, S positions, K′ entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_kd.cache.blocks import BlockStore, Stored
from megatron_kd.cache.encode import logprobs_of
from megatron_kd.cache.ranks import RankCoder
from megatron_kd.cache.schema import Manifest
from megatron_kd.cache.store import Url, open_store


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


class TeacherCache:
    """A cache opened for reading. Holds no open file; safe to use from several threads and after a fork."""

    def __init__(self, blocks: BlockStore) -> None:
        self._blocks = blocks
        self._ranks = RankCoder(blocks.table)

    @classmethod
    def open(cls, url: Url, storage_options: Mapping[str, Any] | None = None) -> TeacherCache:
        """Open a cache, checking its metadata.

        Args:
            url: a folder or any fsspec URL.
            storage_options: passed to fsspec.
        """
        return cls(BlockStore(open_store(url, storage_options)))

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
        ids = np.asarray(samples, np.int64).reshape(-1)
        self._check(ids, k, temperature)
        if ids.size == 0:
            return self._targets(self._empty(), k, temperature)
        parts, order = [], []
        of_block = ids // self.manifest.block
        for index in np.unique(of_block).tolist():
            where = np.flatnonzero(of_block == index)
            parts.append(self._blocks.samples(index, (ids[where] - index * self.manifest.block).tolist()))
            order.append(where)
        back = np.argsort(np.concatenate(order))
        stored = {name: np.concatenate([part[name] for part in parts])[back] for name in parts[0]}
        return self._targets(stored, k, temperature)

    def read_block(self, index: int, k: int | None = None, temperature: float = 1.0) -> CacheBatch:
        """All samples of a block; recomputes its commit word."""
        self._check(np.zeros(0, np.int64), k, temperature)
        return self._targets(self._blocks.block(index), k, temperature)

    def _check(self, samples: np.ndarray, k: int | None, temperature: float) -> None:
        m = self.manifest
        if samples.size and (samples.min() < 0 or samples.max() >= m.samples):
            wrong = int(samples.min()) if samples.min() < 0 else int(samples.max())
            raise IndexError(f"sample {wrong} does not exist: the cache has {m.samples} samples")
        if k is not None and not 1 <= k <= m.k:
            raise ValueError(f"k is {k} but the cache stores {m.k} entries per position: ask for at most that")
        if k is not None and k < m.k and m.entries == "sampled":
            raise ValueError(f"k is {k} but the {m.k} sampled entries stand for the teacher only together: leave k out")
        if temperature not in m.temperatures:
            raise ValueError(
                f"temperature {temperature} is not stored: the cache has {m.temperatures}; "
                "use one of them, or make the cache again with manifest.temperatures including it"
            )
        if temperature != 1.0 and m.entries == "sampled":
            raise ValueError(f"temperature is {temperature} but sampled entries stand for temperature 1 only")

    def _empty(self) -> Stored:
        return {spec.name: np.empty((0, *spec.shape), spec.dtype) for spec in self._blocks.specs}

    def _targets(self, stored: Stored, k: int | None, temperature: float) -> CacheBatch:
        n, m = len(stored["tokens"]), self.manifest
        ids = np.empty((n, m.seq_length, m.k), np.int32)
        logprobs = np.empty((n, m.seq_length, m.k), np.float32)
        for row in range(n):
            ids[row] = self._ranks.decode(stored["tokens"][row, :-1], stored["topk_rank"][row])
            logprobs[row] = logprobs_of(stored["topk_logprob_step"][row])
        tail = stored["tail_logprob"].astype(np.float32)
        if temperature != 1.0:
            logz = stored["logz"]
            logz_t = logz[..., m.temperatures.index(temperature)]
            logprobs = (logprobs + logz[..., :1]) / np.float32(temperature) - logz_t[..., None]
            tail = _log_rest(logprobs)
        if k is not None and k < m.k:
            tail = np.logaddexp(tail, _logsumexp(logprobs[..., k:]))
            ids, logprobs = ids[..., :k], logprobs[..., :k]
        return CacheBatch(
            tokens=stored["tokens"],
            ids=ids,
            logprobs=logprobs,
            tail_logprob=tail,
            label_logprob=stored["label_logprob"],
            loss_mask=stored["loss_mask"],
            segment=stored["segment"],
        )


def _logsumexp(values: np.ndarray) -> np.ndarray:
    """Over the last axis, whose entries fall: the first is the largest."""
    largest = values[..., 0]
    safe = np.where(np.isfinite(largest), largest, 0)
    with np.errstate(divide="ignore"):
        return safe + np.log(np.exp(values - safe[..., None]).sum(axis=-1))


def _log_rest(logprobs: np.ndarray) -> np.ndarray:
    """log(1 − Σ exp(logprobs)); −inf where rounding leaves nothing."""
    with np.errstate(divide="ignore"):
        rest = np.log(np.maximum(1 - np.exp(logprobs.astype(np.float64)).sum(axis=-1), 0))
    return rest.astype(np.float32)
