"""Reading a cache by sample id: any order, any repetition, fewer entries than stored, any stored temperature."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from megatron_kd.cache.blocks import BlockStore
from megatron_kd.cache.decode import CacheBatch, SampleDecoder, TokenBatch
from megatron_kd.cache.ranks import RankCoder
from megatron_kd.cache.schema import Manifest
from megatron_kd.cache.store import HeldStore, LocalStore, Url, open_store


class TeacherCache:
    """A cache opened for reading. Holds no open file; safe to use from several threads and after a fork."""

    def __init__(self, blocks: BlockStore, threads: int = 1) -> None:
        self._blocks = blocks
        self._ranks = RankCoder(blocks.table)
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None
        self._process = os.getpid()
        self._local = threading.local()  # a decoder a thread, for the k and temperature used last

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
        ids = self._existing(samples)
        k = self._check(k, temperature)
        batch = CacheBatch.empty(self.manifest, len(ids), k)

        def one(row: int) -> None:
            index, place = divmod(ids[row], self.manifest.block)
            decoder = self._decoder(k, temperature)
            self._blocks.sample(index, place, decoder.places(batch, row))
            decoder.finish(batch, row)

        if self._threads > 1 and len(ids) > 1:
            list(self._workers().map(one, range(len(ids))))
        else:
            for row in range(len(ids)):
                one(row)
        return batch

    def read_tokens(self, samples: Sequence[int] | np.ndarray) -> TokenBatch:
        """The text of `samples`, in that order, without its targets: a hundredth of the bytes."""
        ids = self._existing(samples)
        batch = TokenBatch.empty(self.manifest, len(ids))
        for row, sample in enumerate(ids):
            index, place = divmod(sample, self.manifest.block)
            self._blocks.sample(index, place, batch.places(row))
        return batch

    def read_block(self, index: int, k: int | None = None, temperature: float = 1.0) -> CacheBatch:
        """All samples of a block; recomputes its commit word."""
        k = self._check(k, temperature)
        stored = self._blocks.block(index)
        batch = CacheBatch.empty(self.manifest, len(stored["tokens"]), k)
        decoder = self._decoder(k, temperature)
        for row in range(len(batch.tokens)):
            for name, place in decoder.places(batch, row).items():
                place[...] = stored[name][row][..., : place.shape[-1]]
            decoder.finish(batch, row)
        return batch

    def _workers(self) -> ThreadPoolExecutor:
        if self._pool is None or self._process != os.getpid():  # threads do not survive a fork
            self._pool, self._process = ThreadPoolExecutor(self._threads, "cache-decoder"), os.getpid()
        return self._pool

    def __reduce__(self) -> tuple[type[TeacherCache], tuple[BlockStore, int]]:
        return TeacherCache, (self._blocks, self._threads)

    def _decoder(self, k: int, temperature: float) -> SampleDecoder:
        key = (k, temperature)
        if getattr(self._local, "key", None) != key:
            self._local.key, self._local.decoder = key, SampleDecoder(self.manifest, self._ranks, k, temperature)
        return self._local.decoder

    def _existing(self, samples: Sequence[int] | np.ndarray) -> list[int]:
        ids = np.asarray(samples, np.int64).reshape(-1).tolist()
        for sample in ids:
            if not 0 <= sample < self.manifest.samples:
                raise IndexError(f"sample {sample} does not exist: the cache has {self.manifest.samples} samples")
        return ids

    def _check(self, k: int | None, temperature: float) -> int:
        m = self.manifest
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
