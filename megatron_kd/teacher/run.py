"""Filling a cache: which blocks this process computes, and how a block comes about.

    prepared samples ─ blocks of B samples ─ micro-batches ─► engine ─► topk ─► arrays of the block ─► cache

Missing block i belongs to replica i mod replicas. A replica is a rank, or, with the `megatron` engine, the ranks among
which the teacher is split. Replicas share nothing but the cache: no collective, no coordinator. One that fails or is
stopped leaves its unfinished block missing, and the next start computes exactly what is missing. Micro-batches never
cross blocks, so a block's bytes do not depend on which replica computes it, or when.

Shapes: B samples of a block, S positions, K entries, T temperatures.
"""

from __future__ import annotations

import time
from importlib.metadata import version
from pathlib import Path

import torch

from megatron_kd import platform
from megatron_kd.cache import Manifest, check_space, estimate, library_versions
from megatron_kd.config import RunConfig, TeacherConfig
from megatron_kd.console import Console, byte_count, duration
from megatron_kd.data.samples import SampleSet, await_samples, load_samples, prepare
from megatron_kd.data.tokenizer import load_tokenizer
from megatron_kd.teacher.engine import Replica, TeacherEngine
from megatron_kd.teacher.fill import fill, open_if_there
from megatron_kd.teacher.weights import checkpoint_hash, resolve_model, weights_hash


def cache_teacher(config: RunConfig) -> str:
    """Computes this rank's share of the missing blocks.

    Returns:
        The cache's URL.

    Raises:
        ValueError: a model, text or setting that cannot be used.
        CacheError: the URL holds a cache of other targets, or the disk is too small for this one.
    """
    replica = _join(config)
    speaks = replica.index == 0 and replica.leads
    console = Console(0 if speaks else 1, metrics=Path(config.run_dir) / "metrics.jsonl")
    console.stage("Teacher")
    folder = resolve_model(config.teacher.model, console)
    if speaks:
        samples_dir = prepare(config, load_tokenizer(folder), console)
    else:
        samples_dir = await_samples(config)
    samples = load_samples(samples_dir, config.cache.split)
    if not len(samples):
        raise ValueError(f"{samples_dir} has no samples in split {config.cache.split}; give more text or data.held_out")
    manifest = make_manifest(config, folder, samples)
    writer = open_if_there(config.cache_url, manifest)
    # The ranks of a replica see the same of its own blocks missing: it commits none before all of them have looked.
    missing = list(range(manifest.blocks)) if writer is None else writer.missing_blocks()
    _show_plan(config, manifest, len(missing), replica, console)
    mine = [block for block in missing if block % replica.count == replica.index]
    if mine:
        started = time.perf_counter()
        engine = _load_engine(config, folder, manifest)
        _show_engine(engine, time.perf_counter() - started, console)
        fill(
            config.cache_url, manifest, writer, mine, samples, engine, replica=replica,
            chunk_tokens=config.teacher.chunk_tokens, console=console,
        )  # fmt: skip
    console.close()
    return config.cache_url


def _join(config: RunConfig) -> Replica:
    teacher = config.teacher
    if teacher.engine == "megatron":
        from megatron_kd.teacher.megatron import join_replica

        return join_replica(teacher)
    for name, ranks in (("tensor", teacher.tensor), ("pipeline", teacher.pipeline), ("expert", teacher.expert)):
        if ranks != 1:
            raise ValueError(
                f"teacher.{name} is {ranks}, but the hf engine does not split a teacher: use engine megatron"
            )
    if teacher.checkpoint:
        raise ValueError(f"teacher.checkpoint is {teacher.checkpoint}; only the megatron engine reads checkpoints")
    return Replica.of_one_rank()


def _load_engine(config: RunConfig, folder: Path, manifest: Manifest) -> TeacherEngine:
    # Imported here: the libraries take seconds, which a run with nothing to do need not wait.
    dtype = platform.compute_dtype(config.teacher.dtype)
    if config.teacher.engine == "megatron":
        from megatron_kd.teacher.megatron import MegatronEngine

        return MegatronEngine(folder, config.teacher, dtype, manifest.seq_length)
    from megatron_kd.teacher.hf import HfEngine, gpu_share

    return HfEngine(folder, dtype, platform.device(), gpu_share())


def make_manifest(config: RunConfig, folder: Path, samples: SampleSet) -> Manifest:
    """Everything that decides the cache's bytes, from the configuration, the weights and the prepared samples.

    The run's seed is among it only where entries are drawn: it orders the training, and one cache serves every order.
    """
    made = samples.parameters
    packing = {key: made[key] for key in ("packing", "held_out", "field", "end_of_document")}
    teacher, cache = config.teacher, config.cache
    model = teacher.model
    sampled = cache.entries == "sampled"
    return Manifest(
        teacher=Path(model).name if Path(model).exists() else model,
        teacher_revision=checkpoint_hash(Path(teacher.checkpoint)) if teacher.checkpoint else weights_hash(folder),
        teacher_dtype=str(platform.compute_dtype(config.teacher.dtype)).removeprefix("torch."),
        tokenizer_hash=made["tokenizer_hash"],
        vocab_size=made["vocab_size"],
        dataset=made["source"],
        dataset_hash=samples.counts.hash,
        packing=" ".join(f"{key}={value}" for key, value in {**packing, "split": config.cache.split}.items()),
        samples=len(samples),
        seq_length=made["sequence_length"],
        entries=cache.entries,
        draws=cache.draws if sampled else 0,
        k=min(cache.draws, made["vocab_size"]) if sampled else cache.k,
        seed=config.seed if sampled else 0,
        block=cache.block,
        temperatures=cache.temperatures,
        codecs=cache.encoding,
        device=platform.device().type,
        tp=teacher.tensor,
        pp=teacher.pipeline,
        ep=teacher.expert,
        micro_batch=teacher.micro_batch,
        versions={**library_versions(), "torch": torch.__version__, **_engine_version(teacher)},
    )


def _engine_version(teacher: TeacherConfig) -> dict[str, str]:
    if teacher.engine == "megatron":
        return {"megatron-core": platform.megatron_version()}
    return {"transformers": version("transformers")}


def _show_plan(config: RunConfig, manifest: Manifest, missing: int, replica: Replica, console: Console) -> None:
    size = estimate(manifest)
    split = f"of {manifest.seq_length} positions, split {config.cache.split}"
    console.quantity("cache", config.cache_url)
    console.quantity("samples", f"{manifest.samples:,}", split)
    console.quantity("positions", f"{manifest.samples * manifest.seq_length:,}", "samples × positions")
    console.quantity("entries", manifest.k, f"of {manifest.vocab_size:,}; temperatures {manifest.temperatures}")
    console.quantity("blocks", manifest.blocks, f"of {manifest.block} samples, in {size.objects:,} objects")
    console.quantity("expected size", byte_count(size.bytes), f"about {size.bytes_per_token:.0f} bytes a position")
    console.quantity("missing blocks", missing, f"for {replica.count} replica(s); the others are committed")
    if not config.cache.ignore_disk_space:
        check_space(config.cache_url, size.bytes * missing // max(manifest.blocks, 1))


def _show_engine(engine: TeacherEngine, seconds: float, console: Console) -> None:
    if engine.head is None:
        return
    weight = engine.head.weight
    console.quantity("teacher parameters", f"{engine.parameters:,}", f"loaded and checked in {duration(seconds)}")
    console.quantity("head", f"{weight.shape[0]:,} × {weight.shape[1]:,}", f"{engine.dtype} on {weight.device}")
    console.quantity("threads", torch.get_num_threads())
