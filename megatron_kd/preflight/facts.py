"""What one node says about itself, before anything is compared: its GPUs, its software, its view of cache and disk.

Collectives: none. Nothing here raises for a fault of the node; a fault is a fact.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from megatron_kd import platform
from megatron_kd.cache import BlockStore, CacheError, free_space, verify
from megatron_kd.cache.store import open_store
from megatron_kd.config import RunConfig
from megatron_kd.console import byte_count

# Bytes that a checkpoint holds of a parameter: the weight in the training's precision, where that is bf16 an fp32 copy,
# and Adam's two moments in fp32.
CHECKPOINT_BYTES = {"bf16": 2 + 4 + 8, "fp32": 4 + 8}


@dataclass(frozen=True)
class Gpu:
    """One device; GiB."""

    name: str
    total: float
    free: float


@dataclass(frozen=True)
class CacheFacts:
    """The teacher's cache as this node sees it."""

    error: str | None = None  # why it cannot be read; nothing else was looked at then
    contents: str = ""
    identity: str = ""  # equal where the manifests are
    blocks: int = 0
    missing: tuple[int, ...] = ()
    decoded: int = 0  # blocks of this node's sample
    damage: tuple[str, ...] = ()  # what is wrong with some of these


@dataclass(frozen=True)
class NodeFacts:
    """All that one node says."""

    host: str
    gpus: tuple[Gpu, ...]
    versions: dict[str, str]
    disk_free: int  # bytes, where checkpoints go
    cache: CacheFacts | None  # None: the job does not read one
    clock: float = 0.0  # seconds that this node's clock is ahead of node 0's
    shares_run_dir: bool = True  # sees what node 0 writes there


@dataclass(frozen=True)
class CheckpointNeed:
    """Disk that the run's checkpoints will take; from the student's parameters."""

    bytes: int = 0
    explanation: str = ""
    error: str | None = None  # the student cannot be read


def node_facts(config: RunConfig, node: int, nodes: int, reads_cache: bool) -> NodeFacts:
    """Everything about this node that it can find out by itself."""
    return NodeFacts(
        host=socket.gethostname(),
        gpus=gpus(),
        versions=versions(),
        disk_free=free_space(config.checkpoint_dir),
        cache=cache_facts(config.cache_url, config.preflight.cache_blocks, node, nodes) if reads_cache else None,
    )


def gpus() -> tuple[Gpu, ...]:
    """The devices that torch can use; none where the driver is missing or broken."""
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        found.append(Gpu(torch.cuda.get_device_name(index), total / 2**30, free / 2**30))
    return tuple(found)


def versions() -> dict[str, str]:
    """Of everything that must be the same on all nodes for ranks to understand each other."""
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else ()
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "megatron-core": platform.megatron_version(),
        "transformer-engine": _version_or_none("transformer-engine"),
        "CUDA": torch.version.cuda or "none",
        "NCCL": ".".join(map(str, nccl)) or "none",
        "zarr": _version_or_none("zarr"),
    }


def _version_or_none(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def cache_facts(url: str, sample: int | None, node: int, nodes: int) -> CacheFacts:
    """Whether the cache can be read here, is complete, and decodes.

    Args:
        url: the cache's.
        sample: blocks to decode on this node, None for its share of all.
        node: of `nodes`; each decodes other blocks.
        nodes: how many.
    """
    try:
        store = BlockStore(open_store(url))
        missing = store.missing()
        manifest = store.manifest
        chosen = sampled_blocks(manifest.blocks, sample, node, nodes)
        report = verify(url, only=[block for block in chosen if block not in set(missing)])
    except (CacheError, OSError, ValueError) as error:
        return CacheFacts(error=str(error))
    return CacheFacts(
        contents=f"{manifest.samples:,} samples × {manifest.seq_length:,}, K {manifest.k}",
        identity=repr(sorted(manifest.identity().items())),
        blocks=manifest.blocks,
        missing=tuple(missing),
        decoded=report.blocks,
        damage=tuple(report.damaged.values()),
    )


def sampled_blocks(blocks: int, sample: int | None, node: int, nodes: int) -> Sequence[int]:
    """`sample` blocks a node, spread evenly over the cache, none given to two nodes; None: all, divided."""
    chosen = blocks if sample is None else min(blocks, sample * nodes)
    return [place * blocks // chosen for place in range(node, chosen, nodes)]


def checkpoint_need(config: RunConfig) -> CheckpointNeed:
    """What the checkpoints still to be written take."""
    train = config.train
    if config.preflight.disk_gib is not None:
        return CheckpointNeed(int(config.preflight.disk_gib * 2**30), "preflight.disk_gib")
    # Imported here: transformers takes seconds, and one node alone asks.
    from megatron_kd.student.hf_weights import HfWeights
    from megatron_kd.teacher.weights import resolve_model

    try:
        parameters = HfWeights(resolve_model(config.student_init), config.student.keep_layers).parameters
    except (OSError, ValueError) as error:
        return CheckpointNeed(error=str(error))
    planned = -(-train.steps // (train.checkpoint_interval or train.steps))
    there = len([path for path in config.checkpoint_dir.glob("step_*") if not path.suffix])
    size = CHECKPOINT_BYTES[train.precision] * parameters
    to_come = max(planned - there, 1)
    if train.checkpoints_kept:  # and one that is being written
        to_come = min(to_come, max(train.checkpoints_kept + 1 - there, 1))
    return CheckpointNeed(to_come * size, f"{to_come} checkpoint(s) of {byte_count(size)}")
