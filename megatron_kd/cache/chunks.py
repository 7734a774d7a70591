"""Decoding of one object of a cache, straight from its bytes.

zarr's own pipeline reads the same bytes, but spends more time on scheduling its tasks than on these small chunks. What
is here covers the codecs that codecs.py chooses, by their definition in the Zarr v3 specification:

    shard = index ‖ inner chunks          index: (offset, length) per inner chunk, 16 bytes each, then its crc32c
    chunk = blosc(array bytes) ‖ crc32c   array bytes little-endian in C order, transposed where so coded

Every function raises `DamagedChunk` on a byte that is not as written; nothing is decoded before its checksum is right.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import google_crc32c
import numpy as np
from numcodecs import blosc

from megatron_kd.cache.schema import CacheError

_ABSENT = np.iinfo(np.uint64).max  # offset and length of an inner chunk that was never written


class DamagedChunk(CacheError):
    """Bytes that are missing, torn or altered."""


class ChunkDecoder:
    """Decodes the chunks of one array, as its zarr.json says.

    Args:
        document: the parsed zarr.json.

    Attributes:
        inner: shape of an inner chunk (of the whole chunk where the array is not sharded).
        per_shard: inner chunks in a shard, along the first axis.
        index_bytes: length of the index at the start of a shard; 0 where the array is not sharded.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.dtype = np.dtype(document["data_type"]).newbyteorder("<")
        self.inner = tuple(document["chunk_grid"]["configuration"]["chunk_shape"])
        self.per_shard, self.index_bytes = 1, 0
        codecs = document["codecs"]
        if codecs[0]["name"] == "sharding_indexed":
            sharding = codecs[0]["configuration"]
            index_codecs = [codec["name"] for codec in sharding["index_codecs"]]
            if len(codecs) > 1 or sharding["index_location"] != "start" or index_codecs != ["bytes", "crc32c"]:
                raise CacheError(f"unknown sharding {codecs}: this version cannot decode it, plain zarr may")
            self.per_shard = self.inner[0] // sharding["chunk_shape"][0]
            self.index_bytes = 16 * self.per_shard + 4
            self.inner, codecs = tuple(sharding["chunk_shape"]), sharding["codecs"]
        self._order: tuple[int, ...] | None = None
        self._blosc = False
        self._read_chain(codecs)

    def index(self, data: bytes, rows: int) -> np.ndarray:
        """[rows, 2] start and stop of the first inner chunks in the object, from its first `index_bytes` bytes."""
        if len(data) < self.index_bytes:
            raise DamagedChunk(f"its index is cut off after {len(data)} of {self.index_bytes} bytes")
        entries = np.frombuffer(_checked(data[: self.index_bytes]), "<u8").reshape(self.per_shard, 2)
        if (entries[:rows, 0] == _ABSENT).any() or (entries[rows:, 0] != _ABSENT).any():
            raise DamagedChunk(f"its index does not list exactly {rows} samples")
        return np.stack([entries[:rows, 0], entries[:rows].sum(axis=1)], axis=1)

    def chunk(self, data: bytes | memoryview) -> np.ndarray:
        """One inner chunk."""
        body = _checked(data)
        if self._blosc:
            body = blosc.decompress(body)
        stored = self.inner if self._order is None else tuple(self.inner[axis] for axis in self._order)
        if len(body) != math.prod(stored) * self.dtype.itemsize:
            raise DamagedChunk(f"it decodes to {len(body)} bytes, not those of {self.dtype} {stored}")
        array = np.frombuffer(body, self.dtype).reshape(stored)
        return array if self._order is None else array.transpose(np.argsort(self._order))

    def shard(self, data: bytes, rows: int) -> np.ndarray:
        """The `rows` inner chunks of a whole object; every byte of it must be accounted for."""
        index = self.index(data, rows)
        extents = index[np.argsort(index[:, 0])]
        if [self.index_bytes, *extents[:, 1].tolist()] != [*extents[:, 0].tolist(), len(data)]:
            raise DamagedChunk(f"its {rows} chunks do not fill its {len(data)} bytes: it was cut or added to")
        view = memoryview(data)
        return np.concatenate([self.chunk(view[start:stop]) for start, stop in index.tolist()])

    def _read_chain(self, codecs: list[dict[str, Any]]) -> None:
        for codec in codecs:
            name, options = codec["name"], codec.get("configuration", {})
            if name == "transpose":
                self._order = tuple(options["order"])
            elif name == "blosc":
                self._blosc = True
            elif not (name == "crc32c" or (name == "bytes" and options.get("endian", "little") == "little")):
                raise CacheError(f"unknown codec {name} {options}: this version cannot decode it, plain zarr may")
        if codecs[-1]["name"] != "crc32c":
            raise CacheError("a codec chain does not end in crc32c: damage would go unseen")


def _checked(data: bytes | memoryview) -> memoryview:
    """The bytes before the checksum, which must be theirs."""
    body = memoryview(data)[:-4]
    if len(data) < 4 or google_crc32c.value(bytes(body)) != int.from_bytes(data[-4:], "little"):
        raise DamagedChunk(f"its checksum does not match its {len(data)} bytes")
    return body
