"""Benchmark of the head: memory and time of the loss variants beside the bare GEMMs and beside peers.

    python tools/bench_head.py                              one shape, every variant, on this machine's device
    python tools/bench_head.py --simulate                   the paper's and GPT-OSS's shapes, without memory
    python tools/bench_head.py --positions 32768 65536 …    any shapes; see --help
    python tools/bench_head.py --config configs/F.yaml      the head of a run, alone
    python tools/bench_head.py --report                     docs/benchmarks.md from the CSV files under docs/benchmarks

Each configuration runs in a process of its own (tools/head_case.py), one a rank. Output: a table, a CSV with machine
and versions, a PNG of memory over sequence length.

--simulate counts the tensors of the same code on the meta device. It begins by measuring and simulating one shape
that fits here, and leaves out the variants whose peaks differ by more than 2 %: temporaries inside one operator are
not seen, and autograd adds gradients in place where nobody watches and elsewhere where somebody does.
"""

# The checkout's packages are found from here, whatever the working directory.
# ruff: noqa: E402
from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch

from megatron_kd.config_io import load_config
from megatron_kd.plan.planned import plan_run
from tools import head_report
from tools.head_case import VARIANTS, HeadCase
from tools.head_peers import PEERS

PAPER = {"hidden": 4096, "vocab": 131_072, "tp": 2, "k": 100, "dtype": "bfloat16", "chunk": 1024, "main_grad": True}
GPT_OSS = PAPER | {"hidden": 2880, "vocab": 201_088}
LENGTHS = [32_768, 65_536, 262_144]
# A shape that fits a laptop, on which simulation is checked, and which is timed by default.
SMALL = {"positions": 4096, "hidden": 1024, "vocab": 65_536, "k": 100, "dtype": "float32", "chunk": 512}
AGREEMENT = 0.02


def main() -> int:
    """Run the cases asked for, print and write their table."""
    options = parse()
    if options.report:
        head_report.write_document(
            ROOT / "docs" / "benchmarks.md", sorted((ROOT / "docs" / "benchmarks").glob("*.csv"))
        )
        return 0
    if options.show:
        print(head_report.table([row for file in options.show for row in head_report.read(file)]))
        return 0
    cases = simulated_cases(options) if options.simulate else measured_cases(options)
    print(f"{len(cases)} configurations, one process each, on {machine()['machine']}", flush=True)
    off = {}
    if options.simulate:
        off = {variant: simulation_error(variant, options) for variant in options.variants}
        cases = [case for case in cases if abs(off[case.variant]) <= AGREEMENT]
    rows = []
    for index, case in enumerate(cases):
        began = time.monotonic()
        row = machine() | run(case, options.timeout) | {"simulation_error": off.get(case.variant)}
        rows.append(row)
        print(f"[{index + 1}/{len(cases)}] {time.monotonic() - began:.0f} s  {head_report.line(row)}", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    write_csv(options.out / "head.csv", rows)
    head_report.plot(options.out / "head.png", rows)
    print("\n" + head_report.table(rows))
    print(f"\n{options.out / 'head.csv'}\n{options.out / 'head.png'}")
    return int(any(row["status"] not in ("ok", "out of memory", "not installed") for row in rows))


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=[*VARIANTS, *PEERS])
    parser.add_argument("--peers", action="store_true", help="add the peers that are installed here")
    parser.add_argument("--positions", nargs="+", type=int, default=[SMALL["positions"]])
    parser.add_argument("--hidden", type=int, default=SMALL["hidden"])
    parser.add_argument("--vocab", type=int, default=SMALL["vocab"])
    parser.add_argument("--topk", type=int, default=SMALL["k"])
    parser.add_argument("--tp", nargs="+", type=int, default=[1])
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--chunk", type=int, default=SMALL["chunk"], help="0: as the loss chooses")
    parser.add_argument("--dtype", default=SMALL["dtype"], choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--kind", default="ghost", choices=["truncated", "ghost", "renormalized"])
    parser.add_argument("--main-grad", action="store_true", help="dW into an fp32 main_grad, as under Megatron")
    parser.add_argument("--repeats", type=int, default=5, help="0: memory only")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one configuration")
    parser.add_argument("--simulate", action="store_true", help="the large shapes, without memory")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, help="of --simulate")
    parser.add_argument("--agreement", type=json.loads, default={}, help="JSON of fields of the shape checked first")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "bench_head")
    parser.add_argument("--report", action="store_true", help="make docs/benchmarks.md")
    parser.add_argument("--show", nargs="+", type=Path, help="print the table of these CSV files")
    parser.add_argument("--config", type=Path, help="a run's YAML file: its head, entries, chunk and type as defaults")
    config = parser.parse_known_args()[0].config
    if config is not None:
        parser.set_defaults(**head_of(config))
    options = parser.parse_args()
    if options.peers:
        options.variants += [name for name in PEERS if name not in options.variants]
    return options


