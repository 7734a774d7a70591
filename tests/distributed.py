"""Run a function on several gloo processes and bring back what each returns, or the first failure.

    results = run_ranks(function, 2, arguments…, timeout=60)

`function(rank, world_size, *arguments)` is a module-level function; it runs with the default process group set up.
Arguments and results are pickled. When a rank fails the others are ended and its traceback is raised here; at the
timeout all are ended. No rank outlives the call. Ranks are forked from a server that has imported torch and done
nothing with it, which saves seconds a rank; it ends with the test process. A test still hands one call many cases.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any


class RankFailed(AssertionError):
    """A rank raised, died or ran out of time."""


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = 400) -> list[Any]:
    """[function(rank, world_size, *arguments) of every rank]."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed"])
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        job = (world_size, folder, timeout, dict(os.environ), function, arguments)
        ranks = [context.Process(target=_rank, args=(rank, *job), daemon=True) for rank in range(world_size)]
        try:
            for process in ranks:
                process.start()
            _wait(ranks, Path(folder), time.monotonic() + timeout)
            return [pickle.loads((Path(folder) / f"result-{rank}").read_bytes()) for rank in range(world_size)]
        finally:
            for process in ranks:
                if process.pid is not None:
                    process.kill()
                    process.join()


def _wait(ranks: list[BaseProcess], folder: Path, deadline: float) -> None:
    while any(process.exitcode is None for process in ranks):
        _raise_first_failure(ranks, folder)
        if time.monotonic() > deadline:
            running = [rank for rank, process in enumerate(ranks) if process.exitcode is None]
            raise RankFailed(f"out of time; still running: ranks {running}")
        time.sleep(0.02)
    _raise_first_failure(ranks, folder)


def _raise_first_failure(ranks: list[BaseProcess], folder: Path) -> None:
    if all(process.exitcode in (None, 0) for process in ranks):
        return
    # The first to write its traceback is the cause; the others fail because it left.
    reports = sorted(folder.glob("failure-*"), key=lambda path: path.stat().st_mtime_ns)
    if reports:
        raise RankFailed(f"rank {reports[0].name.removeprefix('failure-')} failed:\n{reports[0].read_text()}")
    codes = {rank: process.exitcode for rank, process in enumerate(ranks) if process.exitcode not in (None, 0)}
    raise RankFailed(f"ranks died without a traceback; exit codes: {codes}")


def _rank(
    rank: int,
    world_size: int,
    folder: str,
    timeout: float,
    environment: dict[str, str],
    function: Callable[..., Any],
    arguments: Any,
) -> None:
    os.environ.update(environment)  # the server has that of the first call
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        store = dist.FileStore(os.path.join(folder, "store"), world_size)
        limit = timedelta(seconds=timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
        result = function(rank, world_size, *arguments)
        Path(folder, f"result-{rank}").write_bytes(pickle.dumps(result))
    except BaseException:
        report = Path(folder, f"partial-{rank}")
        report.write_text(traceback.format_exc())
        report.rename(Path(folder, f"failure-{rank}"))
        os._exit(1)
    dist.barrier()
    dist.destroy_process_group()
