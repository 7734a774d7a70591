"""Computing blocks one after the other, and the cache they go to.

The ids of a cache are stored as ranks in a table, which is fixed before the first block is written. It is made of the
entries of block 0: a table of the text's own words costs a tenth more (SmolLM2, Python's documentation, K = 100, by
frequency: 167 bytes a position for the ids against 153), because most entries are words the text never uses. So the
process that owns block 0 creates the cache once it has computed it; the others compute their first block meanwhile.

Collectives: none.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

from megatron_kd.cache import CacheWriter, Manifest, rank_table
from megatron_kd.console import Console, duration
from megatron_kd.data.samples import SampleSet
from megatron_kd.teacher.blocks import Arrays, compute_block
from megatron_kd.teacher.engine import Replica, TeacherEngine
from megatron_kd.teacher.write_behind import WriteBehind

_POLL_SECONDS = 0.2


def open_if_there(url: str, manifest: Manifest) -> CacheWriter | None:
    """The cache at `url` to go on with; None where there is none yet. Raises `CacheError` where it is another."""
    return CacheWriter.resume(url, manifest) if CacheWriter.exists(url) else None


def fill(
    url: str,
    manifest: Manifest,
    writer: CacheWriter | None,
    blocks: Sequence[int],
    samples: SampleSet,
    engine: TeacherEngine,
    *,
    replica: Replica,
    chunk_tokens: int,
    console: Console,
) -> None:
    """Computes and writes `blocks`, in this order. All ranks of a replica compute them together, one writes.

    Args:
        url: where the cache is, or is going to be.
        manifest: what it holds.
        writer: the cache, if it is there.
        blocks: this replica's share of the missing blocks.
        samples: the teacher's input.
        engine: the teacher.
        replica: this rank's part in it, and how many replicas are at work.
        chunk_tokens: positions whose logits exist at a time.
        console: shows progress.
    """
    total = sum(manifest.rows(block).stop - manifest.rows(block).start for block in blocks)
    started, done, queue = time.perf_counter(), 0, None
    with ExitStack() as stack:
        progress = stack.enter_context(console.progress("teacher", total, "samples"))
        for block in blocks:
            for result in compute_block(engine, samples, block, manifest, chunk_tokens, replica):
                now = done + result.done
                speed = now * manifest.seq_length / (time.perf_counter() - started)
                progress.update(now, {"block": block, "nll": result.nll, "tokens_per_second": speed})
            if not done:
                seconds = (time.perf_counter() - started) / result.done * (total - result.done)
                together = f"{speed * replica.count:,.0f} tokens/s on {replica.count} replica(s)"
                console.quantity("time left", duration(seconds), together)
            done += result.done
            if not replica.leads:
                continue
            if queue is None:
                if writer is None:
                    writer = _create_or_await(url, manifest, block, result.arrays)
                queue = stack.enter_context(WriteBehind(writer))
            queue.submit(block, result.arrays)


def _create_or_await(url: str, manifest: Manifest, block: int, arrays: Arrays) -> CacheWriter:
    if block == 0:
        table = rank_table(arrays["tokens"], arrays["ids"], manifest.vocab_size)
        return CacheWriter.open_or_create(url, manifest, table)
    while not CacheWriter.exists(url):
        time.sleep(_POLL_SECONDS)
    return CacheWriter.resume(url, manifest)
