"""The paper's comparison of layouts, from one's own runs: table, ratios and pictures, the paper's numbers beside them.

    python tools/report_scaling.py "four nodes, dense=runs/four_nodes_dense" "one node, fused=runs/one_node" \
        [--paper 32k] [--warmup 10] [--window 20:60] [--dollars 3] [--out runs/scaling]

A run is its folder, or NAME=FOLDER; its `metrics.jsonl` holds all that is needed. What counts are the steps of the
window, the first `--warmup` steps after every start of the ranks left out, and of a step that was done again the last;
medians stand with their quartiles. Runs differ in GPUs and in tokens a step, so what compares them is

    tokens/s per GPU = tokens a step / seconds a step / GPUs
    s for T tokens   = seconds a step · T / tokens a step, T being the fewest tokens a step of all rows
    GPU-hours        = GPUs · seconds a step / 3600 / tokens a step · 10⁹, of 10⁹ tokens; `--dollars`: their price

Memory is that of the rank that writes the metrics, in GB of 10⁹ bytes. The table is printed as Markdown.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_kd.console import read_records


@dataclass(frozen=True)
class Spread:
    """Quartiles; `low` and `high` are the median's own where there is one value alone."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, *values: float) -> Spread:
        """Quartiles by linear interpolation between the values."""
        return cls(*(statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3))


@dataclass(frozen=True)
class Layout:
    """One row: a run of ours, or one that the paper reports."""

    name: str
    gpus: int
    tokens: int  # a step
    seconds: Spread  # a step
    tflops: Spread  # per GPU, the student's alone
    memory: float | None  # peak GB
    window: str = "as published"  # which steps these are
    steps: tuple[tuple[int, float], ...] = ()  # (step, seconds) of all, for the picture

    @property
    def speed(self) -> float:
        """Tokens a second and GPU."""
        return self.tokens / self.seconds.median / self.gpus

    def seconds_for(self, tokens: int) -> float:
        """Seconds for so many tokens at this speed."""
        return self.seconds.median * tokens / self.tokens

    def cost(self, price: float | None) -> float:
        """Of 10⁹ tokens, in dollars at a price per GPU-hour; in GPU-hours without."""
        return (1.0 if price is None else price) / 3600 / self.speed * 1e9


def published(
    name: str, gpus: int, batch: int, length: int, seconds: float, tflops: float, memory: float | None
) -> Layout:
    """A row of arXiv 2608.03796."""
    return Layout("paper: " + name, gpus, batch * length, Spread.of(seconds), Spread.of(tflops), memory)


# GPT-OSS-20B's batches are not given: they follow from the FLOPs a step, 74.2·32·57.0 over 345.7·8·12.23 being 4.00.
# Its memory is the paper's estimate.
PAPER = {
    "32k": [
        published("four nodes, dense (TP4 PP4 EP2)", 32, 128, 32768, 57.0, 74.2, None),
        published("one node, fused (TP2 PP1 EP4)", 8, 32, 32768, 12.23, 345.7, 128.0),
    ],
    "8k": [
        published("online", 1, 32, 8192, 25.9, 237, 102.8),
        published("offline, dense", 1, 32, 8192, 18.5, 331, 78.3),
        published("forward-chunked", 1, 32, 8192, 18.4, 335, 61.8),
        published("fused", 1, 32, 8192, 20.2, 304, 58.3),
    ],
}


