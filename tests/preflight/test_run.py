"""The examination itself, on two processes that stand for nodes: every fact measured, faults injected."""

import dataclasses
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from unittest.mock import Mock

import pytest

from megatron_kd import platform
from megatron_kd.cache import CacheWriter
from megatron_kd.config_io import load_config
from megatron_kd.plan.planned import plan_run
from megatron_kd.plan.report import make_report
from megatron_kd.preflight.facts import CHECKPOINT_BYTES, checkpoint_need, node_facts
from megatron_kd.preflight.run import preflight, with_planned_memory
from tests.cache import targets
from tests.distributed import run_ranks
from tests.teacher.models import write_run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A configuration with a student on disk and a complete cache of 3 blocks."""
    folder = tmp_path_factory.mktemp("preflight")
    path = write_run(folder, documents=2, micro_batch=1, data={}, cache={})
    manifest = targets.manifest()
    writer = CacheWriter.create(folder / "run" / "teacher.zarr", manifest, targets.table(manifest))
    targets.fill(writer)
    incomplete = CacheWriter.create(folder / "incomplete.zarr", manifest, targets.table(manifest))
    targets.fill(incomplete, blocks=[0, 2])
    return path


def _examine(rank, world, run, cases):
    return [_one_case(rank, run, **case) for case in cases]


def _one_case(rank, run, overrides=(), ahead=0.0, torch=None, gpus=0):
    def facts(*arguments, **keywords):
        found = node_facts(*arguments, **keywords)
        return dataclasses.replace(found, versions={**found.versions, "torch": torch}) if torch and rank else found

    rows = preflight(
        load_config(run, ["--parallel.tensor", "2", *overrides]), "distill", gpus, facts=facts,
        clock=lambda: time.time() + ahead * rank,
    )  # fmt: skip
    return {row.check: row for row in rows}


def test_two_nodes_are_examined_and_every_fault_is_found(run):
    """The clock that is set an hour ahead reads so to a second, which a busy machine keeps."""
    folder = run.parent
    cases = [
        {},
        {"ahead": 3600.0},
        {"torch": "1.0"},
        {"overrides": ["--cache.url", str(folder / "nowhere")]},
        {"overrides": ["--cache.url", str(folder / "incomplete.zarr")]},
        {"overrides": ["--preflight.disk_gib", "1e9"]},
        {"overrides": ["--preflight.bandwidth", "1e9"]},
        {"overrides": ["--parallel.pipeline", "3"]},
        {"gpus": 8},
    ]
    first, second = run_ranks(_examine, 2, run, cases)
    assert first == second, "both nodes see the same table"
    failed = [[check for check, row in rows.items() if not row.ok] for rows in first]
    assert failed[:8] == [[], ["clocks"], ["torch"], ["cache"], ["cache blocks"], ["disk"], ["network"], ["layout"]]
    assert "GPUs" in failed[8]
    good, ahead, _, nowhere, incomplete = first[:5]
    assert good["cache decoded"].found == "3 of 3 blocks"
    assert abs(float(ahead["clocks"].found.split()[0]) - 3600) < 1
    assert "no teacher cache" in nowhere["cache"].found
    assert incomplete["cache blocks"].found == "2 of 3 committed; missing: 1"
    assert incomplete["cache decoded"].found == "2 of 3 blocks"
    assert not list((folder / "run").glob(".preflight*"))


def test_the_command_prints_the_table_and_fails(run):
    command = [sys.executable, "-m", "megatron_kd.cli", "preflight", "--config", str(run), "--gpus-per-node", "0"]
    done = subprocess.run([*command, "--preflight.disk_gib", "1e9"], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (1, "")
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("FAILED")] == ["disk"]


def test_disk_is_asked_for_the_checkpoints_still_to_come(run):
    """The teacher of tests/teacher/models.py, tied: V·D + L·(2·D² + 2·D·(D/2) + 3·D·F + 2·D) + D parameters."""
    d, f, v = 32, 48, 300
    parameters = v * d + 2 * (2 * d * d + 2 * d * (d // 2) + 3 * d * f + 2 * d) + d
    settings = ["--train.steps", "10", "--train.checkpoint_interval", "4", "--run_dir", str(run.parent / "disk")]
    assert checkpoint_need(load_config(run, settings)).bytes == 3 * parameters * CHECKPOINT_BYTES["bf16"]
    (run.parent / "disk/checkpoints/step_00000004").mkdir(parents=True)
    (run.parent / "disk/checkpoints/step_00000008.partial").mkdir()
    need = checkpoint_need(load_config(run, [*settings, "--train.precision", "fp32"]))
    assert need.bytes == 2 * parameters * CHECKPOINT_BYTES["fp32"]
    kept = checkpoint_need(load_config(run, [*settings, "--train.checkpoints_kept", "1"]))
    assert kept.bytes == parameters * CHECKPOINT_BYTES["bf16"]  # the older one goes when the next is complete
    missing = checkpoint_need(load_config(run, ["--student.init", str(run.parent)]))
    assert "config.json" in missing.error


def test_megatron_cores_version_is_found_without_metadata(monkeypatch):
    known = platform.megatron_version()
    monkeypatch.setattr(platform, "version", Mock(side_effect=PackageNotFoundError))
    assert platform.megatron_version() == known == version("megatron-core")


def test_the_memory_needed_is_the_plans_unless_the_configuration_says():
    """The paper's student on one node: what `megatron-kd plan` says of the very configuration."""
    path = ROOT / "configs" / "gpt_oss_20b_32k_one_node.yaml"
    config = load_config(path)
    planned = make_report("", plan_run(config)).peak_gib
    assert with_planned_memory(config, "distill", 1, 8).preflight.gpu_memory_gib == planned
    assert with_planned_memory(config, "cache_teacher", 1, 8) == config
    told = load_config(path, ["--preflight.gpu_memory_gib", "0"])
    assert with_planned_memory(told, "distill", 1, 8) == told
