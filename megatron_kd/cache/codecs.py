"""Codec chains of the stored arrays.

Every chain is made of codecs of the Zarr v3 specification and ends in crc32c, inside the shard and for its index:

    single bytes (topk_rank, topk_logprob_step, loss_mask)      bytes → zstd → crc32c
    wider numbers                                               bytes → blosc(zstd, bitshuffle) → crc32c
    id_by_rank, context_start, context_ids (tables)             bytes → zstd → crc32c
    commit                                                      bytes → crc32c

On planes of bytes zstd works as an entropy coder; there is little to match. Its fast levels take matches that cost more
than the bytes they replace, which matters for the ranks' high bytes: from level 13 on it weighs them and comes within
2 % of the entropy. The steps gain nothing by that, and decode faster from level 1. Bitshuffle puts equal bits of
neighbouring numbers side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec

from megatron_kd.cache.schema import COMMIT, TABLES


@dataclass(frozen=True)
class Preset:
    """How arrays are coded; its name stands in the manifest."""

    rank_level: int  # zstd level of topk_rank


PRESETS = {
    "lossless": Preset(rank_level=13),
    # 2 % larger, ten times faster to write: for small teachers on fast devices.
    "fast": Preset(rank_level=1),
}


def preset(name: str) -> Preset:
    """A preset by name."""
    if name not in PRESETS:
        raise ValueError(f"manifest.codecs is {name!r}; it must be one of {', '.join(PRESETS)}")
    return PRESETS[name]


def compressors(array: str, dtype: str, settings: Preset) -> list[Any]:
    """The bytes-to-bytes codecs of an array."""
    if array == COMMIT:
        return [Crc32cCodec()]
    if array in TABLES:
        return [ZstdCodec(level=13), Crc32cCodec()]
    if dtype == "|u1":
        return [ZstdCodec(level=settings.rank_level if array == "topk_rank" else 1), Crc32cCodec()]
    return [BloscCodec(cname="zstd", clevel=5, shuffle="bitshuffle"), Crc32cCodec()]
