"""What the teacher's cache costs, and after how many steps it has paid for itself.

    build       one forward of the teacher over every token, on all GPUs of the run, at calibration.py's efficiency
    store       cache/estimate.py's bytes, before a first block is known
    break-even  build / (seconds of an online step − seconds of this one), both with fused heads

A run reads steps · global_batch samples, or data.max_samples over and over.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_kd.cache import Manifest
from megatron_kd.cache.estimate import Estimate, estimate
from megatron_kd.plan.calibration import EFFICIENCY
from megatron_kd.plan.memory import stage_memory
from megatron_kd.plan.planned import PlannedRun
from megatron_kd.plan.shape import token_flops
from megatron_kd.plan.step_time import step_time


@dataclass(frozen=True)
class CacheCost:
    """Of the cache that the run reads."""

    tokens: int
    size: Estimate
    build_seconds: float | None  # None: the teacher's sizes are not known
    break_even_steps: float | None  # None also where online is no slower
    online_fits: bool  # whether the online run's memory would be enough; if not, there is nothing to break even with


def cache_cost(run: PlannedRun) -> CacheCost:
    """Costs of a run's cache, whether or not the run would use it."""
    config, hardware = run.config, run.hardware
    samples = config.train.steps * config.train.global_batch
    samples = min(samples, config.data.max_samples or samples)
    cache, sampled = config.cache, config.cache.entries == "sampled"
    manifest = Manifest(
        teacher=config.teacher.model,
        teacher_revision="",
        teacher_dtype="bfloat16",
        tokenizer_hash="",
        vocab_size=run.shape.vocab,
        dataset=config.data.source,
        dataset_hash="",
        packing="",
        samples=samples,
        seq_length=config.data.sequence_length,
        k=cache.draws if sampled else cache.k,
        block=cache.block,
        entries=cache.entries,
        draws=cache.draws if sampled else 0,
        temperatures=cache.temperatures,
        codecs=cache.encoding,
    )
    tokens = samples * config.data.sequence_length
    if run.teacher is None:
        return CacheCost(tokens, estimate(manifest), None, None, True)
    flops = token_flops(run.teacher, config.data.sequence_length)
    build = tokens * (sum(flops.layers) + flops.head) / (run.layout.world * EFFICIENCY * 1e12 * hardware.tflops)
    if run.teacher.vocab != run.shape.vocab or run.teacher.layers % run.layout.pipeline:
        return CacheCost(tokens, estimate(manifest), build, None, False)
    online = run.with_loss("online")
    saved = step_time(online).total - step_time(run.with_loss("fused")).total
    peak = max(stage_memory(online, stage).peak for stage in range(run.layout.pipeline))
    return CacheCost(
        tokens, estimate(manifest), build, build / saved if saved > 0 else None, peak <= hardware.memory_gib * 2**30
    )
