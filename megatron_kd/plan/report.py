"""Configurations side by side: a table for people, one JSON object each for programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from megatron_kd.console import duration
from megatron_kd.plan.cache_cost import CacheCost, cache_cost
from megatron_kd.plan.memory import StageMemory, stage_memory
from megatron_kd.plan.planned import PlannedRun
from megatron_kd.plan.shape import model_parameters
from megatron_kd.plan.step_time import StageTime, StepTime, model_flops_per_token, step_time, tflops_per_gpu

if TYPE_CHECKING:
    from megatron_kd.plan.dry_run import Counted

_GIB = 2**30


@dataclass(frozen=True)
class Report:
    """Everything planned about one configuration."""

    name: str
    run: PlannedRun
    stages: list[StageMemory]
    time: StepTime
    cache: CacheCost

    @property
    def fullest(self) -> int:
        """The stage whose ranks need most."""
        return max(range(len(self.stages)), key=lambda stage: self.stages[stage].peak)

    @property
    def peak_gib(self) -> float:
        return self.stages[self.fullest].peak / _GIB

    @property
    def fits(self) -> bool:
        return self.peak_gib <= self.run.hardware.memory_gib


def make_report(name: str, run: PlannedRun) -> Report:
    """Plans a run. `name`: what its column is called; nothing depends on it."""
    stages = [stage_memory(run, stage) for stage in range(run.layout.pipeline)]
    return Report(name, run, stages, step_time(run), cache_cost(run))


def to_json(report: Report, counted: Sequence[Counted] | None = None) -> str:
    """One line; with a dry run, what it counted under `dry_run`."""
    seconds = report.time.total
    values: dict[str, Any] = {
        "config": report.name,
        "world_size": report.run.layout.world,
        "tokens_per_step": report.run.layout.tokens_per_step,
        "step_time_s": round(seconds, 3),
        "tflops_per_gpu": round(tflops_per_gpu(report.run, seconds), 1),
        "peak_gib": round(report.peak_gib, 2),
        "head_gib": round(report.stages[-1].head / _GIB, 3),
        "fits": report.fits,
    }
    if counted is not None:
        values["dry_run"] = [asdict(rank) for rank in counted]
    return json.dumps(values)


def dry_run_table(reports: Sequence[Report], counted: Sequence[Sequence[Counted]]) -> str:
    """What was built beside what was planned, a line for each rank."""
    rows = [("dry run", ["rank", "stage", "parameters", "planned", "head GiB", "planned"])]
    for report, ranks in zip(reports, counted):
        for rank in ranks:
            stage = report.stages[rank.stage]
            cells = [
                str(rank.rank),
                str(rank.stage),
                f"{rank.parameters:,}",
                f"{stage.parameters / report.run.element:,.0f}",
            ]
            if rank.head_bytes is not None:
                cells += [f"{rank.head_bytes / _GIB:.3f}", f"{stage.head / _GIB:.3f}"]
            rows.append((report.name, cells + ["–"] * (6 - len(cells))))
    return _aligned(rows)


def to_table(reports: Sequence[Report]) -> str:
    """A column for each configuration."""
    rows: list[tuple[str, list[str]]] = [("", [report.name for report in reports])]

    def row(name: str, cell: Callable[[Report], str]) -> None:
        rows.append((name, [cell(report) for report in reports]))

    row("GPUs", lambda r: f"{r.run.layout.world} × {r.run.hardware.device}")
    row("layout", _layout)
    row("loss", lambda r: r.run.loss.implementation)
    row("parameters", lambda r: f"{model_parameters(r.run.shape) / 1e9:.3f} B")
    row("tokens a step", lambda r: f"{r.run.layout.tokens_per_step:,}")
    rows.append(("GiB on a rank of the fullest stage", [_stage(report) for report in reports]))
    for field in fields(StageMemory):
        row("  " + _MEMORY_NAMES.get(field.name, field.name), lambda r, f=field.name: _gib(r.stages[r.fullest], f))  # type: ignore[misc]
    row("  peak", lambda r: f"{r.peak_gib:.1f}")
    row("  device", lambda r: f"{r.run.hardware.memory_gib:.1f}")
    row("  fits", _verdict)
    row("peak by stage", lambda r: " ".join(f"{stage.peak / _GIB:.0f}" for stage in r.stages))
    rows.append(("seconds of a step", [f"{r.time.micro_batches} micro-batches" for r in reports]))
    for field in fields(StageTime):
        row("  " + field.name, lambda r, f=field.name: f"{r.time.micro_batches * getattr(r.time.slowest, f):.2f}")  # type: ignore[misc]
    for name in ("bubble", "data", "optimizer"):
        row("  " + name, lambda r, f=name: f"{getattr(r.time, f):.2f}")  # type: ignore[misc]
    row("  step", lambda r: f"{r.time.total:.2f}")
    row("TFLOP/s per GPU (student's)", lambda r: f"{tflops_per_gpu(r.run, r.time.total):.0f}")
    row("GFLOP a token", lambda r: f"{model_flops_per_token(r.run) / 1e9:.2f}")
    row("tokens/s per GPU", lambda r: f"{r.run.layout.tokens_per_step / r.time.total / r.run.layout.world:,.0f}")
    row("cache: tokens", lambda r: f"{r.cache.tokens / 1e6:,.0f} M")
    row("  to store", lambda r: f"{r.cache.size.bytes / _GIB:,.0f} GiB, {r.cache.size.objects:,} objects")
    row("  to build", lambda r: "?" if r.cache.build_seconds is None else duration(r.cache.build_seconds))
    row("  paid for after", _break_even)
    return _aligned(rows)


_MEMORY_NAMES = {"head": "head and loss, or", "layer": "one layer at work"}


def _gib(stage: StageMemory, name: str) -> str:
    value = getattr(stage, name)
    dropped = name in ("head", "layer") and value == min(stage.head, stage.layer)
    return f"({value / _GIB:.2f})" if dropped else f"{value / _GIB:.2f}"


def _layout(report: Report) -> str:
    layout = report.run.layout
    sizes = {"TP": layout.tensor, "CP": layout.context, "PP": layout.pipeline, "EP": layout.expert, "DP": layout.data}
    shown = [f"{name}{size}" for name, size in sizes.items() if size > 1]
    extra = ["recompute"] if report.run.recompute else []
    return " ".join([*shown, *extra]) or "one rank"


def _stage(report: Report) -> str:
    return f"stage {report.fullest} of {len(report.stages)}"


def _break_even(report: Report) -> str:
    if not report.cache.online_fits:
        return "at once: online does not fit"
    return "–" if report.cache.break_even_steps is None else f"{report.cache.break_even_steps:,.0f} steps"


def _verdict(report: Report) -> str:
    share = report.peak_gib / report.run.hardware.memory_gib
    if not report.fits:
        return f"no: {share:.0%} of the device"
    # This close, the caching allocator gives blocks back and asks for them again, which takes time that is not planned.
    return f"barely: {share:.0%}, slower than planned" if share > 0.95 else f"yes, {share:.0%}"


def _aligned(rows: Sequence[tuple[str, list[str]]]) -> str:
    first = max(len(name) for name, _ in rows)
    widths = [max(map(len, column)) for column in zip(*(cells for _, cells in rows))]
    lines = (
        f"{name:<{first}}  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths))
        for name, cells in rows
    )
    return "\n".join(line.rstrip() for line in lines)
