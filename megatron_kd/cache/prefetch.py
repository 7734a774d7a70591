"""Reading ahead: batches are decoded in the background while the trainer computes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType

import numpy as np

from megatron_kd.cache.decode import CacheBatch
from megatron_kd.cache.reader import TeacherCache


class Prefetcher:
    """Iterates over the targets of lists of samples, a bounded number of them ahead of the consumer.

    An error in the background is raised in the consumer, at the batch it belongs to. Leaving the `with` block, or
    `close`, stops the thread at its next batch, also when the consumer did not read to the end.

    Args:
        cache: an open cache; its `threads` decode the samples of a batch side by side.
        batches: lists of sample ids; may be endless.
        k: see `TeacherCache.read`.
        temperature: see `TeacherCache.read`.
        depth: batches decoded ahead.
    """

    def __init__(
        self,
        cache: TeacherCache,
        batches: Iterable[Sequence[int] | np.ndarray],
        k: int | None = None,
        temperature: float = 1.0,
        depth: int = 2,
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth is {depth}; it must be at least 1")
        self._ready: queue.Queue[CacheBatch | BaseException | None] = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(cache, batches, k, temperature), name="cache-prefetch", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Iterator[CacheBatch]:
        while not self._stop.is_set():
            item = self._ready.get()
            if item is None:
                self._stop.set()
            elif isinstance(item, BaseException):
                self._stop.set()
                raise item
            else:
                yield item

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading ahead and wait for the thread."""
        self._stop.set()
        while self._thread.is_alive():
            # The thread may be waiting for room.
            try:
                self._ready.get(timeout=0.01)
            except queue.Empty:
                continue
        self._thread.join()

    def _run(
        self,
        cache: TeacherCache,
        batches: Iterable[Sequence[int] | np.ndarray],
        k: int | None,
        temperature: float,
    ) -> None:
        try:
            for samples in batches:
                if self._stop.is_set():
                    return
                self._ready.put(cache.read(samples, k, temperature))
        except BaseException as error:
            self._ready.put(error)
        else:
            self._ready.put(None)
