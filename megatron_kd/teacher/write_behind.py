"""Blocks are compressed and stored behind the teacher's back, while it computes the next ones.

A bounded number of blocks is in flight, so a slow store slows the teacher down instead of filling memory. The first
write that fails ends the job: its error is raised at the next `submit` or at the end, never swallowed.

Collectives: none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import numpy as np

from megatron_kd.cache import CacheWriter


class WriteBehind:
    """A queue of whole blocks in front of a `CacheWriter`; a context manager that waits for what is in flight."""

    def __init__(self, writer: CacheWriter, in_flight: int = 2) -> None:
        """Args: writer: where blocks go; in_flight: blocks being written at a time."""
        self._writer = writer
        self._pool = ThreadPoolExecutor(max_workers=in_flight, thread_name_prefix="cache-writer")
        self._pending: deque[Future[None]] = deque()
        self._in_flight = in_flight

    def __enter__(self) -> WriteBehind:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._wait_until(0)
        finally:
            self._pool.shutdown(wait=kind is None, cancel_futures=True)

    def submit(self, index: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Hands block `index` over; waits while too many are in flight; raises what an earlier write raised."""
        self._wait_until(self._in_flight - 1)
        self._pending.append(self._pool.submit(self._writer.write_block, index, arrays))

    def _wait_until(self, pending: int) -> None:
        while self._pending and (len(self._pending) > pending or self._pending[0].done()):
            self._pending.popleft().result()
