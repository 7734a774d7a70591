"""`megatron-kd plan`: what runs will need, side by side."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_kd.config_io import load_or_exit
from megatron_kd.plan.planned import PlannedRun, plan_run
from megatron_kd.plan.report import dry_run_table, make_report, to_json, to_table

if TYPE_CHECKING:
    from megatron_kd.plan.dry_run import Counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `megatron-kd plan`."""
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help="YAML files of runs")
    parser.add_argument("--json", action="store_true", help="one object a line and configuration, nothing else")
    parser.add_argument(
        "--dry-run", action="store_true", help="build the Megatron model of a rank of every stage, without memory"
    )
    parser.add_argument("--rank", type=int, nargs="+", metavar="N", help="of --dry-run: these ranks instead")


def plan(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Prints the plan; raises ValueError for a run that cannot be, by the number that fails."""
    reports, counted = [], []
    for file in arguments.configs:
        config = load_or_exit(file, overrides)
        try:
            run = plan_run(config)
            reports.append(make_report(Path(file).stem, run))
            counted.append(_dry_run(run, arguments.rank) if arguments.dry_run else None)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
    if arguments.json:
        for report, ranks in zip(reports, counted):
            print(to_json(report, ranks))
        return
    print(to_table(reports))
    if arguments.dry_run:
        print("\n" + dry_run_table(reports, counted))


def _dry_run(run: PlannedRun, ranks: list[int] | None) -> list[Counted]:
    from megatron_kd.plan.dry_run import dry_run  # Megatron-Core takes seconds to import

    return dry_run(run, ranks)
