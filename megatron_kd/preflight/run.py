"""`megatron-kd preflight`: every node is examined before a run, and a table says what would have gone wrong.

One process a node, which torchrun starts (launch/nodes.sh); by hand, a single process examines its own node. What a
node can say alone is facts.py, what needs several is measured here, and checks.py compares.

Collectives, all over gloo but the timed one: gathers of the facts, barriers, and `_ROUNDS` gathers of clock readings.
The timed all-reduce runs over NCCL where the nodes have GPUs, through the first GPU of each.

    bandwidth = 2·(n − 1)/n · bytes / seconds        n nodes: what each link carries in a ring
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_kd import platform
from megatron_kd.config import RunConfig
from megatron_kd.plan.planned import plan_run
from megatron_kd.plan.report import make_report
from megatron_kd.preflight.checks import Row, check_nodes, network
from megatron_kd.preflight.facts import CheckpointNeed, NodeFacts, checkpoint_need, node_facts

_ROUNDS = 7
_TIMEOUT_SECONDS = 120.0  # to reach all nodes
_REDUCED_BYTES = {"nccl": 1 << 28, "gloo": 1 << 23}


def preflight(
    config: RunConfig,
    job: str,
    gpus: int | None = None,
    *,
    facts: Callable[..., NodeFacts] = node_facts,
    clock: Callable[[], float] = time.time,
) -> list[Row]:
    """Examines this node together with the others; collective, one process a node.

    Args:
        config: the run.
        job: `distill` or `cache_teacher`.
        gpus: ranks of a node, each with a GPU; 0 for one rank on the CPU; None for all that node 0 has.
        facts: how a node finds out about itself.
        clock: its clock.

    Returns:
        One row a check, the same on every node.
    """
    node, nodes = platform.join_group("gloo", _TIMEOUT_SECONDS)
    mine = facts(config, node, nodes, reads_cache=job == "distill")
    need = checkpoint_need(config) if node == 0 and job == "distill" else CheckpointNeed()
    mine = dataclasses.replace(mine, clock=_ahead_of_first(clock), shares_run_dir=_sees_first(config, node))
    said: list[tuple[NodeFacts, CheckpointNeed]] = _gather((mine, need))
    everybody = [one for one, _ in said]
    gpus = len(everybody[0].gpus) if gpus is None else gpus
    config = with_planned_memory(config, job, nodes, gpus)
    on_gpus = gpus > 0 and all(one.gpus for one in everybody)
    how = f"{'NCCL' if on_gpus else 'gloo'} all-reduce"
    return [
        *check_nodes(config, job, gpus, everybody, said[0][1]),
        network(config, nodes, _bandwidth("nccl" if on_gpus else "gloo"), how),
    ]


def with_planned_memory(config: RunConfig, job: str, nodes: int, gpus: int) -> RunConfig:
    """The configuration with `preflight.gpu_memory_gib` as planned on so many nodes, where it asks for that.

    Left as it is where there is nothing to plan: for a teacher, on the CPU, or without the student's sizes at hand.
    """
    if config.preflight.gpu_memory_gib is not None or job != "distill" or not gpus:
        return config
    hardware = dataclasses.replace(config.hardware, nodes=nodes, gpus_per_node=gpus)
    try:
        report = make_report("", plan_run(dataclasses.replace(config, hardware=hardware)))
    except ValueError:
        return config
    memory = dataclasses.replace(config.preflight, gpu_memory_gib=report.peak_gib)
    return dataclasses.replace(config, preflight=memory)


def _gather(value: Any) -> list[Any]:
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def _ahead_of_first(clock: Callable[[], float]) -> float:
    """Seconds that this node's clock is ahead of node 0's.

    torchrun's rendezvous compares the nodes' wall clocks to tell who is still alive, and gives a node up after 15 s;
    logs and files of several nodes are read side by side. All read their clocks as they leave a barrier; they leave
    it at slightly different times, so the smallest of several differences is the closest.
    """
    differences = []
    for _ in range(_ROUNDS):
        dist.barrier()
        readings = _gather(clock())
        differences.append(readings[dist.get_rank()] - readings[0])
    return min(differences, key=abs)


def _sees_first(config: RunConfig, node: int) -> bool:
    """Whether what node 0 writes under `run_dir` appears here: metrics and checkpoints must."""
    folder = Path(config.run_dir)
    probe = folder / f".preflight-{_gather(f'{os.getpid()}-{time.time_ns()}')[0]}"
    with contextlib.suppress(OSError):  # what node 0 cannot write nobody sees
        if node == 0:
            folder.mkdir(parents=True, exist_ok=True)
            probe.touch()
    dist.barrier()
    seen = probe.exists()
    dist.barrier()
    if node == 0:
        probe.unlink(missing_ok=True)
    return seen


def _bandwidth(backend: str) -> float | str | None:
    """GB/s of an all-reduce between the nodes, the median of some; why it failed; None on a single node."""
    nodes = dist.get_world_size()
    if nodes == 1:
        return None
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    size = _REDUCED_BYTES[backend]
    try:
        group = dist.new_group(backend=backend, timeout=timedelta(seconds=_TIMEOUT_SECONDS))
        buffer = torch.zeros(size, dtype=torch.uint8, device=device)
        seconds = []
        for _ in range(_ROUNDS):
            dist.barrier()
            platform.synchronize()
            started = time.perf_counter()
            dist.all_reduce(buffer, group=group)
            platform.synchronize()
            seconds.append(time.perf_counter() - started)
    except RuntimeError as error:
        return f"the {backend} all-reduce failed: {str(error).splitlines()[0]}"
    slowest = max(_gather(statistics.median(seconds[1:])))  # the first one sets up the connections
    return 2 * (nodes - 1) / nodes * size / slowest / 1e9
