"""What a cache's targets look like: how much of the teacher they hold, and what they cost in bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_kd.cache.blocks import BlockStore
from megatron_kd.cache.decode import CacheBatch
from megatron_kd.cache.layout import block_keys
from megatron_kd.cache.reader import TeacherCache
from megatron_kd.cache.schema import COMMIT, CacheError, Manifest
from megatron_kd.cache.store import Url, open_store

_SHOWN = (1, 2, 4, 8, 16, 32, 64, 100, 128, 256)


@dataclass(frozen=True)
class Stats:
    """Means over the positions with loss_mask 1 of the blocks looked at."""

    manifest: Manifest
    blocks: int  # blocks looked at
    positions: int  # with loss_mask 1
    mass: Mapping[int, float]  # K′ → probability the first K′ entries hold
    tail: float  # probability outside all entries, as stored
    label_among_entries: float  # share of positions whose label is one of the entries
    teacher_nll: float  # nats: mean of −label_logprob
    bytes_by_array: Mapping[str, int]  # of the blocks looked at
    bytes_per_token: float

    def __str__(self) -> str:
        tokens = max(sum(self.bytes_by_array.values()) / max(self.bytes_per_token, 1e-9), 1)
        m = self.manifest
        lines = [
            f"{self.positions:,} positions of {self.blocks} blocks, entries: {m.entries}, K = {m.k}",
            "",
            f"{'entries':>8}  {'mass':>8}",
            *(f"{k:>8}  {mass:>8.4f}" for k, mass in self.mass.items()),
            f"{'outside':>8}  {self.tail:>8.4f}",
            "",
            f"label among the entries  {self.label_among_entries:.4f}",
            f"teacher's NLL            {self.teacher_nll:.4f} nats, perplexity {np.exp(self.teacher_nll):.2f}",
            "",
            f"{'array':<18}  {'bytes':>14}  {'a token':>8}",
            *(f"{name:<18}  {size:>14,}  {size / tokens:>8.2f}" for name, size in self.bytes_by_array.items()),
            f"{'all':<18}  {sum(self.bytes_by_array.values()):>14,}  {self.bytes_per_token:>8.2f}",
        ]
        return "\n".join(lines)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """The same as a picture: mass by K′, bytes by array."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 4), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        left.plot(list(self.mass), list(self.mass.values()), marker="o")
        left.set(
            xscale="log", xlabel="entries K′", ylabel="teacher's probability", title="mass covered", ylim=(0, 1.02)
        )
        left.grid(alpha=0.3)
        right.barh(list(self.bytes_by_array), list(self.bytes_by_array.values()))
        right.set(xlabel="bytes", title=f"{self.bytes_per_token:.1f} bytes a token")
        right.invert_yaxis()
        figure.savefig(Path(path), dpi=120)


def stats(
    url: Url,
    storage_options: Mapping[str, Any] | None = None,
    max_blocks: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Stats:
    """Statistics of a cache's committed blocks.

    Args:
        url: a folder or any fsspec URL.
        storage_options: passed to fsspec.
        max_blocks: look at no more than so many, evenly spaced; None for all.
        progress: called after each block with blocks done and blocks in all.
    """
    blocks = BlockStore(open_store(url, storage_options))
    cache, m = TeacherCache(blocks), blocks.manifest
    absent = set(blocks.missing())
    present = [index for index in range(m.blocks) if index not in absent]
    if not present:
        raise CacheError(f"{blocks.store.url} has no committed block yet: resume the writer first")
    chosen = present[:: -(-len(present) // max_blocks)] if max_blocks else present
    shown = [k for k in _SHOWN if k < m.k] + [m.k]
    sums = np.zeros(len(shown) + 4)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done, part in enumerate(pool.map(lambda index: _sums(cache.read_block(index), shown), chosen), 1):
            sums += part
            if progress is not None:
                progress(done, len(chosen))
    count = max(sums[-1], 1)
    keys = [block_keys(index) for index in chosen]
    sizes = {name: blocks.store.sizes(name) for name in keys[0]}
    by_array = {name: sum(sizes[name][key[name].split("/")[1]] for key in keys) for name in keys[0] if name != COMMIT}
    tokens = sum(len(range(*m.rows(index).indices(m.samples))) for index in chosen) * m.seq_length
    return Stats(
        manifest=m,
        blocks=len(chosen),
        positions=int(sums[-1]),
        mass=dict(zip(shown, (sums[: len(shown)] / count).tolist())),
        tail=float(sums[-4] / count),
        label_among_entries=float(sums[-3] / count),
        teacher_nll=float(sums[-2] / count),
        bytes_by_array=by_array,
        bytes_per_token=sum(by_array.values()) / tokens,
    )


def _sums(batch: CacheBatch, shown: list[int]) -> np.ndarray:
    """Of one block: mass at each K′, tail, labels among entries, NLL, positions."""
    on = batch.loss_mask == 1
    mass = np.cumsum(np.exp(batch.logprobs[on], dtype=np.float64), axis=-1)
    labels = (batch.ids[on] == batch.tokens[:, 1:][on][:, None]).any(axis=-1)
    return np.array(
        [
            *mass[:, [k - 1 for k in shown]].sum(axis=0),
            np.exp(batch.tail_logprob[on], dtype=np.float64).sum(),
            labels.sum(),
            -batch.label_logprob[on].sum(dtype=np.float64),
            on.sum(),
        ]
    )
