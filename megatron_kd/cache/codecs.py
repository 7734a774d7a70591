"""Codec chains of the stored arrays.

Every chain is made of codecs of the Zarr v3 specification and ends in crc32c, inside the shard and for its index:

    topk_rank           bytes → blosc(zstd, bitshuffle) → crc32c
    topk_logprob_step   transpose(S ↔ K) → bytes → blosc(zstd, bitshuffle) → crc32c
    the others          bytes → blosc(zstd, bitshuffle) → crc32c

Bitshuffle puts equal bits of neighbouring numbers side by side. The steps are transposed first because the k-th step
of one position resembles the k-th step of the next more than its own neighbour.
"""

from __future__ import annotations

from typing import Any

from zarr.codecs import BloscCodec, Crc32cCodec, TransposeCodec

PRESETS = ("lossless",)
# Level 5 costs the writer a third of level 9's time per percent gained; decoding speed is the same at every level.
_ZSTD_LEVEL = 5


def codec_options(array: str, dimensions: int) -> dict[str, Any]:
    """Keyword arguments of `zarr.Group.create_array` that set the chain of `array`."""
    options: dict[str, Any] = {"filters": [], "compressors": [_blosc(), Crc32cCodec()]}
    if array == "topk_logprob_step":
        order = (*range(dimensions - 2), dimensions - 1, dimensions - 2)
        options["filters"] = [TransposeCodec(order=order)]
    elif array == "commit":
        options["compressors"] = [Crc32cCodec()]
    return options


def _blosc() -> BloscCodec:
    return BloscCodec(cname="zstd", clevel=_ZSTD_LEVEL, shuffle="bitshuffle")
