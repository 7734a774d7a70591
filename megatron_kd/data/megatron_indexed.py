"""Megatron's indexed data sets: token ids in PREFIX.bin, where they begin in PREFIX.idx.

    .idx   magic "MMIDIDX" and two zero bytes, version 1 (u64), type of the ids (u8), sequences n (u64),
           documents + 1 (u64), lengths (i32 [n]), byte offsets into .bin (i64 [n]),
           first sequence of each document (i64 [documents + 1])
    .bin   the ids, sequence after sequence

All numbers are little-endian. Collectives: none.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_kd.data.document import SourceError

_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\0\0"
_ID_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def read_indexed(index: Path, field: str = "") -> Iterator[NDArray[np.int32]]:
    """The token ids of each document.

    Args:
        index: the .idx file; the .bin file stands beside it.
        field: there is none; taken for the sake of the other readers.

    Raises:
        SourceError: not an index of version 1, or files that do not belong together.
    """
    if index.stat().st_size < _HEADER.size:
        raise SourceError(f"{index}: {index.stat().st_size} bytes are too few for an index")
    with index.open("rb") as stream:
        magic, version, type_code, sequences, bounds = _HEADER.unpack(stream.read(_HEADER.size))
    if magic != _MAGIC or version != 1 or type_code not in _ID_TYPES:
        raise SourceError(f"{index}: not an index of Megatron's, version 1, of integer ids (type {type_code})")
    dtype = np.dtype(_ID_TYPES[type_code])
    needed = _HEADER.size + 12 * sequences + 8 * bounds
    if index.stat().st_size != needed:
        raise SourceError(f"{index}: {index.stat().st_size} bytes where {needed} are needed; the file is cut short")
    lengths = np.memmap(index, "<i4", "r", _HEADER.size, (sequences,)) if sequences else np.empty(0, np.int32)
    offsets = np.memmap(index, "<i8", "r", _HEADER.size + 4 * sequences, (sequences,)) if sequences else lengths
    documents = np.memmap(index, "<i8", "r", _HEADER.size + 12 * sequences, (bounds,))
    ids_file = index.with_suffix(".bin")
    size = ids_file.stat().st_size if ids_file.is_file() else -1
    end = max((offsets + lengths.astype(np.int64) * dtype.itemsize).max(), 0) if sequences else 0
    if size < end:
        raise SourceError(f"{ids_file}: {size} bytes where its index needs {end}; they do not belong together")
    stored = np.memmap(ids_file, np.uint8, "r") if size > 0 else np.empty(0, np.uint8)
    for first, last in pairwise(documents):
        spans = [(int(offsets[n]), int(offsets[n]) + int(lengths[n]) * dtype.itemsize) for n in range(first, last)]
        parts = [stored[begin:end].view(dtype) for begin, end in spans]
        yield np.concatenate(parts).astype(np.int32) if parts else np.empty(0, np.int32)


def read_ids_file(file: Path, field: str = "") -> Iterator[NDArray[np.int32]]:
    """Nothing: a .bin file is read through its index, which must stand beside it."""
    if not file.with_suffix(".idx").is_file():
        raise SourceError(f"{file}: its index {file.with_suffix('.idx').name} is not beside it; both are needed")
    yield from ()
