"""What the nodes said against what the run needs: one row a check.

Pure functions of facts and configuration. `found` of a failing row names the nodes that are at fault.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_kd.config import RunConfig
from megatron_kd.console import byte_count
from megatron_kd.preflight.facts import CheckpointNeed, NodeFacts


@dataclass(frozen=True)
class Row:
    """One check."""

    check: str
    found: str
    needed: str
    ok: bool


def table(rows: Sequence[Row]) -> str:
    """All rows as aligned text; those that failed say so first."""
    cells = [("", "check", "found", "needed")]
    cells += [("ok" if row.ok else "FAILED", row.check, row.found, row.needed) for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(3)]
    return "\n".join(
        "  ".join([*(text.ljust(width) for text, width in zip(line, widths)), line[3]]).rstrip() for line in cells
    )


def check_nodes(config: RunConfig, job: str, gpus: int, nodes: Sequence[NodeFacts], need: CheckpointNeed) -> list[Row]:
    """Every check that compares facts of nodes.

    Args:
        config: the run.
        job: `distill`, or `cache_teacher`, which reads no cache and writes no checkpoint.
        gpus: ranks of a node, each with a GPU; 0 for one rank on the CPU.
        nodes: what each said, in order.
        need: of disk; only for `distill`.
    """
    rows = [*_gpus(config, gpus, nodes), _layout(config, job, len(nodes) * max(gpus, 1))]
    for name in nodes[0].versions:
        found, same = _said([node.versions[name] for node in nodes], nodes)
        rows.append(Row(name, found, "the same on every node", same))
    if job == "distill":
        rows += [*_cache(config, nodes), _disk(config, nodes, need)]
    return [*rows, _shared(config, nodes), _clock(config, nodes)]


def _gpus(config: RunConfig, gpus: int, nodes: Sequence[NodeFacts]) -> Iterable[Row]:
    found, _ = _said([f"{len(n.gpus)} × {n.gpus[0].name}" if n.gpus else "none" for n in nodes], nodes)
    yield Row("GPUs", found, f"{gpus} a node" if gpus else "the CPU alone", all(len(n.gpus) >= gpus for n in nodes))
    used = {index: node.gpus[:gpus] for index, node in enumerate(nodes) if node.gpus[:gpus]}
    if used:
        free, index = min((gpu.free, index) for index, node_gpus in used.items() for gpu in node_gpus)
        needed = config.preflight.gpu_memory_gib
        yield Row(
            "GPU memory",
            f"{free:.1f} GiB free at least, on {_name(index, nodes)}",
            _at_least(needed, "{:.1f} GiB"),
            free >= (needed or 0.0),
        )


def _layout(config: RunConfig, job: str, ranks: int) -> Row:
    """Whether the ranks divide into the layout, and the batch among them; says the first number that does not."""
    if job == "cache_teacher":
        split = config.teacher.tensor * config.teacher.pipeline
        found = f"TP {config.teacher.tensor} · PP {config.teacher.pipeline} · {ranks // split} replica(s)"
        return Row("layout", f"{ranks} ranks: {found}", f"a multiple of {split} ranks", ranks % split == 0)
    sizes, train = config.parallel, config.train
    model = sizes.tensor * sizes.pipeline * sizes.context
    experts = sizes.tensor * sizes.pipeline * sizes.expert
    samples = max(ranks // model, 1) * train.micro_batch
    found = (
        f"{ranks} ranks: TP {sizes.tensor} · PP {sizes.pipeline} · CP {sizes.context} · DP {ranks // model}, "
        f"EP {sizes.expert}; batch {train.global_batch}"
    )
    faults = [
        needed
        for number, divisor, needed in (
            (ranks, model, f"ranks divide by TP · PP · CP = {model}"),
            (ranks, experts, f"ranks divide by TP · PP · EP = {experts}"),
            (train.global_batch, samples, f"the batch divides by DP · micro-batch = {samples}"),
        )
        if number % divisor
    ]
    return Row("layout", found, faults[0] if faults else "whole numbers", not faults)


def _cache(config: RunConfig, nodes: Sequence[NodeFacts]) -> Iterable[Row]:
    views = [node.cache for node in nodes if node.cache is not None]
    errors = [f"{_name(index, nodes)}: {view.error}" for index, view in enumerate(views) if view.error]
    if errors:
        yield Row("cache", errors[0], "readable on every node", False)
        return
    same = len({view.identity for view in views}) == 1
    yield Row("cache", f"{config.cache_url}: {views[0].contents}", "the same on every node", same)
    missing = sorted({block for view in views for block in view.missing})
    total = views[0].blocks
    listed = ", ".join(map(str, missing[:10])) + (", …" if len(missing) > 10 else "")
    found = f"{total - len(missing)} of {total} committed" + (f"; missing: {listed}" if missing else "")
    yield Row("cache blocks", found, "all", not missing)
    damage = [f"{_name(index, nodes)}: {fault}" for index, view in enumerate(views) for fault in view.damage]
    decoded = sum(view.decoded for view in views)
    yield Row("cache decoded", damage[0] if damage else f"{decoded} of {total} blocks", "no damage", not damage)


def _disk(config: RunConfig, nodes: Sequence[NodeFacts], need: CheckpointNeed) -> Row:
    if need.error:
        return Row("student", need.error, "readable", False)
    free, index = min((node.disk_free, index) for index, node in enumerate(nodes))
    return Row(
        "disk",
        f"{byte_count(free)} free at {config.checkpoint_dir} on {_name(index, nodes)}",
        f"≥ {byte_count(need.bytes)}: {need.explanation}",
        free >= need.bytes,
    )


def _shared(config: RunConfig, nodes: Sequence[NodeFacts]) -> Row:
    blind = [_name(index, nodes) for index, node in enumerate(nodes) if not node.shares_run_dir]
    found = config.run_dir + (f": what node 0 writes is not seen by {', '.join(blind)}" if blind else "")
    return Row("run_dir", found, "one folder, seen by all", not blind)


def _clock(config: RunConfig, nodes: Sequence[NodeFacts]) -> Row:
    clocks = [node.clock for node in nodes]
    skew, limit = max(clocks) - min(clocks), config.preflight.clock_skew
    most = max(range(len(nodes)), key=lambda index: abs(clocks[index]))
    found = f"{skew:.3f} s apart" + (f", {_name(most, nodes)} most" if skew > limit else "")
    return Row("clocks", found, f"≤ {limit:g} s", skew <= limit)


def network(config: RunConfig, nodes: int, bandwidth: float | str | None, how: str) -> Row:
    """The timed all-reduce: GB/s, or why there is none; None where a single node has nobody to talk to."""
    needed = config.preflight.bandwidth or None
    if bandwidth is None or isinstance(bandwidth, str):
        return Row("network", bandwidth or "one node", _at_least(needed, "{:g} GB/s"), bandwidth is None)
    ok = math.isfinite(bandwidth) and bandwidth >= config.preflight.bandwidth
    return Row("network", f"{bandwidth:.2f} GB/s, {how} of {nodes} nodes", _at_least(needed, "{:g} GB/s"), ok)


def _at_least(needed: float | None, form: str) -> str:
    return "" if needed is None else "≥ " + form.format(needed)


def _said(values: Sequence[str], nodes: Sequence[NodeFacts]) -> tuple[str, bool]:
    """What the nodes say, each value with those who say it unless all do; and whether all do."""
    by_value: dict[str, list[str]] = {}
    for index, value in enumerate(values):
        by_value.setdefault(value, []).append(_name(index, nodes))
    if len(by_value) == 1:
        return values[0], True
    return "; ".join(f"{value} on {', '.join(names)}" for value, names in by_value.items()), False


def _name(index: int, nodes: Sequence[NodeFacts]) -> str:
    return f"node {index} ({nodes[index].host})"
