"""Stored arrays of blocks and samples, as they lie in the store: checked, not yet turned into targets.

What is checked where:

    one sample      crc32c of index and chunk, commit word ≠ 0, metadata hash (at opening)
    a whole block   all of that, and the xxh64 of the commit word over the decoded bytes
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache

import numpy as np

from megatron_kd.cache.chunks import ChunkDecoder, DamagedChunk
from megatron_kd.cache.encode import commit_word
from megatron_kd.cache.layout import METADATA_KEYS, ROOT, TABLE_KEYS, block_keys, check_metadata
from megatron_kd.cache.ranks import table_from_arrays
from megatron_kd.cache.schema import BLOCK_ARRAYS, COMMIT, CacheError, Manifest, block_arrays
from megatron_kd.cache.store import PARTIAL, ObjectStore

Stored = dict[str, np.ndarray]
_REPAIR = "mark it missing with `megatron-kd cache repair`, then resume the writer"
_WORDS_AT_ONCE = 256  # commit words fetched together
_INDEXES_KEPT = 128  # blocks whose indexes stay in memory: about 14 chunks × 16·B bytes each


class BlockStore:
    """The blocks of one cache. Opening it reads and checks all metadata."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        if store.read(ROOT) is None:
            raise CacheError(f"{store.url} holds no teacher cache ({ROOT} is missing): check the path, or make one")
        documents = dict(zip(METADATA_KEYS, store.read_many(METADATA_KEYS)))
        parsed = check_metadata(documents)
        self.manifest = Manifest.from_attributes(parsed[ROOT]["attributes"])
        self.specs = block_arrays(self.manifest)
        self._decoders = {key.split("/")[0]: ChunkDecoder(doc) for key, doc in parsed.items() if key != ROOT}
        self.table = table_from_arrays(
            {name: self._decoders[name].chunk(documents[key] or b"") for name, key in TABLE_KEYS.items()},
            self.manifest.vocab_size,
        )
        self._index = lru_cache(_INDEXES_KEPT)(self._read_index)

    def commit(self, index: int) -> int:
        """The block's commit word; 0 where it was not written. Raises where it is damaged."""
        (word,) = self._words([index])
        if isinstance(word, DamagedChunk):
            raise word
        return word

    def missing(self) -> list[int]:
        """Blocks without a readable commit word, or with an object that is missing or cut short, in ascending order."""
        sizes = {name: self.store.sizes(name) for name in BLOCK_ARRAYS}
        listed = self.store.sizes(COMMIT)
        candidates: list[int] = []
        missing: list[int] = []
        for index in range(self.manifest.blocks):
            names = {array: key.split("/")[1] for array, key in block_keys(index).items()}
            # A crash of the machine may leave empty files behind; an index is the least that an object holds.
            whole = all(sizes[n].get(names[n], 0) > self._decoders[n].index_bytes for n in BLOCK_ARRAYS)
            (candidates if whole and names[COMMIT] in listed else missing).append(index)
        words = self._words(candidates)
        missing += [i for i, word in zip(candidates, words) if isinstance(word, DamagedChunk) or word == 0]
        return sorted(missing)

    def block(self, index: int) -> Stored:
        """All arrays of a block, the commit word compared."""
        word = self._require_commit(index)
        rows = self.manifest.rows(index)
        keys = block_keys(index)
        stored: Stored = {}
        for spec, data in zip(self.specs, self.store.read_many([keys[spec.name] for spec in self.specs])):
            with self._naming(index, spec.name):
                stored[spec.name] = self._decoders[spec.name].shard(_there(data), rows.stop - rows.start)
        found = commit_word(index, stored, self.specs)
        if found != word:
            raise CacheError(
                f"{self.store.url}: block {index} hashes to {found:#x} but its commit word is {word:#x}: {_REPAIR}"
            )
        return stored

    def sample(self, index: int, row: int, out: Mapping[str, np.ndarray]) -> None:
        """Some arrays of one sample, by its number within the block.

        Args:
            index: the block.
            row: the sample within it.
            out: array → where to put the sample; a shorter last axis takes the first part of it alone.
        """
        places, keys = self._index(index), block_keys(index)
        ranges: dict[str, list[tuple[str, int, int]]] = {}
        for name, target in out.items():
            chunks = places[name][row].tolist()
            ranges[name] = [(keys[name], *chunks[part]) for part in self._decoders[name].parts(target.shape[-1])]
        found = iter(self.store.read_ranges(list(itertools.chain.from_iterable(ranges.values()))))
        for name, target in out.items():
            try:
                self._decoders[name].sample([_there(next(found)) for _ in ranges[name]], target)
            except DamagedChunk as error:
                raise self._named(index, name, error) from error

    def leftovers(self) -> list[str]:
        """Keys of files that a killed writer left incomplete."""
        folders = [*self._decoders, ""]
        names = [f"{folder}/{name}".lstrip("/") for folder in folders for name in self.store.sizes(folder)]
        return sorted(name for name in names if name.endswith(PARTIAL))

    def _words(self, blocks: Sequence[int]) -> list[int | DamagedChunk]:
        """Commit words, 0 where there is none, or what is wrong with them."""
        size = self._decoders[COMMIT].dtype.itemsize + 4
        words: list[int | DamagedChunk] = []
        for start in range(0, len(blocks), _WORDS_AT_ONCE):
            part = blocks[start : start + _WORDS_AT_ONCE]
            # One byte more than there should be: a longer object is damaged as well.
            found = self.store.read_ranges([(block_keys(index)[COMMIT], 0, size + 1) for index in part])
            for index, data in zip(part, found):
                try:
                    words.append(0 if data is None else int(self._decoders[COMMIT].chunk(data)[0]))
                except DamagedChunk as error:
                    words.append(self._named(index, COMMIT, error))
        return words

    def _require_commit(self, index: int) -> int:
        word = self.commit(index)
        if word == 0:
            raise CacheError(
                f"{self.store.url}: block {index} was never committed (array {COMMIT}): resume the writer to fill it"
            )
        return word

    def _read_index(self, index: int) -> dict[str, np.ndarray]:
        """Where the samples of a committed block lie in its objects."""
        self._require_commit(index)
        keys, rows = block_keys(index), self.manifest.rows(index)
        heads = self.store.read_ranges([(keys[s.name], 0, self._decoders[s.name].index_bytes) for s in self.specs])
        found = {}
        for spec, head in zip(self.specs, heads):
            with self._naming(index, spec.name):
                found[spec.name] = self._decoders[spec.name].index(_there(head), rows.stop - rows.start)
        return found

    def __reduce__(self) -> tuple[type[BlockStore], tuple[ObjectStore]]:
        return BlockStore, (self.store,)

    @contextmanager
    def _naming(self, index: int, array: str) -> Iterator[None]:
        """Name block and array in whatever decoding finds."""
        try:
            yield
        except DamagedChunk as error:
            raise self._named(index, array, error) from error

    def _named(self, index: int, array: str, error: DamagedChunk) -> DamagedChunk:
        return DamagedChunk(f"{self.store.url}: block {index}, array {array}: {error}; {_REPAIR}")


def _there(data: bytes | None) -> bytes:
    if data is None:
        raise DamagedChunk("its object is missing")
    return data
