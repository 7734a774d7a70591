"""The training job: cache and configuration in, student checkpoints and metrics out.

Every rank runs `distill`. Collectives beyond Megatron-Core's own: one sum of eight numbers a step, over all ranks,
which carries the metrics to rank 0 and a stop request to everybody.
"""

from __future__ import annotations

import itertools
import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch.utils.tensorboard import SummaryWriter

from megatron_kd import platform
from megatron_kd.cache import Manifest, TeacherCache
from megatron_kd.config import RunConfig
from megatron_kd.console import Console, byte_count
from megatron_kd.data.dataset import Batch, BatchLoader, Place
from megatron_kd.data.order import SampleOrder
from megatron_kd.student.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from megatron_kd.student.hf_weights import HfWeights
from megatron_kd.student.model import initialize_parallel
from megatron_kd.teacher.weights import resolve_model
from megatron_kd.train.checks import check_cache, check_first_batch
from megatron_kd.train.setup import Student, build_student, uses_distributed_optimizer
from megatron_kd.train.step import run_forward_backward

_METRICS = ("loss", "loss_tokens", "kd", "ce", "tail", "support", "tokens", "stop")


class TrainingError(RuntimeError):
    """Training cannot go on; the message names step, rank and samples."""


def distill(config: RunConfig) -> Path:
    """Trains a student on a teacher's cache; resumes from the newest checkpoint.

    Returns:
        The folder of the last checkpoint.

    Raises:
        ValueError: configuration, cache and student do not fit each other.
        TrainingError: the loss or the gradient is no longer finite.
    """
    rank, world = platform.init_distributed()
    console = Console(rank, Path(config.run_dir) / "metrics.jsonl")
    console.stage("Distil")
    initialize_parallel(config.parallel, config.seed)
    cache = TeacherCache.open(config.cache_url)
    weights = HfWeights(resolve_model(config.student_init), config.student.keep_layers)
    check_cache(cache.manifest, config, weights)
    order = SampleOrder(cache.manifest.samples, cache.manifest.block, config.seed, config.train.global_batch)
    student = build_student(config, weights, cache.manifest)
    _describe(console, config, cache, student, world)

    done = 0
    found = latest_checkpoint(config.checkpoint_dir)
    if found is not None:
        done = load_checkpoint(found[1], student.chunks, student.optimizer, student.scheduler)
        console.quantity("resumed from", found[1])
    if done >= config.train.steps:
        console.note(f"{done} of {config.train.steps} steps are done: nothing to train")
        return _last(config)
    loader = BatchLoader(
        cache,
        order,
        config.loss,
        _place(student),
        micro_batch=config.train.micro_batch,
        first_step=done,
        device=platform.device(),
        packed=platform.has_transformer_engine(),
    )
    try:
        _train(console, config, student, loader, cache.manifest, done)
    finally:
        loader.close()
        console.close()
    return _last(config)


def _place(student: Student) -> Place:
    """Which data this rank needs: its data-parallel share, and the targets where its stage ends in the output layer."""
    sharers = parallel_state.get_tensor_and_context_parallel_group()
    return Place(
        rank=parallel_state.get_data_parallel_rank(),
        ranks=parallel_state.get_data_parallel_world_size(),
        head=student.handle.has_head,
        sharers=sharers if sharers.size() > 1 else None,
        context_rank=parallel_state.get_context_parallel_rank(),
        context_ranks=parallel_state.get_context_parallel_world_size(),
    )


def _train(
    console: Console, config: RunConfig, student: Student, loader: BatchLoader, manifest: Manifest, done: int
) -> None:
    last = min(config.train.steps, config.train.stop_after or config.train.steps)
    stop = _StopRequest()
    batches = _checked(loader, config, manifest)
    writer = SummaryWriter(str(Path(config.run_dir) / "tensorboard")) if console.active else None
    with console.progress("distill", config.train.steps, "step") as progress:
        for step in range(done + 1, last + 1):
            values, stopping = _one_step(config, student, loader, batches, stop, step)
            if step % config.train.log_interval == 0 or step == last:
                progress.update(step, values)
                for name, value in values.items() if writer is not None else ():
                    writer.add_scalar(f"distill/{name}", value, step)
            interval = config.train.checkpoint_interval
            if step == last or stopping or (interval and step % interval == 0):
                path = save_checkpoint(
                    config.checkpoint_dir, step, student.chunks, student.optimizer, student.scheduler
                )
                if step == last or stopping:
                    console.quantity("checkpoint", path)
            if stopping:
                console.note(f"asked to stop: left after step {step} of {config.train.steps}")
                break
    if writer is not None:
        writer.close()


