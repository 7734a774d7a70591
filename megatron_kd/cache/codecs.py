"""Codec chains of the stored arrays.

Every chain is made of codecs of the Zarr v3 specification and ends in crc32c, inside the shard and for its index:

    single bytes (topk_rank, topk_logprob_step, loss_mask)      bytes → zstd → crc32c
    wider numbers                                               bytes → blosc(zstd, bitshuffle) → crc32c
    id_by_rank, context_start, context_ids (tables)             bytes → zstd → crc32c
    commit                                                      bytes → crc32c

On planes of bytes zstd works as an entropy coder; there is little to match. Its fast levels take matches that cost more
than the bytes they replace, which matters for the ranks' high bytes: from level 13 on it weighs them and comes within
2 % of the entropy. Unrounded steps gain nothing by that, and decode faster from level 1. Bitshuffle puts equal bits of
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
    step_level: int = 1  # zstd level of topk_logprob_step
    mantissa_bits: int = 10  # of the float16 log-probs; 10 is all of them


PRESETS = {
    "lossless": Preset(rank_level=13),
    # 2 % larger, ten times faster to write: for small teachers on fast devices.
    "fast": Preset(rank_level=1),
    # Log-probs to one part in 128, a sixth smaller in all. The tail stays exact, so what rounding adds to the loss is
    # small: on real logits KL(lossless ‖ compact) is 4e-5 nats a position.
    "compact": Preset(rank_level=13, step_level=13, mantissa_bits=6),
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
        levels = {"topk_rank": settings.rank_level, "topk_logprob_step": settings.step_level}
        return [ZstdCodec(level=levels.get(array, 1)), Crc32cCodec()]
    return [BloscCodec(cname="zstd", clevel=5, shuffle="bitshuffle"), Crc32cCodec()]
