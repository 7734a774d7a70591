"""Changing which blocks a cache holds, without a teacher: joining caches, giving up damaged blocks.

A block's objects are the same bytes whoever writes them, so they can be copied between caches of one manifest and one
table. To fill a cache on several machines that share no disk: copy the metadata (everything but `c.*` files of blocks)
of a fresh cache to each, let each write its share, then merge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_kd.cache.blocks import BlockStore
from megatron_kd.cache.layout import METADATA_KEYS, ROOT, TABLE_KEYS, block_keys
from megatron_kd.cache.schema import COMMIT, CacheError
from megatron_kd.cache.store import Url, open_store
from megatron_kd.cache.verify import Report, verify

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Merged:
    """What `merge` did."""

    copied: Mapping[str, int]  # source → blocks taken from it
    missing: tuple[int, ...]  # blocks that no source holds undamaged
    damaged: Sequence[str] = ()  # what was wrong with blocks that were left behind

    def __str__(self) -> str:
        lines = [f"{number} blocks from {source}" for source, number in self.copied.items()]
        lines += [f"damaged, left behind: {message}" for message in self.damaged]
        lines.append(f"{len(self.missing)} blocks still missing" if self.missing else "complete")
        return "\n".join(lines)


def merge(
    target: Url,
    sources: Sequence[Url],
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Merged:
    """Copy into `target` the blocks it lacks from caches of the same manifest; it is created where it does not exist.

    Every block is checked before it is copied.

    Args:
        target: where to.
        sources: where from, in order of preference.
        storage_options: passed to fsspec, for all of them.
        progress: called after each block with blocks done and blocks in all.
    """
    if not sources:
        raise ValueError("sources is empty: name at least one cache to copy from")
    found = [BlockStore(open_store(url, storage_options)) for url in sources]
    store = open_store(target, storage_options)
    if store.read(ROOT) is None:
        for key in METADATA_KEYS:
            store.write(key, found[0].store.read(key) or b"")
    into = BlockStore(store)
    for source in found:
        difference = into.manifest.difference(source.manifest)
        if difference is None and any(into.store.read(key) != source.store.read(key) for key in TABLE_KEYS.values()):
            difference = f"tables {', '.join(TABLE_KEYS)}"
        if difference:
            raise CacheError(f"{source.store.url} holds other targets than {store.url}: {difference}")

    copied = {source.store.url: 0 for source in found}
    damaged: list[str] = []
    missing: list[int] = []
    wanted = into.missing()
    held = [set(range(source.manifest.blocks)) - set(source.missing()) for source in found]
    for done, index in enumerate(wanted, 1):
        for source, blocks in zip(found, held):
            if index not in blocks:
                continue
            try:
                source.block(index)
            except CacheError as error:
                damaged.append(str(error))
                continue
            _copy(source, into, index)
            copied[source.store.url] += 1
            break
        else:
            missing.append(index)
        if progress is not None:
            progress(done, len(wanted))
    return Merged(copied, tuple(missing), tuple(damaged))


def repair(
    url: Url, storage_options: Mapping[str, Any] | None = None, progress: Progress | None = None
) -> tuple[Report, list[int]]:
    """Verify a cache, mark its damaged blocks as missing so that a resumed writer fills them, remove leftover files.

    No writer may be at work meanwhile. Damaged metadata is beyond repair: it raises.

    Returns:
        What verify found, and the blocks marked.
    """
    report = verify(url, storage_options, progress=progress)
    if report.metadata:
        raise CacheError(report.metadata)
    blocks = BlockStore(open_store(url, storage_options))
    for index in report.damaged:
        blocks.store.delete(block_keys(index)[COMMIT])
    for key in report.leftovers:
        blocks.store.delete(key)
    return report, sorted(report.damaged)


def _copy(source: BlockStore, into: BlockStore, index: int) -> None:
    """All objects of a block, the commit word last."""
    keys = list(block_keys(index).values())
    objects: dict[str, bytes] = {}
    for key, data in zip(keys, source.store.read_many(keys)):
        if data is None:
            raise CacheError(f"{source.store.url}: {key} vanished while block {index} was copied")
        objects[key] = data
    commit = objects.pop(keys[-1])
    into.store.write_many(objects)
    into.store.write(keys[-1], commit)
