"""Decoding of one object of a cache, straight from its bytes.

zarr's own pipeline reads the same bytes, but spends more time on scheduling its tasks than on these small chunks. What
is here covers the codecs that codecs.py chooses, by their definition in the Zarr v3 specification:

    shard = index ‖ inner chunks                     index: (offset, length) per inner chunk, 16 bytes each, then crc32c
    chunk = zstd or blosc(array bytes) ‖ crc32c      array bytes little-endian in C order

Every function raises `DamagedChunk` on a byte that is not as written; nothing is decoded before its checksum is right.

Letters: G inner chunks in a sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import google_crc32c
import numpy as np
from numcodecs import blosc, zstd

from megatron_kd.cache.schema import CacheError

_ABSENT = np.iinfo(np.uint64).max  # offset and length of an inner chunk that was never written


class DamagedChunk(CacheError):
    """Bytes that are missing, torn or altered."""


class ChunkDecoder:
    """Decodes the chunks of one array, as its zarr.json says.

    Args:
        document: the parsed zarr.json.

    Attributes:
        index_bytes: length of the index at the start of a shard; 0 where the array is not sharded.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.dtype = np.dtype(document["data_type"]).newbyteorder("<")
        self._shard = self._inner = tuple(document["chunk_grid"]["configuration"]["chunk_shape"])
        self.index_bytes = 0
        self._windows: list[tuple[slice, ...]] = []  # what each chunk of a sample covers of it
        codecs = document["codecs"]
        if codecs[0]["name"] == "sharding_indexed":
            sharding = codecs[0]["configuration"]
            index_codecs = [codec["name"] for codec in sharding["index_codecs"]]
            if len(codecs) > 1 or sharding["index_location"] != "start" or index_codecs != ["bytes", "crc32c"]:
                raise CacheError(f"unknown sharding {codecs}: this version cannot decode it, plain zarr may")
            self._inner, codecs = tuple(sharding["chunk_shape"]), sharding["codecs"]
            grid = tuple(whole // part for whole, part in zip(self._shard, self._inner))
            self.index_bytes = 16 * math.prod(grid) + 4
            for place in np.ndindex(grid[1:]):
                self._windows.append(tuple(slice(p * n, (p + 1) * n) for p, n in zip(place, self._inner[1:])))
        self._all = list(range(len(self._windows)))
        self._bytes = math.prod(self._inner) * self.dtype.itemsize
        self._decompress = _decompressor(codecs)

    def index(self, data: bytes, rows: int) -> np.ndarray:
        """[rows, G, 2] start and stop in the object of each sample's chunks, from its first `index_bytes` bytes."""
        if len(data) < self.index_bytes:
            raise DamagedChunk(f"its index is cut off after {len(data)} of {self.index_bytes} bytes")
        entries = np.frombuffer(_checked(data[: self.index_bytes]), "<u8").reshape(self._shard[0], -1, 2)
        if (entries[:rows, :, 0] == _ABSENT).any() or (entries[rows:, :, 0] != _ABSENT).any():
            raise DamagedChunk(f"its index does not list exactly {rows} samples")
        return np.stack([entries[:rows, :, 0], entries[:rows].sum(axis=-1)], axis=-1)

    def chunk(self, data: bytes | memoryview) -> np.ndarray:
        """One inner chunk; the whole array where it is not sharded."""
        body = self._decompress(_checked(data))
        if len(body) != self._bytes:
            raise DamagedChunk(f"it decodes to {len(body)} bytes, not those of {self.dtype} {self._inner}")
        return np.frombuffer(body, self.dtype).reshape(self._inner)

    def parts(self, length: int) -> list[int]:
        """Which of a sample's G chunks hold the first `length` places of the last axis."""
        if length >= self._shard[-1]:
            return self._all
        return [number for number, window in enumerate(self._windows) if window[-1].start < length]

    def sample(self, chunks: Sequence[bytes | memoryview], out: np.ndarray) -> None:
        """One sample into `out`, whose last axis may be shorter, from the chunks that `parts` names."""
        for number, data in zip(self.parts(out.shape[-1]), chunks):
            target = out[self._windows[number]]
            target[...] = self.chunk(data)[0][..., : target.shape[-1]]

    def shard(self, data: bytes, rows: int) -> np.ndarray:
        """The `rows` samples of a whole object; every byte of it must be accounted for."""
        index = self.index(data, rows)
        extents = index.reshape(-1, 2)[np.argsort(index[..., 0], axis=None)]
        if [self.index_bytes, *extents[:, 1].tolist()] != [*extents[:, 0].tolist(), len(data)]:
            raise DamagedChunk(f"its {len(extents)} chunks do not fill its {len(data)} bytes: it was cut or added to")
        view, out = memoryview(data), np.empty((rows, *self._shard[1:]), self.dtype)
        for places, sample in zip(index.tolist(), out):
            self.sample([view[start:stop] for start, stop in places], sample)
        return out


def _decompressor(codecs: list[dict[str, Any]]) -> Callable[[memoryview], bytes | memoryview]:
    """The inverse of a chain (bytes, perhaps one compressor, crc32c) but for the checksum."""
    names = [codec["name"] for codec in codecs]
    compressors = {"zstd": zstd.decompress, "blosc": blosc.decompress}
    endian = codecs[0].get("configuration", {}).get("endian", "little")
    known = len(names) == 2 or (len(names) == 3 and names[1] in compressors)
    if not known or names[0] != "bytes" or names[-1] != "crc32c" or endian != "little":
        raise CacheError(f"unknown codec chain {codecs}: this version cannot decode it, plain zarr may")
    return compressors[names[1]] if len(names) == 3 else lambda body: body


def _checked(data: bytes | memoryview) -> memoryview:
    """The bytes before the checksum, which must be theirs."""
    body = memoryview(data)[:-4]
    if len(data) < 4 or google_crc32c.value(bytes(body)) != int.from_bytes(data[-4:], "little"):
        raise DamagedChunk(f"its checksum does not match its {len(data)} bytes")
    return body