def _one_step(
    config: RunConfig, student: Student, loader: BatchLoader, batches: Iterator[Batch], stop: _StopRequest, step: int
) -> tuple[dict[str, float], bool]:
    """Trains one step; returns what to log and whether somebody asked to stop."""
    platform.synchronize()
    started, loader.waited = time.perf_counter(), 0.0
    for chunk in student.chunks:
        chunk.zero_grad_buffer()
    student.optimizer.zero_grad()
    ranks, micro_batch = parallel_state.get_data_parallel_world_size(), config.train.micro_batch
    sequence_length = config.data.sequence_length
    packed = platform.has_transformer_engine()
    logged = run_forward_backward(
        student.chunks,
        student.handle,
        list(itertools.tee(batches, len(student.chunks))),
        micro_batches=config.train.global_batch // (ranks * micro_batch),
        shape=(1, micro_batch * sequence_length) if packed else (micro_batch, sequence_length),
    )
    _, gradient_norm, _ = student.optimizer.step()
    student.scheduler.step(increment=1)
    sums = _sum_over_ranks(student, logged, stop.requested)
    seconds = time.perf_counter() - started
    tokens = max(sums["tokens"], 1.0)
    values = {
        "loss": sums["loss"] / max(sums["loss_tokens"], 1.0),
        "kd": sums["kd"] / tokens,
        "ce": sums["ce"] / tokens,
        "tail": sums["tail"] / tokens,
        "support": sums["support"] / tokens,
        "gradient_norm": float(gradient_norm),
        "lr": student.optimizer.param_groups[0]["lr"],
        "tokens_per_second": config.train.global_batch * sequence_length / seconds,
        "step_seconds": seconds,
        "data_wait": loader.waited / seconds,
        "memory_gib": platform.peak_memory_bytes() / 2**30,
    }
    if not (math.isfinite(values["loss"]) and math.isfinite(values["gradient_norm"])):
        raise TrainingError(
            f"step {step}: loss {values['loss']}, gradient norm {values['gradient_norm']} on rank "
            f"{torch.distributed.get_rank()}; its samples: {list(loader.recent_samples)}. Lower optimizer.lr, or look "
            "at these samples with `megatron-kd cache inspect`"
        )
    return values, sums["stop"] > 0


def _sum_over_ranks(student: Student, logged: torch.Tensor, stop: bool) -> dict[str, float]:
    """Sums over all data-parallel ranks and pipeline stages, on every rank."""
    metrics = student.handle.pop_metrics()
    values = torch.zeros(len(_METRICS), dtype=torch.float64, device=logged.device)
    if parallel_state.get_tensor_model_parallel_rank() == 0:  # tensor-parallel ranks hold the same sums
        values[:2] = logged
        for index, name in enumerate(_METRICS):
            if name in metrics:
                values[index] = metrics[name].double()
    values[-1] = float(stop)
    torch.distributed.all_reduce(values)
    return dict(zip(_METRICS, values.tolist()))


def _checked(loader: BatchLoader, config: RunConfig, manifest: Manifest) -> Iterator[Batch]:
    """The loader's batches; the first one is looked at before anything is trained on it."""
    first = next(loader)
    check_first_batch(first, config, manifest)
    yield first
    yield from loader


class _StopRequest:
    """SIGTERM asks for a checkpoint at the end of the step, as schedulers do before they take the machine."""

    def __init__(self) -> None:
        self.requested = False
        signal.signal(signal.SIGTERM, self._request)

    def _request(self, number: int, frame: Any) -> None:
        self.requested = True


def _describe(console: Console, config: RunConfig, cache: TeacherCache, student: Student, world: int) -> None:
    manifest, train = cache.manifest, config.train
    parameters = sum(p.numel() for chunk in student.chunks for p in chunk.parameters())
    ranks = parallel_state.get_data_parallel_world_size()
    tokens = train.global_batch * manifest.seq_length
    layout = config.parallel
    console.quantity("cache", config.cache_url, f"{manifest.samples} samples × {manifest.seq_length} positions")
    console.quantity("student parameters", f"{parameters:,}", "on this rank")
    console.quantity(
        "layers", student.config.num_layers, f"of {config.student_init}: {config.student.keep_layers or 'all'}"
    )
    console.quantity(
        "objective",
        config.loss.kind,
        f"K {config.loss.k or manifest.k}, τ {config.loss.temperature:g}, "
        f"KD × {config.loss.kd_weight:g} + CE × {config.loss.ce_weight:g}",
    )
    console.quantity(
        "ranks",
        world,
        f"TP {layout.tensor} · PP {layout.pipeline} · CP {layout.context} · DP {ranks} · EP {layout.expert}",
    )
    console.quantity("tokens a step", f"{tokens:,}", f"{train.global_batch} samples, {train.micro_batch} at a time")
    console.quantity("steps", train.steps, f"{train.steps * train.global_batch / manifest.samples:.2f} epochs")
    console.quantity(
        "optimizer",
        "distributed" if uses_distributed_optimizer(config) else "replicated",
        f"{train.precision}, about {byte_count(16 * parameters)} with gradients and moments",
    )


def _last(config: RunConfig) -> Path:
    found = latest_checkpoint(config.checkpoint_dir)
    assert found is not None, "a run that ends has saved a checkpoint"
    return found[1]
