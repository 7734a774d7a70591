"""The command `megatron-kd`: everything about a run that one process does.

`evaluate` can be given several, `preflight` one on each node: `torchrun … -m megatron_kd.cli evaluate …`.

Each subcommand registers itself in `_add_commands`; heavy imports happen inside the commands, so that `--help` and a
typo are answered at once. Results go to stdout, everything else to stderr; exit codes are entry.py's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_kd.config import RunConfig
from megatron_kd.config_io import describe_fields, load_or_exit


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the console script."""
    parser = argparse.ArgumentParser(prog="megatron-kd", description="Distil a large language model into a small one.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_commands(commands)
    arguments, overrides = parser.parse_known_args(argv)
    config_file = getattr(arguments, "config", None)
    arguments.overrides = overrides
    if config_file is None and overrides and arguments.run is not _plan:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")

    from megatron_kd.entry import job

    if config_file is not None:
        arguments.run_config = load_or_exit(config_file, overrides)
    with job():
        arguments.run(arguments)


def _add_commands(commands: argparse._SubParsersAction) -> None:
    _add_run_command(commands, "prepare", _prepare, "fetch or convert the teacher; tokenise and pack the text")
    evaluate = _add_run_command(commands, "evaluate", _evaluate, "held-out divergence of teacher and students")
    evaluate.add_argument("--student", type=Path, metavar="FOLDER", help="default: <run_dir>/student_hf, if present")
    export = _add_run_command(commands, "export", _export, "the newest checkpoint as a Hugging Face folder")
    export.add_argument("--output", type=Path, metavar="FOLDER", help="default: <run_dir>/student_hf")
    report = _add_run_command(commands, "report", _report, "table, loss curve, and a few words from the student")
    report.add_argument("--prompt", default="The return statement", help="what the student goes on from")
    report.add_argument("--tokens", type=int, default=32, help="how many tokens it adds")

    preflight = _add_run_command(commands, "preflight", _preflight, "examine the nodes before a run (launch/nodes.sh)")
    preflight.add_argument("--job", choices=("distill", "cache_teacher"), default="distill", help="what is to run")
    preflight.add_argument("--gpus-per-node", type=int, metavar="N", help="0: on the CPU; default: all of node 0's")

    from megatron_kd.cache.cli import add_commands as add_cache_commands
    from megatron_kd.plan.cli import add_arguments as add_plan_arguments

    purpose = "memory, step time and cost of runs, side by side, before any GPU is rented"
    plan = commands.add_parser("plan", help=purpose, description=purpose)
    add_plan_arguments(plan)
    plan.set_defaults(run=_plan)

    purpose = "look at, verify, mend and merge teacher caches"
    cache = commands.add_parser("cache", help=purpose, description=purpose)
    add_cache_commands(cache.add_subparsers(required=True, metavar="COMMAND"))


def _add_run_command(
    commands: argparse._SubParsersAction, name: str, run: Callable[[argparse.Namespace], None], purpose: str
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=purpose,
        description=purpose,
        epilog=describe_fields(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--config", required=True, metavar="FILE", help="the run's YAML file")
    command.set_defaults(run=run)
    return command


def _student_folder(config: RunConfig) -> Path:
    return Path(config.run_dir) / "student_hf"


def _prepare(arguments: argparse.Namespace) -> None:
    from megatron_kd.console import Console
    from megatron_kd.data.samples import prepare
    from megatron_kd.data.tokenizer import load_tokenizer
    from megatron_kd.teacher.weights import resolve_model

    config: RunConfig = arguments.run_config
    console = Console()
    console.stage("Prepare")
    teacher = resolve_model(config.teacher.model, console)
    console.quantity("teacher", teacher)
    print(prepare(config, load_tokenizer(teacher), console))


def _export(arguments: argparse.Namespace) -> None:
    from megatron_kd.console import Console
    from megatron_kd.train.export import export_checkpoint

    config: RunConfig = arguments.run_config
    console = Console()
    console.stage("Export")
    output = arguments.output or _student_folder(config)
    console.quantity("checkpoint", export_checkpoint(config, output))
    print(output)


def _plan(arguments: argparse.Namespace) -> None:
    from megatron_kd.plan.cli import plan

    plan(arguments, arguments.overrides)


def _evaluate(arguments: argparse.Namespace) -> None:
    from megatron_kd import platform
    from megatron_kd.console import Console
    from megatron_kd.entry import print_result
    from megatron_kd.evaluate.report import format_table
    from megatron_kd.evaluate.run import evaluate_run

    config: RunConfig = arguments.run_config
    rank, ranks = platform.init_distributed()
    console = Console(rank, Path(config.run_dir) / "metrics.jsonl")
    console.stage("Evaluate")
    student = arguments.student or _student_folder(config)
    if arguments.student is None and not student.exists():
        console.note(f"{student} is not there yet: evaluating the teacher and the untrained student")
        student = None
    print_result(format_table(evaluate_run(config, student, rank, ranks, console)))


def _report(arguments: argparse.Namespace) -> None:
    import json

    from megatron_kd.evaluate.report import format_table, generate, plot_loss

    config: RunConfig = arguments.run_config
    run_dir = Path(config.run_dir)
    picture = run_dir / "loss.png"
    plot_loss(run_dir / "metrics.jsonl", picture)
    evaluation = json.loads((run_dir / "evaluation.json").read_text(encoding="utf-8"))
    print(format_table(evaluation))
    print(f"\nthe student goes on: {generate(_student_folder(config), arguments.prompt, arguments.tokens)!r}\n")
    for what, path in (
        ("teacher's cache", config.cache_url),
        ("checkpoints", config.checkpoint_dir),
        ("student, for transformers", _student_folder(config)),
        ("metrics", run_dir / "metrics.jsonl"),
        ("loss curve", picture),
        ("evaluation", run_dir / "evaluation.json"),
    ):
        print(f"{what:<28}{path}")


def _preflight(arguments: argparse.Namespace) -> None:
    from megatron_kd import platform
    from megatron_kd.entry import print_result
    from megatron_kd.preflight.checks import table
    from megatron_kd.preflight.run import preflight

    rows = preflight(arguments.run_config, arguments.job, arguments.gpus_per_node)
    print_result(table(rows))
    platform.shutdown()
    if not all(row.ok for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
