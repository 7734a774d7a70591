"""Looking into a cache: its manifest, and what the teacher expected at some positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from megatron_kd.cache.blocks import BlockStore
from megatron_kd.cache.reader import TeacherCache
from megatron_kd.cache.store import Url, open_store

Decode = Callable[[list[int]], str]


def inspect(
    url: Url,
    storage_options: Mapping[str, Any] | None = None,
    samples: Sequence[int] = (0,),
    positions: int = 5,
    entries: int = 5,
    decode: Decode | None = None,
) -> str:
    """The manifest, how complete the cache is, and a few positions with the teacher's first entries.

    Args:
        url: a folder or any fsspec URL.
        storage_options: passed to fsspec.
        samples: which samples to show; those of missing blocks are left out.
        positions: how many positions of each, evenly spaced over those with loss_mask 1.
        entries: how many entries of each.
        decode: token ids → text; None shows the ids.
    """
    blocks = BlockStore(open_store(url, storage_options))
    m = blocks.manifest
    missing = blocks.missing()
    lines = [blocks.store.url]
    lines += [f"  {name:<20} {value}" for name, value in m.attributes().items()]
    lines += [
        f"  {'blocks':<20} {m.blocks - len(missing)} of {m.blocks} committed",
        f"  {'tokens':<20} {m.samples * m.seq_length:,}",
        f"  {'context ids':<20} {blocks.table.context_ids.size - 1:,}",
    ]
    text = decode or (lambda ids: " ".join(map(str, ids)))
    cache = TeacherCache(blocks)
    for sample in samples:
        if not 0 <= sample < m.samples:
            lines.append(f"\nsample {sample} does not exist: the cache has {m.samples}")
        elif sample // m.block in missing:
            lines.append(f"\nsample {sample} is in block {sample // m.block}, which is missing")
        else:
            lines += _show(cache, sample, positions, min(entries, m.k), text)
    return "\n".join(lines)


def _show(cache: TeacherCache, sample: int, positions: int, entries: int, text: Decode) -> list[str]:
    batch = cache.read([sample])
    trained = np.flatnonzero(batch.loss_mask[0])
    chosen = trained[np.linspace(0, trained.size - 1, min(positions, trained.size)).astype(int)]
    lines = []
    for t in chosen.tolist():
        context, label = batch.tokens[0, max(0, t - 11) : t + 1].tolist(), int(batch.tokens[0, t + 1])
        lines.append(f"\nsample {sample}, position {t}, document {batch.segment[0, t]}: …{text(context)!r}")
        lines.append(f"  {np.exp(batch.label_logprob[0, t]):>8.4f}  {text([label])!r} came next")
        for i, logprob in zip(batch.ids[0, t, :entries].tolist(), batch.logprobs[0, t, :entries].tolist()):
            if i >= 0:
                lines.append(f"  {np.exp(logprob):>8.4f}  {text([i])!r}{'  ←' if i == label else ''}")
        lines.append(f"  {np.exp(batch.tail_logprob[0, t]):>8.4f}  all but the {cache.manifest.k} entries")
    return lines