_SAME = ("world_size", "global_batch", "sequence_length")


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the runs, prints the table and the ratios, draws the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "runs", nargs="+", metavar="[NAME=]FOLDER", help="the first is what the others are held against"
    )
    parser.add_argument("--paper", choices=sorted(PAPER), default="32k", help="which of the paper's comparisons")
    parser.add_argument("--warmup", type=int, default=10, metavar="N", help="steps left out after every start (10)")
    parser.add_argument("--window", type=_window, metavar="A:B", help="steps that count, both included; default: all")
    parser.add_argument("--dollars", type=float, metavar="X", help="price of a GPU-hour")
    parser.add_argument("--out", type=Path, default=Path("runs/scaling"), metavar="FOLDER", help="for the pictures")
    arguments = parser.parse_args(argv)
    try:
        ours = [read_run(run, arguments.warmup, arguments.window) for run in arguments.runs]
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    rows = [*ours, *PAPER[arguments.paper]]
    print(table(rows, arguments.dollars))
    print(f"\nAgainst {ours[0].name}, and the paper's against the paper's first:\n")
    print(ratios(ours, PAPER[arguments.paper]))
    print("\nWhat was counted:\n", *(f"{row.name}: {row.window}" for row in ours), "", sep="\n")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, draw in (("layouts.png", draw_layouts), ("steps.png", draw_steps)):
        draw(arguments.out / name, rows, arguments.dollars)
        print(arguments.out / name)


def read_run(run: str, warmup: int, window: tuple[int, int] | None) -> Layout:
    """A run from its `metrics.jsonl`.

    Raises:
        ValueError: it lacks what the table needs, or no step is left to count.
    """
    name, equals, folder = run.rpartition("=")
    metrics = Path(folder) / "metrics.jsonl"
    facts: dict[str, Any] = {}
    steps: dict[int, dict[str, Any]] = {}
    first = None  # recorded step of this start of the ranks
    for record in read_records(metrics):
        if record.get("stage") == "run":
            if any(record[key] != facts.get(key) for key in _SAME):
                steps = {}  # another layout's steps are no part of this row
            facts, first = record, None
        elif record.get("stage") == "distill":
            step = record["step"]
            first = step if first is None else first
            steps[step] = {**record, "since_start": step - first}
    if not facts:
        raise ValueError(
            f"{metrics} has no record of stage 'run', which tells GPUs and tokens: train on with this version"
        )
    low, high = window or (min(steps, default=0), max(steps, default=0))
    counted = {step: one for step, one in steps.items() if low <= step <= high and one["since_start"] >= warmup}
    if not counted:
        raise ValueError(f"{metrics}: none of its {len(steps)} steps lies in {low}–{high} and {warmup} after a start")
    seconds, tflops, memory = (
        [one[key] for one in counted.values()] for key in ("step_seconds", "tflops_per_gpu", "memory_gib")
    )
    return Layout(
        name=name if equals else Path(folder).name,
        gpus=facts["world_size"],
        tokens=facts["global_batch"] * facts["sequence_length"],
        seconds=Spread.of(*seconds),
        tflops=Spread.of(*tflops),
        memory=max(memory) * 2**30 / 1e9,
        window=f"{len(counted)} steps within {min(counted)}–{max(counted)}; {warmup} after every start left out",
        steps=tuple((step, one["step_seconds"]) for step, one in sorted(steps.items())),
    )


def table(rows: Sequence[Layout], price: float | None) -> str:
    """All rows."""
    fewest = min(row.tokens for row in rows)
    return _markdown(
        rows,
        {
            "run": lambda row: row.name,
            "GPUs": lambda row: str(row.gpus),
            "tokens a step": lambda row: f"{row.tokens:,}",
            "s a step": lambda row: _spread(row.seconds),
            "TFLOP/s per GPU": lambda row: _spread(row.tflops),
            "peak GB": lambda row: "–" if row.memory is None else f"{row.memory:.1f}",
            "tokens/s per GPU": lambda row: f"{row.speed:,.0f}",
            f"s for {fewest:,} tokens": lambda row: f"{row.seconds_for(fewest):.4g}",
            f"{_currency(price)} per 10⁹ tokens": lambda row: f"{row.cost(price):,.1f}",
        },
    )


