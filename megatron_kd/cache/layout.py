"""The objects of a cache as bytes: its metadata, and one block.

zarr makes every byte, in memory; what reaches the store is a list of finished objects. So each is written once, whole,
in an order that this package chooses: metadata before the group's own `zarr.json`, arrays before their commit word.

    zarr.json                       the group: manifest, hash of the tables, hash of all metadata. Written last
    <array>/zarr.json               one each
    <table>/c.0                     id_by_rank, context_start, context_ids
    <array>/c.<block>.0…            one shard, a whole block
    commit/c.<block>                the block's commit word
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import zarr
from zarr.storage import MemoryStore

from megatron_kd.cache.codecs import compressors, preset
from megatron_kd.cache.ranks import RankTable
from megatron_kd.cache.schema import BLOCK_ARRAYS, COMMIT, FORMAT, TABLES, CacheError, Manifest, block_arrays

ROOT = "zarr.json"
# Every object that is there before the first block, the group's own last.
TABLE_KEYS = {name: f"{name}/c.0" for name in TABLES}
METADATA_KEYS = (*(f"{name}/{ROOT}" for name in (*BLOCK_ARRAYS, COMMIT, *TABLES)), *TABLE_KEYS.values(), ROOT)
_KEY_SUFFIX = {name: ".0" * axes for name, axes in BLOCK_ARRAYS.items()} | {COMMIT: ""}
_SETTINGS = threading.Lock()
_TABLE_HASH, _METADATA_HASH = "tables_sha256", "metadata_sha256"


class BlockEncoder:
    """Turns the stored arrays of a block into objects."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.specs = block_arrays(manifest)
        self._objects: dict[str, Any] = {}
        self._arrays = _create_arrays(zarr.create_group(MemoryStore(self._objects), zarr_format=3), manifest)

    def document(self, array: str) -> dict[str, Any]:
        """The parsed zarr.json of an array."""
        return json.loads(self._objects[f"{array}/{ROOT}"].to_bytes())

    def encode(self, index: int, stored: Mapping[str, np.ndarray], commit_word: int) -> dict[str, bytes]:
        """Key → bytes of one block, the commit word last."""
        with _own_pipeline():  # sharding asks for it anew
            for spec in self.specs:
                self._arrays[spec.name][self.manifest.rows(index)] = stored[spec.name]
            self._arrays[COMMIT][index] = commit_word
        return {key: self._objects.pop(key).to_bytes() for key in block_keys(index).values()}


def metadata(manifest: Manifest, table: RankTable) -> dict[str, bytes]:
    """Key → bytes of METADATA_KEYS: what every cache begins with, the group's own document last."""
    found: dict[str, Any] = {}
    group = zarr.create_group(MemoryStore(found), zarr_format=3)
    _create_arrays(group, manifest)
    for name in TABLES:
        values = getattr(table, name)
        # No id and no place is −2: a missing table cannot look like one.
        _create(group, manifest, name, values.shape, "<i4", -2, values.shape)[:] = values
    table_hash = _hash(found[key].to_bytes() for key in TABLE_KEYS.values())
    group.update_attributes(manifest.attributes() | {_TABLE_HASH: table_hash})
    parsed = {key: json.loads(data.to_bytes()) for key, data in found.items() if key.endswith(ROOT)}
    group.update_attributes({_METADATA_HASH: metadata_hash(parsed)})
    return {key: found[key].to_bytes() for key in METADATA_KEYS}


def block_keys(index: int) -> dict[str, str]:
    """Array → key of the object that holds its part of block `index`; the commit word last."""
    return {name: f"{name}/c.{index}{suffix}" for name, suffix in _KEY_SUFFIX.items()}


