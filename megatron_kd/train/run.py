"""The training job: cache and configuration in, student checkpoints and metrics out.

Every rank runs `distill`. Collectives beyond Megatron-Core's own are metrics.py's.
"""

from __future__ import annotations

import itertools
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
from megatron_kd.student.checkpoint import CheckpointWriter, latest_checkpoint, load_checkpoint
from megatron_kd.student.hf_weights import HfWeights
from megatron_kd.student.model import initialize_parallel
from megatron_kd.teacher.weights import resolve_model
from megatron_kd.train.checks import check_cache, checked
from megatron_kd.train.held_out import HeldOut
from megatron_kd.train.metrics import check_finite, means, sum_over_ranks
from megatron_kd.train.setup import Student, build_student, uses_distributed_optimizer
from megatron_kd.train.step import batch_shape, run_forward_backward


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
    check_cache(cache.manifest, config, weights, config.cache_url)
    order = SampleOrder(cache.manifest.samples, cache.manifest.block, config.seed, config.train.global_batch)
    student = build_student(config, weights, cache.manifest)
    place = Place.of_this_rank(head=student.handle.has_head)
    held_out = HeldOut(config, weights, place) if config.train.evaluate_interval else None
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
        place,
        micro_batch=config.train.micro_batch,
        first_step=done,
        device=platform.device(),
        packed=platform.has_transformer_engine(),
    )
    try:
        _train(console, config, student, loader, held_out, cache.manifest, done)
    finally:
        loader.close()
        console.close()
    return _last(config)


def _train(
    console: Console,
    config: RunConfig,
    student: Student,
    loader: BatchLoader,
    held_out: HeldOut | None,
    manifest: Manifest,
    done: int,
) -> None:
    train = config.train
    last = min(train.steps, train.stop_after or train.steps)
    stop = _StopRequest()
    batches = checked(loader, manifest, config.loss, config.cache_url)
    checkpoints = CheckpointWriter(
        config.checkpoint_dir, background=train.checkpoint_async, kept=train.checkpoints_kept
    )
    writer = SummaryWriter(str(Path(config.run_dir) / "tensorboard")) if console.active else None
    with console.progress("distill", train.steps, "step") as progress:
        for step in range(done + 1, last + 1):
            values, stopping = _one_step(config, student, loader, batches, stop, step)
            ending = step == last or stopping
            if ending or step % train.log_interval == 0:
                progress.update(step, values)
                _plot(writer, "distill", values, step)
            if held_out is not None and (ending or step % train.evaluate_interval == 0):
                found = held_out.evaluate(student)
                console.record({"stage": "held_out", "step": step, **found})
                console.note(f"step {step}, {held_out.samples} held-out samples: " + _words(found))
                _plot(writer, "held_out", found, step)
            if ending or (train.checkpoint_interval and step % train.checkpoint_interval == 0):
                with student.gathered():
                    path = checkpoints.save(step, student.chunks, student.optimizer, student.scheduler)
                if ending:
                    console.quantity("checkpoint", path)
            else:
                checkpoints.poll()
            if stopping:
                console.note(f"asked to stop: left after step {step} of {train.steps}")
                break
    checkpoints.close()
    if writer is not None:
        writer.close()


def _plot(writer: SummaryWriter | None, stage: str, values: dict[str, float], step: int) -> None:
    for name, value in values.items() if writer is not None else ():
        writer.add_scalar(f"{stage}/{name}", value, step)


def _words(values: dict[str, float]) -> str:
    return " ".join(f"{name} {value:.4g}" for name, value in values.items())


def _one_step(
    config: RunConfig, student: Student, loader: BatchLoader, batches: Iterator[Batch], stop: _StopRequest, step: int
) -> tuple[dict[str, float], bool]:
    """Trains one step; returns what to log and whether somebody asked to stop."""
    platform.synchronize()
    started, loader.waited = time.perf_counter(), 0.0
    for chunk in student.chunks:
        chunk.zero_grad_buffer()
    student.optimizer.zero_grad()
    ranks = parallel_state.get_data_parallel_world_size()
    logged = run_forward_backward(
        student.chunks,
        student.handle,
        list(itertools.tee(batches, len(student.chunks))),
        micro_batches=config.train.global_batch // (ranks * config.train.micro_batch),
        shape=batch_shape(config),
    )
    _, gradient_norm, _ = student.optimizer.step()
    student.scheduler.step(increment=1)
    memory = platform.peak_memory_bytes()
    sums = sum_over_ranks(student.handle, logged, stop=stop.requested, memory=memory)
    seconds = time.perf_counter() - started
    tokens = config.train.global_batch * config.data.sequence_length
    values = means(sums) | {
        "gradient_norm": float(gradient_norm),
        "lr": student.optimizer.param_groups[0]["lr"],
        "tokens_per_second": tokens / seconds,
        "tflops_per_gpu": student.flops_per_token * tokens / seconds / torch.distributed.get_world_size() / 1e12,
        "step_seconds": seconds,
        "data_wait": loader.waited / seconds,
        "memory_gib": sums["memory"] / 2**30,
    }
    check_finite(step, values, logged, loader.recent_samples)
    return values, sums["stop"] > 0


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
    facts = {"world_size": world, "global_batch": train.global_batch, "sequence_length": manifest.seq_length}
    console.record({"stage": "run", **facts, "flops_per_token": student.flops_per_token})
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
    console.quantity(
        "FLOPs a step", f"{student.flops_per_token * tokens:.3g}", "the student's forward and backward, nothing twice"
    )
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
