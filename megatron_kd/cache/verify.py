"""Checking a cache, or some blocks of it: every object decoded, every commit word recomputed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from megatron_kd.cache.blocks import BlockStore
from megatron_kd.cache.schema import CacheError
from megatron_kd.cache.store import Url, open_store


@dataclass(frozen=True)
class Report:
    """What `verify` found."""

    url: str
    blocks: int  # looked at
    missing: tuple[int, ...] = ()  # never committed: a resumed writer fills them
    damaged: Mapping[int, str] = field(default_factory=dict)  # block → what is wrong with it, array named
    metadata: str | None = None  # what is wrong with the metadata; nothing else was looked at then
    leftovers: tuple[str, ...] = ()  # partial files of killed writers: harmless

    @property
    def ok(self) -> bool:
        """Complete and undamaged."""
        return not (self.missing or self.damaged or self.metadata)

    def __str__(self) -> str:
        if self.metadata:
            return f"{self.url}: metadata damaged: {self.metadata}"
        good = self.blocks - len(self.missing) - len(self.damaged)
        lines = [f"{self.url}: {good} of {self.blocks} blocks good"]
        if self.missing:
            lines.append(f"missing: {len(self.missing)} blocks ({_shorten(self.missing)})")
        lines += [f"damaged: {message}" for message in self.damaged.values()]
        if self.leftovers:
            lines.append(f"leftover partial files: {len(self.leftovers)} (harmless)")
        return "\n".join(lines)


def verify(
    url: Url,
    storage_options: Mapping[str, Any] | None = None,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    only: Sequence[int] | None = None,
) -> Report:
    """Decode every object and recompute every commit word.

    Args:
        url: a folder or any fsspec URL.
        storage_options: passed to fsspec.
        threads: blocks checked at once; None for the number of cores.
        progress: called after each block with blocks done and blocks in all.
        only: the blocks to look at; None for all.
    """
    store = open_store(url, storage_options)
    try:
        blocks = BlockStore(store)
    except CacheError as error:
        return Report(store.url, 0, metadata=str(error))
    wanted = range(blocks.manifest.blocks) if only is None else only
    missing: list[int] = []
    damaged: dict[int, str] = {}
    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        for done, (index, fault) in enumerate(zip(wanted, pool.map(lambda i: _fault(blocks, i), wanted)), start=1):
            if fault is not None and fault.missing:
                missing.append(index)
            elif fault is not None:
                damaged[index] = fault.message
            if progress is not None:
                progress(done, len(wanted))
    return Report(store.url, len(wanted), tuple(missing), damaged, leftovers=tuple(blocks.leftovers()))


@dataclass(frozen=True)
class _Fault:
    missing: bool
    message: str


def _fault(blocks: BlockStore, index: int) -> _Fault | None:
    try:
        if blocks.commit(index) == 0:
            return _Fault(missing=True, message="")
        blocks.block(index)
    except CacheError as error:
        return _Fault(missing=False, message=str(error))
    return None


def _shorten(numbers: tuple[int, ...], shown: int = 10) -> str:
    return ", ".join(map(str, numbers[:shown])) + (", …" if len(numbers) > shown else "")
