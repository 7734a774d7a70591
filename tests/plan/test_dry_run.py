"""The plan's parameters and head against the real Megatron model, built without memory at the real world size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_kd.config_io import load_config
from megatron_kd.plan.dry_run import dry_run
from megatron_kd.plan.memory import stage_memory
from megatron_kd.plan.planned import plan_run
from megatron_kd.plan.step_time import model_flops_per_token

ROOT = Path(__file__).resolve().parent.parent.parent


def check(run, counted):
    """Parameters and FLOPs exactly; the loss's peak within 2 %: head.py's test says of what."""
    for rank in counted:
        stage = stage_memory(run, rank["stage"])
        assert rank["parameters"] == stage.parameters / run.element
        assert rank["flops_per_token"] == pytest.approx(model_flops_per_token(run), rel=1e-12)
        if rank["head_bytes"] is None:
            assert stage.head == 0
        else:
            assert rank["head_bytes"] == pytest.approx(stage.head, rel=0.02)


# The process's own peak: what the kernel accounts to a child includes its parent's size at the time of the fork.
WATCHED = """
import sys
from pathlib import Path
from megatron_kd.cli import main
main(sys.argv[1:])
print(*(line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line), file=sys.stderr)
"""


@pytest.mark.full
def test_both_gpt_oss_layouts_at_world_size_32(monkeypatch):
    """In a process of their own, whose memory is watched."""
    monkeypatch.chdir(ROOT)
    names = ["gpt_oss_20b_32k_one_node", "gpt_oss_20b_32k_four_nodes_dense"]
    overrides = ["--hardware.nodes", "4", "--train.global_batch", "128"]
    files = [f"configs/{name}.yaml" for name in names]
    command = [sys.executable, "-c", WATCHED, "plan", *files, "--dry-run", "--json", *overrides]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    objects = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(x["world_size"], len(x["dry_run"])) for x in objects] == [(32, 1), (32, 4)]
    for name, found in zip(names, objects):
        check(plan_run(load_config(f"configs/{name}.yaml", overrides)), found["dry_run"])
    _, peak, unit = done.stderr.splitlines()[-1].split()
    assert unit == "kB"
    assert int(peak) <= 2 << 20


@pytest.mark.parametrize("implementation", ["fused", "forward_chunked", "online", "online_dense"])
def test_the_other_losses_and_layouts(implementation, monkeypatch):
    """A tied head on a stage of its own, replicas, a sequence split over ranks; and the last rank, with the padding."""
    monkeypatch.chdir(ROOT)
    overrides = ["--hardware.gpus_per_node", "8", "--parallel.tensor", "2", "--parallel.pipeline", "2"]
    overrides += ["--data.sequence_length", "4096", "--loss.chunk_tokens", "2048"]
    overrides += ["--loss.implementation", implementation]
    overrides += ["--parallel.sequence_parallel", str(implementation in ("fused", "online"))]
    run = plan_run(load_config("configs/llama31_8b_to_3b_8k_fused.yaml", overrides))
    check(run, [vars(counted) for counted in dry_run(run, [0, 4, 7])])


def test_ranks_outside_the_world_are_refused(monkeypatch):
    monkeypatch.chdir(ROOT)
    run = plan_run(load_config("configs/gpt_oss_20b_32k_one_node.yaml"))
    with pytest.raises(ValueError, match=r"ranks \[8\] are not in a world of 8"):
        dry_run(run, [8])
