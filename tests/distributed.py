"""Run a function, or a script, on several gloo processes.

    results = run_ranks(function, 2, arguments…, timeout=60)    what each rank returns, or the first failure
    done = run_script("launch/distill.py", arguments…, ranks=2)    as a subprocess: exit code, stdout, stderr

`function(rank, world_size, *arguments)` is a module-level function; it runs with the default process group set up.
Arguments and results are pickled. When a rank fails the others are ended and its traceback is raised here; at the
timeout all are ended. No rank outlives the call. Ranks are forked from a server that has imported what takes longest
and done nothing with it, which saves ten seconds a rank; it ends with the test process. What torchrun itself does
with ranks is tested under torchrun.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import pickle
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_IMPORTED = ["torch.distributed"]
# Transformer Engine looks for a GPU as it is imported, which no process may do before it forks.
if importlib.util.find_spec("transformer_engine") is None:
    _IMPORTED += [
        "transformers.models.auto.modeling_auto",
        "transformers.models.llama.modeling_llama",
        "megatron_kd.teacher.run",
        "megatron_kd.train.run",
    ]
_STREAMS = ("stdout", "stderr")


class RankFailed(AssertionError):
    """A rank raised, died or ran out of time."""


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = 400) -> list[Any]:
    """[function(rank, world_size, *arguments) of every rank]."""
    context = _context()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        job = (world_size, folder, timeout, dict(os.environ), function, arguments)
        ranks = [context.Process(target=_rank, args=(rank, *job), daemon=True) for rank in range(world_size)]
        try:
            for process in ranks:
                process.start()
            _wait(ranks, time.monotonic() + timeout)
            _raise_first_failure(ranks, Path(folder))
            return [pickle.loads((Path(folder) / f"result-{rank}").read_bytes()) for rank in range(world_size)]
        finally:
            _end(ranks)


def run_script(
    script: str | Path, *arguments: str, ranks: int = 1, timeout: float = 400
) -> subprocess.CompletedProcess[str]:
    """`python script arguments…`, or on several ranks what torchrun would start; a failed rank's exit code is all's."""
    context, port = _context(), _free_port()
    command = [str(script), *arguments]
    with tempfile.TemporaryDirectory(prefix="script-") as folder:
        job = (ranks, port, folder, os.getcwd(), dict(os.environ), command)
        processes = [context.Process(target=_script, args=(rank, *job)) for rank in range(ranks)]
        try:
            for process in processes:
                process.start()
            _wait(processes, time.monotonic() + timeout)
            code = next((process.exitcode for process in processes if process.exitcode), 0)
        finally:
            _end(processes)
        output = ["".join(Path(folder, f"{name}-{rank}").read_text() for rank in range(ranks)) for name in _STREAMS]
    return subprocess.CompletedProcess(command, code, *output)


def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _wait(processes: list[BaseProcess], deadline: float) -> None:
    """Until all have ended, or one has failed."""
    while any(process.exitcode is None for process in processes) and not any(p.exitcode for p in processes):
        if time.monotonic() > deadline:
            running = [rank for rank, process in enumerate(processes) if process.exitcode is None]
            raise RankFailed(f"out of time; still running: ranks {running}")
        time.sleep(0.02)


def _end(processes: list[BaseProcess]) -> None:
    for process in processes:
        if process.pid is not None:
            process.kill()
            process.join()


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


def _script(
    rank: int,
    ranks: int,
    port: int,
    folder: str,
    working_directory: str,
    environment: dict[str, str],
    command: list[str],
) -> None:
    """Becomes `python command…`; what follows an exit or an exception is multiprocessing's, and the same."""
    os.environ.clear()
    os.environ.update(environment)
    if ranks > 1:
        torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        torchrun |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in torchrun.items()})
    os.chdir(working_directory)
    for number, name in enumerate(_STREAMS, 1):
        with open(os.path.join(folder, f"{name}-{rank}"), "w") as file:
            os.dup2(file.fileno(), number)
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")
