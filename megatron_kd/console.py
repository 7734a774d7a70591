"""What a run shows: stage headings, derived quantities, progress; and what it records.

Every progress record goes to an append-only `metrics.jsonl` first. What the screen shows is a rendering of that very
record: on a terminal a live bar (rich), elsewhere one `key=value` line every few seconds, so that a log file stays
readable. Only rank 0 shows and records anything; the other ranks call the same methods to no effect. Everything goes
to stderr; stdout is for results.

A run that is started again records once more what it does once more. `read_steps` takes the last word on each step.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

_PLAIN_INTERVAL_SECONDS = 5.0


class Console:
    """Headings and quantities of one process; rank 0 speaks, the others are silent."""

    def __init__(self, rank: int = 0, metrics: str | Path | None = None) -> None:
        """Args: rank: only 0 shows and records; metrics: the `metrics.jsonl` to append to, or None."""
        self.active = rank == 0
        self._rich = RichConsole(stderr=True, highlight=False)
        self._metrics: IO[str] | None = None
        if self.active and metrics is not None:
            Path(metrics).parent.mkdir(parents=True, exist_ok=True)
            self._metrics = Path(metrics).open("a", encoding="utf-8")  # noqa: SIM115 (closed by close)
            if not _ends_a_line(Path(metrics)):
                self._metrics.write("\n")

    def stage(self, title: str) -> None:
        """A heading."""
        if self.active:
            self._rich.rule(f"[bold]{title}", align="left") if self._rich.is_terminal else self._plain(f"== {title}")

    def quantity(self, name: str, value: object, explanation: str = "") -> None:
        """One derived quantity: what it is, its value, and how it came about."""
        if self.active:
            self._plain(f"  {name:<24} {value!s:<20} {explanation}".rstrip())

    def note(self, text: str) -> None:
        """One line of prose."""
        if self.active:
            self._plain(text)

    def progress(self, stage: str, total: int, unit: str) -> StepProgress:
        """Progress over `total` units; use as a context manager and call `update` after each unit."""
        return StepProgress(self, stage, total, unit)

    def record(self, values: Mapping[str, Any]) -> None:
        """Appends one line to `metrics.jsonl`."""
        if self._metrics is not None:
            self._metrics.write(json.dumps({"time": time.time(), **values}) + "\n")
            self._metrics.flush()

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None

    def _plain(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class StepProgress:
    """A live bar on a terminal, `key=value` lines elsewhere."""

    def __init__(self, console: Console, stage: str, total: int, unit: str) -> None:
        self._console, self._stage, self._total, self._unit = console, stage, total, unit
        self._bar: Progress | None = None
        self._last_line = 0.0
        if console.active and console._rich.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                TextColumn("{task.completed:.0f}/{task.total:.0f} {task.percentage:.1f}%"),
                TextColumn("{task.fields[values]}"),
                TextColumn("eta"),
                TimeRemainingColumn(compact=True),
                console=console._rich,
            )

    def __enter__(self) -> StepProgress:
        self._started = time.perf_counter()
        self._first: int | None = None
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(f"{self._unit}", total=self._total, values="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, values: Mapping[str, Any]) -> None:
        """Records that `done` of the units are finished, with the figures of the last one."""
        if not self._console.active:
            return
        record = {"stage": self._stage, self._unit: done, "total": self._total, **values}
        self._console.record(record)
        if self._bar is not None:
            text = " | ".join(f"{name} {_short(value)}" for name, value in values.items())
            self._bar.update(self._task, completed=done, values=text)
            return
        now = time.perf_counter()
        if done == self._total or now - self._last_line >= _PLAIN_INTERVAL_SECONDS:
            self._last_line = now
            line = " ".join(f"{name}={_short(value)}" for name, value in {**record, "eta": self._eta(done)}.items())
            print(line, file=sys.stderr, flush=True)

    def _eta(self, done: int) -> str:
        if self._first is None:  # a resumed run starts late: only what this process did tells its speed
            self._first, self._started = done, time.perf_counter()
            return "?"
        seconds = (time.perf_counter() - self._started) / max(done - self._first, 1) * (self._total - done)
        return duration(seconds)


def read_records(metrics: Path) -> list[dict[str, Any]]:
    """All records of a `metrics.jsonl`, in order; a line that its writer was killed in is left out."""
    records = []
    for line in metrics.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return records


def read_steps(metrics: Path, stage: str = "distill") -> dict[int, dict[str, Any]]:
    """The records of a stage by step; of a step that was done again after a restart, the last."""
    records = [record for record in read_records(metrics) if record.get("stage") == stage]
    return {record["step"]: record for record in records if "step" in record}


def duration(seconds: float) -> str:
    """`3h12m`, `4m05s` or `12s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def byte_count(count: float) -> str:
    """Bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.1f} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{count:.1f} TiB"


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - 1, 0))
        return file.read() in (b"", b"\n")


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace(" ", "_")
