"""The benchmark's own arithmetic: what it simulates is what it measures, and its table says so."""

import csv
import json
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.loss.cases import ONCE
from tools import head_report
from tools.bench_head import GPT_OSS, PAPER, ROOT, head_of
from tools.head_case import VARIANTS, HeadCase, run

GIB = 2**30
SMALL = HeadCase("fused", positions=256, hidden=128, vocab=16_384, chunk=128, repeats=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_simulated_peak_is_the_measured_one(variant):
    """Within 2 %, once the difference of the two scratches (1 and 4 MiB) is put aside."""
    case = replace(SMALL, variant=variant)
    measured, simulated = run(case, None), run(replace(case, device="meta"), None)
    scratches = 3 << 20 if variant.startswith("fused") else 0
    assert simulated["peak_bytes"] == pytest.approx(measured["peak_bytes"] + scratches, rel=0.02)
    assert simulated["kept_bytes"] == pytest.approx(measured["kept_bytes"], rel=0.02)
    assert measured["dh_error"] <= 2e-6


@ONCE
@pytest.mark.full
@pytest.mark.parametrize(
    ("positions", "main_grad", "limit"),
    [(32_768, True, 2.25), (32_768, False, 2.8), (65_536, True, 2.79)],
)
def test_the_papers_head(positions, main_grad, limit):
    """Everything counted on one of two ranks; the paper's own needs 5.45 GiB at 32K and 11.6 at 256K.

    The limit at 64K is on the line from 2.25 GiB at 32K to 6.05 at 256K, which takes minutes to simulate
    (docs/benchmarks.md has it).
    """
    row = simulate(HeadCase("fused", positions, device="meta", repeats=0, **(PAPER | {"main_grad": main_grad})))
    assert row["total_bytes"] <= limit * GIB
    assert row["peak_bytes"] <= 1.05 * row["expected_bytes"]


@ONCE
@pytest.mark.full
def test_sequence_parallelism_and_gpt_oss():
    row = simulate(HeadCase("fused", 16_384, device="meta", repeats=0, sequence_parallel=True, **GPT_OSS))
    assert row["peak_bytes"] <= 1.05 * row["expected_bytes"]


def simulate(case):
    """In a process of its own, as a group whose collectives do nothing is set up there."""
    command = [sys.executable, str(ROOT / "tools" / "head_case.py"), json.dumps(vars(case))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=True)
    return json.loads(done.stdout)


@pytest.mark.full
def test_benchmark_writes_table_csv_and_document(tmp_path):
    command = [sys.executable, str(ROOT / "tools" / "bench_head.py"), "--out", str(tmp_path), "--repeats", "1"]
    shape = ["--positions", "32", "--hidden", "16", "--vocab", "256", "--topk", "8", "--chunk", "16"]
    done = subprocess.run([*command, *shape, "--variants", "fused"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr + done.stdout
    with (tmp_path / "head.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert row["status"] == "ok"
    assert float(row["ratio"]) > 0
    assert row["machine"] in done.stdout
    head_report.write_document(tmp_path / "benchmarks.md", [tmp_path / "head.csv"])
    document = (tmp_path / "benchmarks.md").read_text()
    assert head_report.table([row]) in document
    assert row["machine"] in document


def test_the_head_of_a_run(monkeypatch):
    """The isolated head's configuration is the paper's head on one GPU."""
    monkeypatch.chdir(ROOT)
    options = head_of(ROOT / "configs" / "gpt_oss_20b_32k_one_gpu_head.yaml")
    paper = {"hidden": 4096, "vocab": 131_072, "topk": 100, "dtype": "bfloat16", "main_grad": True, "kind": "truncated"}
    rest = {"positions": [32_768], "tp": [1], "sequence_parallel": False, "chunk": 4096}
    assert options == paper | rest
