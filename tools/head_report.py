"""The head benchmark's output: a table for the terminal, a plot, and docs/benchmarks.md from CSV files."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

GIB = 2**30
# Heading → how a cell is made of a row; rows from a CSV hold strings.
COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "variant": lambda row: str(row["variant"]) + (f" ({row['peer']})" if row.get("peer") else ""),
    "positions": lambda row: f"{int(row['positions']):,}",
    "D": lambda row: str(row["hidden"]),
    "V": lambda row: f"{int(row['vocab']):,}",
    "TP": lambda row: str(row["tp"]) + (" SP" if flag(row, "sequence_parallel") else ""),
    "type": lambda row: {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}[row["dtype"]],
    "dW in": lambda row: "main_grad" if flag(row, "main_grad") else "grad",
    "all GiB": lambda row: gib(row, "total_bytes"),
    "beyond inputs": lambda row: gib(row, "peak_bytes"),
    "of the sum": lambda row: quotient(row, "peak_bytes", "expected_bytes"),
    "simulation off by": lambda row: number(row, "simulation_error", "+.2%"),
    "kept": lambda row: gib(row, "kept_bytes"),
    "s": lambda row: number(row, "seconds", ".3g"),
    "× GEMM floor": lambda row: number(row, "ratio", ".3f"),
    "loss error": lambda row: number(row, "loss_error", ".1e"),
    "dh error": lambda row: number(row, "dh_error", ".1e"),
    "dW error": lambda row: number(row, "dw_error", ".1e"),
}


def flag(row: dict[str, Any], name: str) -> bool:
    """A boolean field."""
    return str(row.get(name)) == "True"


def number(row: dict[str, Any], name: str, form: str) -> str:
    """A figure, or a dash where there is none."""
    return format(float(row[name]), form) if row.get(name) not in (None, "") else "–"


def gib(row: dict[str, Any], name: str) -> str:
    """Bytes as GiB; why there is no figure, in the first column that would hold one."""
    if row.get(name) not in (None, ""):
        return f"{float(row[name]) / GIB:.3f}"
    return str(row["status"]) if name == "total_bytes" else "–"


def quotient(row: dict[str, Any], name: str, other: str) -> str:
    """Ratio of two fields."""
    if row.get(name) in (None, "") or row.get(other) in (None, ""):
        return "–"
    return f"{float(row[name]) / float(row[other]):.3f}"


def line(row: dict[str, Any]) -> str:
    """One row, named."""
    return "  ".join(f"{name} {cell(row)}" for name, cell in COLUMNS.items() if cell(row) != "–")


def table(rows: list[dict[str, Any]]) -> str:
    """All rows, as a Markdown table aligned for reading as it is; columns without any figure are left out."""
    cells = {name: [cell(row) for row in rows] for name, cell in COLUMNS.items()}
    cells = {name: column for name, column in cells.items() if any(value != "–" for value in column)}
    widths = {name: max(len(name), *(len(value) for value in column)) for name, column in cells.items()}
    lines = ["| " + " | ".join(name.ljust(width) for name, width in widths.items()) + " |"]
    lines.append("|" + "|".join("-" * (width + 2) for width in widths.values()) + "|")
    for index in range(len(rows)):
        lines.append("| " + " | ".join(cells[name][index].rjust(width) for name, width in widths.items()) + " |")
    return "\n".join(lines)


def plot(path: Path, rows: list[dict[str, Any]]) -> None:
    """Memory over sequence length, everything counted, beside one full logits tensor; a panel for each head."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no plot (pip install megatron_kd[plot])")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if row.get("total_bytes") not in (None, "")]
    heads = sorted({head(row) for row in rows})
    # A head measured at one length has nothing to show beside one measured at several.
    heads = [one for one in heads if len({row["positions"] for row in rows if head(row) == one}) > 1] or heads
    if not heads:
        return
    figure, panels = pyplot.subplots(1, len(heads), figsize=(8 * len(heads), 4.5), squeeze=False)
    for panel, one in zip(panels[0], heads):
        here = [row for row in rows if head(row) == one]
        for name in dict.fromkeys(curve(row) for row in here):
            points = sorted((int(row["positions"]), float(row["total_bytes"])) for row in here if curve(row) == name)
            panel.plot([x for x, _ in points], [y / GIB for _, y in points], marker="o", label=name)
        positions = sorted({int(row["positions"]) for row in here})
        element = 4 if one[3] == "float32" else 2
        logits = [x * one[1] / one[2] * element / GIB for x in positions]
        panel.plot(positions, logits, "k--", label="one tensor of all logits")
        panel.set(xscale="log", yscale="log", xlabel="positions", ylabel="GiB on a rank, everything counted")
        panel.set_title(f"D {one[0]:,}, V {one[1]:,}, TP {one[2]}, {one[3]}")
        panel.set_xticks(positions, [f"{x:,}" for x in positions])
        panel.xaxis.set_minor_formatter("")
        panel.yaxis.set_major_formatter("{x:g}")
        panel.legend(loc="upper left", bbox_to_anchor=(1.02, 1), frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def head(row: dict[str, Any]) -> tuple[int, int, int, str]:
    """What a panel of the plot shares."""
    return int(row["hidden"]), int(row["vocab"]), int(row["tp"]), str(row["dtype"])


def curve(row: dict[str, Any]) -> str:
    """Name of a line of the plot."""
    extras = [", main_grad"] * flag(row, "main_grad") + [", sequence parallel"] * flag(row, "sequence_parallel")
    return str(row["variant"]) + "".join(extras)


def read(path: Path) -> list[dict[str, Any]]:
    """Rows of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_document(path: Path, files: Iterable[Path]) -> None:
    """docs/benchmarks.md: one section a CSV file, named by the file; a plot beside it where lengths differ."""
    parts = [
        "# Benchmarks of the head",
        "Made by `python tools/bench_head.py --report` from the CSV files under `docs/benchmarks/`; do not edit. "
        "Each configuration ran in a process of its own. *All* counts inputs, gradients and everything between; *of "
        "the sum* is the peak beyond the inputs over dh + dW + one chunk of logits; *kept* is held from forward to "
        "backward. *× GEMM floor* is the time over that of the bare GEMMs of the same chunks, run in turn in the same "
        "process: three, or four for `fused`, which projects twice; the median over pairs of runs. *Simulation off "
        "by*: the simulated peak against the measured one at a shape that fits. Errors are max|Δ|/max|reference| "
        "against dense fp64 on a small problem of the same type; in half precision they are the logits' rounding.",
        "The paper (arXiv 2608.03796) reports for its own code at D 4,096, V 131,072, TP 2, everything counted: dense "
        "85.2 GiB, forward-chunked 17.7, fused 5.45 at 32,768 positions; the latter two 134.2 and 11.6 at 262,144.",
    ]
    for file in files:
        rows = read(file)
        machines = sorted(
            {f"{row['machine']}; torch {row['torch']}, Python {row['python']}; {row['date']}" for row in rows}
        )
        kinds = sorted({row["kind"] for row in rows})
        simulated = "Simulated on the meta device; run on: " if rows[0]["device"] == "meta" else "Measured on: "
        parts += [f"## {file.stem.replace('_', ' ')}", simulated + " / ".join(machines) + f". Objective: {kinds[0]}."]
        parts.append(table(rows))
        if len({row["positions"] for row in rows}) > 1:
            plot(file.with_suffix(".png"), rows)
            parts.append(f"![Memory over positions]({file.parent.name}/{file.stem}.png)")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
