"""Codec chains of the stored arrays.

Every chain is made of codecs of the Zarr v3 specification and ends in crc32c, inside the shard and for its index:

    topk_rank, topk_logprob_step (planes of bytes)      bytes → zstd → crc32c
    id_by_rank, context_start, context_ids (tables)     bytes → zstd → crc32c
    commit                                              bytes → crc32c
    the others                                          bytes → blosc(zstd, bitshuffle) → crc32c

zstd works on the planes as an entropy coder; there is little to match. Its fast levels take matches that cost more than
the bytes they replace; from level 13 on it weighs them, and comes within 2 % of the planes' entropy. Bitshuffle puts
equal bits of neighbouring numbers side by side. Decoding speed is the same at every level.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec

from megatron_kd.cache.schema import COMMIT, TABLES

_TABLE_LEVEL = 13
_PLANES = ("topk_rank", "topk_logprob_step")


@dataclass(frozen=True)
class Preset:
    """How arrays are coded; named in the manifest."""

    level: int  # zstd's, for the byte planes


PRESETS = {
    "lossless": Preset(level=13),
    # 2 % larger, ten times faster to write: for small teachers on fast devices.
    "fast": Preset(level=1),
}


def compressors(array: str, preset: str) -> list[Any]:
    """The bytes-to-bytes codecs of an array."""
    if array == COMMIT:
        return [Crc32cCodec()]
    if array in TABLES:
        return [ZstdCodec(level=_TABLE_LEVEL), Crc32cCodec()]
    if array in _PLANES:
        return [ZstdCodec(level=PRESETS[preset].level), Crc32cCodec()]
    return [BloscCodec(cname="zstd", clevel=5, shuffle="bitshuffle"), Crc32cCodec()]