def ratios(*groups: Sequence[Layout]) -> str:
    """Each layout against the first of its group: what is fair, per GPU and per token, before the bare step time."""
    first = {row: group[0] for group in groups for row in group[1:]}
    return _markdown(
        list(first),
        {
            "run": lambda row: row.name,
            "tokens/s per GPU": lambda row: f"× {row.speed / first[row].speed:.2f}",
            "cost of a token": lambda row: f"÷ {row.speed / first[row].speed:.2f}",
            "time for the same tokens": lambda row: f"÷ {first[row].seconds_for(1) / row.seconds_for(1):.2f}",
            "GPUs": lambda row: f"÷ {first[row].gpus / row.gpus:.3g}",
            "time of a step": lambda row: f"÷ {first[row].seconds.median / row.seconds.median:.2f}",
            "tokens of a step": lambda row: f"÷ {first[row].tokens / row.tokens:.3g}",
        },
    )


def _markdown(rows: Sequence[Layout], columns: dict[str, Callable[[Layout], str]]) -> str:
    """A table that is aligned for reading as it is."""
    lines = [list(columns), *([cell(row) for cell in columns.values()] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(columns))]
    text = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |" for line in lines]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(text)


def draw_layouts(path: Path, rows: Sequence[Layout], price: float | None) -> None:
    """A bar a row; ours with their quartiles, the paper's lighter."""
    fewest = min(row.tokens for row in rows)
    panels: list[tuple[str, Callable[[Layout], float], Callable[[Layout], Spread | None]]] = [
        ("TFLOP/s per GPU", lambda row: row.tflops.median, lambda row: row.tflops),
        (f"s for {fewest:,} tokens", lambda row: row.seconds_for(fewest), lambda row: None),
        ("peak GB", lambda row: row.memory or 0.0, lambda row: None),
        (f"{_currency(price)} per 10⁹ tokens", lambda row: row.cost(price), lambda row: None),
    ]
    pyplot = _pyplot()
    figure, all_axes = pyplot.subplots(1, len(panels), figsize=(16, 1.2 + 0.5 * len(rows)), layout="constrained")
    labels = [f"{row.name}  [{row.gpus} GPU{'s' * (row.gpus > 1)}]" for row in rows]
    for index, (axes, (title, value, spread)) in enumerate(zip(all_axes, panels)):
        for place, row in enumerate(rows):
            quartiles = spread(row)
            reach = quartiles and [[quartiles.median - quartiles.low], [quartiles.high - quartiles.median]]
            bar = axes.barh(place, value(row), xerr=reach, color="tab:blue" if row.steps else "lightsteelblue")
            axes.bar_label(bar, labels=[f"{value(row):,.4g}" if value(row) else "not given"], padding=3)
        axes.set_title(title)
        axes.set_yticks(range(len(rows)), labels if index == 0 else [])
        axes.invert_yaxis()
        axes.margins(x=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def draw_steps(path: Path, rows: Sequence[Layout], price: float | None) -> None:
    """Every step's seconds, and the median of those that count."""
    pyplot = _pyplot()
    ours = [row for row in rows if row.steps]
    figure, all_axes = pyplot.subplots(len(ours), 1, figsize=(9, 2.6 * len(ours)), layout="constrained", squeeze=False)
    for axes, row in zip(all_axes[:, 0], ours):
        axes.plot(*zip(*row.steps), ".-", color="tab:blue", linewidth=0.8, label="every step")
        axes.axhline(row.seconds.median, color="tab:orange", label=f"median and quartiles of {row.window}")
        axes.axhspan(row.seconds.low, row.seconds.high, color="tab:orange", alpha=0.2)
        axes.set(xlabel="step", ylabel="s a step", title=f"{row.name}, {row.gpus} GPUs")
        axes.set_ylim(0.9 * row.seconds.low, 1.25 * row.seconds.high)  # warm-up leaves the picture
        axes.legend(fontsize="small", frameon=False, loc="upper right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _currency(price: float | None) -> str:
    return "GPU-hours" if price is None else f"dollars (at {price:g} a GPU-hour)"


def _spread(spread: Spread) -> str:
    text = format(spread.median, ".4g")
    return text if spread.low == spread.high else f"{text} ({spread.low:.4g}–{spread.high:.4g})"


def _window(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    return int(first), int(last)


if __name__ == "__main__":
    main()