def check_metadata(documents: Mapping[str, bytes | None]) -> dict[str, dict[str, Any]]:
    """Check the metadata objects of a cache against the hashes in the group's attributes.

    Args:
        documents: key → bytes of METADATA_KEYS; None where the object is missing.

    Returns:
        key → parsed zarr.json.
    """
    check_format(documents[ROOT] or b"")
    for key, data in documents.items():
        if data is None:
            raise CacheError(f"{key} is missing: the cache's metadata is damaged; restore it from a copy")
    parsed = {key: _parse(key, data) for key, data in documents.items() if key.endswith(ROOT) and data is not None}
    attributes = parsed[ROOT]["attributes"]
    computed = metadata_hash(parsed)
    if attributes.get(_METADATA_HASH) != computed:
        raise CacheError(
            f"the zarr.json files hash to {computed} but the group records {attributes.get(_METADATA_HASH)}: "
            "one of them was altered; restore them from a copy"
        )
    if attributes.get(_TABLE_HASH) != _hash(documents[key] for key in TABLE_KEYS.values()):
        names = ", ".join(TABLE_KEYS.values())
        raise CacheError(f"one of {names} is not what the cache was made with: restore them from a copy")
    return parsed


def check_format(root: bytes) -> None:
    """Raise where the group's zarr.json is not one of this format; its other contents are not looked at."""
    found = _parse(ROOT, root)["attributes"].get("format")
    if found != FORMAT:
        raise CacheError(
            f"the cache has format {found!r} but this version reads format {FORMAT}: "
            "use a matching version, or check that the URL points at a teacher cache"
        )


def metadata_hash(parsed: Mapping[str, Any]) -> str:
    """sha256 of the canonical JSON of every zarr.json, the hash itself taken out."""
    root = dict(parsed[ROOT])
    root["attributes"] = {name: value for name, value in root["attributes"].items() if name != _METADATA_HASH}
    text = json.dumps({**parsed, ROOT: root}, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return _hash([text.encode()])


def _create_arrays(group: zarr.Group, manifest: Manifest) -> dict[str, zarr.Array]:
    arrays = {}
    for spec in block_arrays(manifest):
        shape, chunk, shard = (manifest.samples, *spec.shape), (1, *spec.inner), (manifest.block, *spec.shape)
        arrays[spec.name] = _create(group, manifest, spec.name, shape, spec.dtype, spec.fill, chunk, shard)
    return arrays | {COMMIT: _create(group, manifest, COMMIT, (manifest.blocks,), "<u8", 0, (1,))}


def _create(
    group: zarr.Group,
    manifest: Manifest,
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    fill: int | float,
    chunk: tuple[int, ...],
    shard: tuple[int, ...] | None = None,
) -> zarr.Array:
    # The index stands first: its place is known without knowing the object's length.
    shards: Any = {"shape": shard, "index_location": "start"} if shard else None
    with _own_pipeline():
        return group.create_array(
            name,
            shape=shape,
            dtype=dtype,
            fill_value=fill,
            chunks=chunk,
            shards=shards,
            chunk_key_encoding={"name": "default", "separator": "."},
            # A chunk that happens to hold nothing but the fill value is data as well.
            config={"write_empty_chunks": True},
            filters=[],
            compressors=compressors(name, dtype, preset(manifest.codecs)),
        )


@contextmanager
def _own_pipeline() -> Iterator[None]:
    """Writing must not depend on the codec pipeline that the user may have chosen for reading.

    zarr's settings belong to the whole process: one thread at a time, or a second would restore the first's.
    """
    with _SETTINGS, zarr.config.set({"codec_pipeline.path": "zarr.core.codec_pipeline.BatchedCodecPipeline"}):
        yield


def _hash(parts: Iterable[bytes | None]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part or b"")
    return digest.hexdigest()


def _parse(key: str, data: bytes) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except ValueError as error:
        raise CacheError(f"{key} is not JSON ({error}): restore it from a copy") from error
    if not isinstance(document, dict) or (key == ROOT and not isinstance(document.get("attributes"), dict)):
        raise CacheError(f"{key} is not the metadata of a cache: restore it from a copy")
    return document