def head_of(config: Path) -> dict[str, Any]:
    """The options that a run's configuration settles."""
    run = plan_run(load_config(config))
    return {
        "positions": [run.layout.positions],
        "hidden": run.shape.hidden,
        "vocab": run.shape.vocab,
        "topk": run.entries,
        "tp": [run.layout.tensor],
        "sequence_parallel": run.layout.sequence_parallel,
        "chunk": run.loss.chunk_tokens or 0,
        "dtype": {"bf16": "bfloat16", "fp32": "float32"}[run.config.train.precision],
        "kind": run.loss.kind,
        "main_grad": True,
    }


def measured_cases(options: argparse.Namespace) -> list[HeadCase]:
    """Variants × lengths × ranks on this machine's device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return [
        HeadCase(
            variant=variant,
            positions=positions,
            hidden=options.hidden,
            vocab=options.vocab,
            k=options.topk,
            tp=tp,
            sequence_parallel=options.sequence_parallel and tp > 1,
            chunk=options.chunk,
            dtype=options.dtype,
            kind=options.kind,
            main_grad=options.main_grad and variant in VARIANTS,
            device=device,
            repeats=options.repeats,
        )
        for positions, tp, variant in itertools.product(options.positions, options.tp, options.variants)
    ]


def simulated_cases(options: argparse.Namespace) -> list[HeadCase]:
    """The paper's head at every length and GPT-OSS's at its context; the loss also without main_grad, and with
    sequence parallelism.
    """
    cases = []
    for shape, positions in [*((PAPER, length) for length in options.lengths), (GPT_OSS, options.lengths[0])]:
        for variant in options.variants:
            case = HeadCase(variant=variant, positions=positions, device="meta", repeats=0, kind=options.kind, **shape)
            cases.append(case)
            if variant == "fused":
                cases += [replace(case, main_grad=False), replace(case, sequence_parallel=True)]
    return cases


def simulation_error(variant: str, options: argparse.Namespace) -> float:
    """How far the simulated peak of a variant is off the measured one, relatively, at a shape that fits."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = SMALL | {"positions": 1024} | options.agreement
    case = HeadCase(variant=variant, repeats=0, device=device, kind=options.kind, **shape)
    rows = [run(each, options.timeout) for each in (case, replace(case, device="meta"))]
    if any(row["status"] != "ok" for row in rows):
        print(f"{variant}: not simulated, {[row['status'] for row in rows]}")
        return math.inf
    measured, simulated = (row["peak_bytes"] for row in rows)
    off = simulated / measured - 1
    verdict = "valid" if abs(off) <= AGREEMENT else f"more than {AGREEMENT:.0%}: not simulated"
    print(f"{variant}: measured {measured:,} B, simulated {simulated:,} B ({off:+.2%}), {verdict}", flush=True)
    return off


def run(case: HeadCase, timeout: float) -> dict[str, Any]:
    """The row of one configuration, from its processes."""
    ranks = 1 if case.device == "meta" else case.tp
    command = [sys.executable, str(ROOT / "tools" / "head_case.py"), json.dumps(asdict(case))]
    with tempfile.TemporaryDirectory() as folder:
        processes, logs = [], [Path(folder, f"log-{rank}") for rank in range(ranks)]
        for rank in range(ranks):
            environment = os.environ | {"RANK": str(rank), "STORE": os.path.join(folder, "store")}
            pipe = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            with logs[rank].open("w") as log:
                processes.append(subprocess.Popen(command, stdout=pipe, stderr=log, text=True, env=environment))
        try:
            output, _ = processes[0].communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            return asdict(case) | {"status": f"no result in {timeout:.0f} s"}
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if processes[0].returncode == 0 and output.strip():
            return json.loads(output.strip().splitlines()[-1])
        last = logs[0].read_text().strip().splitlines()
        return asdict(case) | {"status": last[-1] if last else f"exit code {processes[0].returncode}"}


def machine() -> dict[str, str]:
    """Where a row comes from."""
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    else:
        lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
        model = next(
            (line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine()
        )
        name = f"{model}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, {capability()}"
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    return {"date": time.strftime("%Y-%m-%d"), "machine": name, **versions}


def capability() -> str:
    """Vector instructions in use."""
    return torch.backends.cpu.get_cpu_capability()


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """All fields of all rows."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
