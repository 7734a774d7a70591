"""Writing a cache: create or resume, then whole blocks in any order, from any number of processes.

Rules that keep it safe without a coordinator:

- One block belongs to one writer. A block is one object of every array, so two writers never touch the same object.
- Objects are replaced atomically, the commit word after all others. A writer that dies leaves its block uncommitted.
- The group's own zarr.json is written last: a half-created cache is no cache, and creating it again is harmless.
- Same manifest, same table, same targets → same bytes, whoever writes and in whatever order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_kd.cache.blocks import BlockStore
from megatron_kd.cache.chunks import ChunkDecoder
from megatron_kd.cache.encode import commit_word, encode_block
from megatron_kd.cache.layout import ROOT, BlockEncoder, block_keys, metadata
from megatron_kd.cache.ranks import RankCoder, RankTable
from megatron_kd.cache.schema import COMMIT, CacheError, Manifest
from megatron_kd.cache.store import Url, open_store


class CacheExists(CacheError):
    """There is a cache where a new one should be."""


class CacheWriter:
    """One writer of a cache. Make it with `create`, `resume` or `open_or_create`."""

    def __init__(self, blocks: BlockStore) -> None:
        self.manifest = blocks.manifest
        self._blocks = blocks
        self._coder = RankCoder(blocks.table)
        self._encoder = BlockEncoder(self.manifest)
        _check_codecs(self.manifest)

    @classmethod
    def create(
        cls,
        url: Url,
        manifest: Manifest,
        table: RankTable | np.ndarray,
        storage_options: Mapping[str, Any] | None = None,
    ) -> CacheWriter:
        """Start a new cache; raises `CacheError` where there is one already.

        Args:
            url: a folder or any fsspec URL.
            manifest: what will be in it.
            table: `rank_table` of the first block, or `frequency_table` alone (int32 [V], larger blocks). It is part
                of the cache's bytes, so it must follow from the data, not from which process came first.
            storage_options: passed to fsspec.
        """
        if cls.exists(url, storage_options):
            raise CacheExists(f"{url} already holds a cache: resume it, or choose another place")
        table = table if isinstance(table, RankTable) else RankTable.without_contexts(table)
        table.check(manifest.vocab_size)
        store = open_store(url, storage_options)
        for key, data in metadata(manifest, table).items():
            store.write(key, data)
        return cls.resume(url, manifest, storage_options)

    @staticmethod
    def exists(url: Url, storage_options: Mapping[str, Any] | None = None) -> bool:
        """Whether there is a cache, complete or not."""
        return open_store(url, storage_options).read(ROOT) is not None

    @classmethod
    def resume(cls, url: Url, manifest: Manifest, storage_options: Mapping[str, Any] | None = None) -> CacheWriter:
        """Go on with a cache; raises `CacheError` where its manifest differs, naming the first field that does."""
        blocks = BlockStore(open_store(url, storage_options))
        difference = manifest.difference(blocks.manifest)
        if difference:
            raise CacheError(
                f"{url} holds a cache of other targets ({difference}): "
                "go on with the same settings, or choose another place"
            )
        return cls(blocks)

    @classmethod
    def open_or_create(
        cls,
        url: Url,
        manifest: Manifest,
        table: RankTable | np.ndarray,
        storage_options: Mapping[str, Any] | None = None,
    ) -> CacheWriter:
        """Resume where there is a cache, else create it. Any number of processes may do so at once.

        Those that find nothing write the same bytes, and the group's zarr.json, whose presence makes the cache
        exist, comes last; only `created` may differ between them.
        """
        if not cls.exists(url, storage_options):
            with contextlib.suppress(CacheExists):  # another process was faster
                return cls.create(url, manifest, table, storage_options)
        return cls.resume(url, manifest, storage_options)

    def missing_blocks(self) -> list[int]:
        """Blocks without a commit word, or without one of their objects, in ascending order."""
        return self._blocks.missing()

    def write_block(self, index: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Write block `index` whole: its arrays, then its commit word.

        Args:
            index: which block; only one process may write it.
            arrays: `encode_block` says which. Numbers that no teacher gives raise `ValueError`, with nothing written.
        """
        stored = encode_block(self.manifest, self._coder, index, arrays)
        word = commit_word(index, stored, self._encoder.specs)
        encoded = self._encoder.encode(index, stored, word)
        keys = block_keys(index)
        # A block that is written again must not look committed while its objects are replaced.
        store = self._blocks.store
        store.delete(keys[COMMIT])
        store.write_many({key: encoded[key] for name, key in keys.items() if name != COMMIT})
        store.write(keys[COMMIT], encoded[keys[COMMIT]])


def _check_codecs(manifest: Manifest) -> None:
    """Encode one sample of random bits and decode it again; raises where a codec changes a bit.

    Some codecs corrupt silently with some dtypes and versions: this finds it before the teacher has run.
    """
    probe = BlockEncoder(manifest.with_samples(1, 1))
    rng = np.random.default_rng(0)
    stored = {}
    for spec in probe.specs:
        zeros = np.zeros((1, *spec.shape), spec.dtype)
        stored[spec.name] = np.frombuffer(rng.bytes(zeros.nbytes), spec.dtype).reshape(zeros.shape)
    encoded, keys = probe.encode(0, stored, 1), block_keys(0)
    for name, array in stored.items():
        if ChunkDecoder(probe.document(name)).shard(encoded[keys[name]], 1).tobytes() != array.tobytes():
            raise CacheError(f"array {name} does not survive its codecs with the installed zarr: change its version")
