"""How large a cache will be, before it is made.

Objects are counted exactly:

    objects = (arrays of a block + 1 commit word) · ⌈N/B⌉ + zarr.json of each array, table and of the group + tables

Bytes are extrapolated. The best guess encodes the targets of some samples, those of the first block, in memory: the
rest compresses alike. Before the teacher has run, only a rule of thumb is left, taken from real logits.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_kd.cache.codecs import preset
from megatron_kd.cache.encode import commit_word, encode_block
from megatron_kd.cache.layout import METADATA_KEYS, BlockEncoder, metadata
from megatron_kd.cache.ranks import RankCoder, RankTable
from megatron_kd.cache.schema import BLOCK_ARRAYS, CacheError, Manifest
from megatron_kd.cache.store import Url

# Bytes of one entry's rank and of its log-prob, and of all else at a position: 49,152 ids, K = 100, real logits.
_RANK_BYTES, _STEP_BYTES, _OTHER_BYTES = 1.33, 0.65, 11.0
_SHARD_BYTES = 64 << 20  # what a block's ranks should at least come to, where the data set is that large


@dataclass(frozen=True)
class Estimate:
    """Size of a whole cache."""

    bytes: int
    objects: int
    bytes_per_token: float


def estimate(
    manifest: Manifest, table: RankTable | None = None, targets: Mapping[str, np.ndarray] | None = None
) -> Estimate:
    """The cache's size.

    Args:
        manifest: what it will hold.
        table: the table it will have.
        targets: of some samples, as for `write_block`; with a table, the size follows from theirs.
    """
    tokens = manifest.samples * manifest.seq_length
    objects = (len(BLOCK_ARRAYS) + 1) * manifest.blocks + len(METADATA_KEYS)
    if table is None or targets is None:
        step = _STEP_BYTES - (10 - preset(manifest.codecs).mantissa_bits) / 11
        per_token = manifest.k * (_RANK_BYTES + max(step, 0.1)) + _OTHER_BYTES
        return Estimate(int(per_token * tokens), objects, per_token)
    n = len(targets["tokens"])
    part = manifest.with_samples(n, n)
    encoder = BlockEncoder(part)
    stored = encode_block(part, RankCoder(table), 0, targets)
    block = sum(map(len, encoder.encode(0, stored, commit_word(0, stored, encoder.specs)).values()))
    fixed = sum(map(len, metadata(part, table).values()))
    per_token = block / (n * manifest.seq_length)
    return Estimate(int(per_token * tokens) + fixed, objects, per_token)


def check_space(url: Url, needed: int) -> None:
    """Raise `CacheError` where the disk behind a local folder has fewer than `needed` bytes free."""
    text = os.fspath(url).removeprefix("file://")
    if "://" in text:
        return
    folder = Path(text).expanduser().absolute()
    free = free_space(folder)
    if free < needed:
        raise CacheError(
            f"{folder} needs {needed / 2**30:.2f} GiB but the disk has {free / 2**30:.2f} GiB free: free some, lower "
            "k, use fewer samples or the 'compact' codecs, choose another place, or force the start"
        )


def free_space(folder: Path) -> int:
    """Bytes free on the disk that a folder lies on, or would."""
    folder = folder.expanduser().absolute()
    return shutil.disk_usage(next(place for place in (folder, *folder.parents) if place.exists())).free


def recommended_block(samples: int, seq_length: int, k: int, writers: int = 1) -> int:
    """Samples in a block: ranks of at least 64 MiB where the data set is that large, and a few blocks for each writer.

    Larger blocks make fewer objects; smaller ones share the work better and lose less when a writer is killed.
    """
    large = max(1, round(_SHARD_BYTES / (seq_length * k * _RANK_BYTES)))
    shared = max(1, samples // (8 * writers))
    return min(large, shared)
