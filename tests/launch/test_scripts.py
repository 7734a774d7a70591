"""The launch scripts: what they would run, told by arguments or by Slurm; and four nodes of them that lose a worker."""

import os
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_kd.config_io import load_config
from megatron_kd.console import read_steps
from megatron_kd.teacher.run import cache_teacher
from tests.data.texts import write_jsonl
from tests.teacher.models import save_llama
from tests.train.test_run import CONFIG, run

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
CLUSTER = ("SLURM", "MASTER", "NCCL", "TORCH", "GLOO", "PYTORCH", "CUDA")


def environment(**changes):
    """This process's without anything that a scheduler may have put there."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(CLUSTER)}
    return {**own, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **changes}


def dry_run(script, *arguments, **changes):
    """(exit code, the commands as lists of words, stderr)."""
    command = ["bash", str(ROOT / "launch" / script), "--dry-run", "--config", str(QUICKSTART), *arguments]
    done = subprocess.run(command, env=environment(**changes), capture_output=True, text=True, timeout=60)
    return done.returncode, [shlex.split(line) for line in done.stdout.splitlines()], done.stderr


def after(words, option):
    return words[words.index(option) + 1]


def test_slurm_and_arguments_say_the_same():
    slurm = {
        "SLURM_NNODES": "4", "SLURM_NODEID": "2", "SLURM_JOB_ID": "77", "SLURM_GPUS_ON_NODE": "4",
        "SLURM_JOB_NODELIST": "h200-[003-005,009],login",
    }  # fmt: skip
    code, (examine, start), quantities = dry_run("four_nodes.sh", "--train.steps", "3", **slurm)
    assert code == 0
    same = dry_run("four_nodes.sh", "--node-rank", "2", "--master", "h200-003", "--gpus", "4", "--train.steps", "3",
                   SLURM_JOB_ID="77")  # fmt: skip
    assert same == (0, [examine, start], quantities)
    for words in (examine, start):
        assert after(words, "--nnodes") == "4"
        assert after(words, "--rdzv-conf") == "is_host=false"
        assert words[-4:] == ["--config", str(QUICKSTART), "--train.steps", "3"] or words is examine
    assert after(start, "--rdzv-endpoint") == "h200-003:29500"
    assert after(examine, "--rdzv-endpoint") == "h200-003:29501"
    assert (after(examine, "--nproc-per-node"), after(start, "--nproc-per-node")) == ("1", "4")
    assert (after(examine, "--gpus-per-node"), after(start, "--max-restarts")) == ("4", "3")
    assert after(start, "--role") == after(examine, "--job") == "distill"
    assert str(ROOT / "launch" / "distill.py") in start
    ranks = next(line for line in quantities.splitlines() if line.split()[0] == "ranks")
    assert ranks.split()[1:] == ["16", "4", "a", "node,", "on", "GPUs"]


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n7", "n7"), ("n7,n9", "n7"), ("n[07,09]", "n07"), ("a1,b[2-3]", "a1"), ("r[1-2]n[3-4].x", "r1n3.x")],
)
def test_the_first_of_slurms_nodes_is_the_master(nodes, first):
    _, (_, start), _ = dry_run("four_nodes.sh", SLURM_NODEID="0", SLURM_NNODES="4", SLURM_JOB_NODELIST=nodes)
    assert after(start, "--rdzv-endpoint") == f"{first}:29500"
    assert after(start, "--rdzv-conf") == "is_host=true"


def test_one_node_needs_to_be_told_nothing():
    code, (start,), quantities = dry_run(
        "one_node.sh", "--job", "cache_teacher", "--gpus", "0", "--no-preflight", "--cache.k=7", NCCL_IB_HCA="mlx5"
    )
    assert code == 0
    assert after(start, "--rdzv-endpoint") == "127.0.0.1:29500"
    assert after(start, "--nproc-per-node") == "1"
    assert start[-4:] == [str(ROOT / "launch" / "cache_teacher.py"), "--config", str(QUICKSTART), "--cache.k=7"]
    assert "NCCL_IB_HCA=mlx5" in quantities
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in quantities


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        (["--master", "h"], {}, "--node-rank is ''"),
        (["--master", "h", "--node-rank", "4"], {}, "a number from 0 to 3"),
        (["--node-rank", "1"], {}, "--master is missing"),
        (["--node-rank"], {}, "--node-rank: a value is missing"),
        (["--master", "h", "--node-rank", "1"], {"SLURM_NNODES": "2"}, "--nodes is 4, but Slurm gave 2"),
        (["--master", "h", "--node-rank", "1", "--job", "evaluate"], {}, "--job is evaluate"),
        (["--master", "h", "--node-rank", "1", "--gpus", "all"], {}, "--gpus is all"),
        (["--master", "h", "--node-rank", "1", "--config", "absent.yaml"], {}, "absent.yaml: no such file"),
    ],
)
def test_bad_input_is_one_message(arguments, changes, message):
    code, commands, errors = dry_run("four_nodes.sh", *arguments, **changes)
    assert (code, commands) == (2, [])
    assert message in errors
    assert len(errors.splitlines()) == 1


@pytest.mark.full
def test_four_nodes_lose_a_worker_rejoin_and_train_as_if_nothing_had_happened(tmp_path):
    """Four nodes on loopback, a rank each. The same four ranks sum in the same order: losses are equal, not close."""
    save_llama(tmp_path / "teacher")
    write_jsonl(tmp_path / "text.jsonl", 40)
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG.format(folder=tmp_path))
    cache_teacher(load_config(config))
    settings = {"train__steps": 20, "train__checkpoint_interval": 5}
    run("launch/distill.py", ranks=4, config=config, run_dir=tmp_path / "undisturbed",
        cache__url=tmp_path / "run/teacher.zarr", **settings)  # fmt: skip

    port = free_ports()
    logs = [(tmp_path / f"node_{node}.log").open("w+") for node in range(4)]
    nodes = [
        subprocess.Popen(
            ["bash", str(ROOT / "launch/four_nodes.sh"), "--master", "127.0.0.1", "--node-rank", str(node),
             "--port", str(port), "--gpus", "0", "--log-dir", str(tmp_path / "logs"), "--config", str(config),
             "--train.steps", "20", "--train.checkpoint_interval", "5"],
            env=environment(GLOO_SOCKET_IFNAME="lo"), stdout=logs[node], stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        for node in range(4)
    ]  # fmt: skip
    try:
        wait_for_step(7, tmp_path / "run/metrics.jsonl", nodes, logs)
        everything = [process for node in nodes for process in psutil.Process(node.pid).children(recursive=True)]
        rank_of_node_2 = next(p for p in psutil.Process(nodes[2].pid).children() if "distill.py" in p.cmdline()[2])
        rank_of_node_2.kill()
        everything += [psutil.Process(node.pid) for node in nodes]
        for node in nodes:
            node.wait(timeout=400)
    finally:
        for node in nodes:
            node.kill()  # and with it whatever it started
    output = [text(log) for log in logs]
    assert [node.returncode for node in nodes] == [0] * 4, "\n".join(output)
    assert not [process for process in everything if process.is_running()]

    assert any("16 of 17 blocks" in lines for lines in output), "the pre-flight: four blocks a node"
    disturbed, undisturbed = (read_steps(tmp_path / name / "metrics.jsonl") for name in ("run", "undisturbed"))
    assert sorted(disturbed) == sorted(undisturbed) == list(range(1, 21))
    for step, record in undisturbed.items():
        for name in ("loss", "kd", "ce", "tail", "support", "gradient_norm", "lr"):
            assert disturbed[step][name] == record[name], (step, name)
    assert sum(lines.count("resumed from") for lines in output) == 1
    assert list((tmp_path / "logs").glob("node_2/*/attempt_1/0/stderr.log"))


def free_ports():
    """A port that is free, as is the next one."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
                return port
            except (OSError, OverflowError):
                continue


def wait_for_step(step, metrics, nodes, logs):
    deadline = time.monotonic() + 400
    while max(read_steps(metrics), default=0) < step:
        assert time.monotonic() < deadline, text(logs[0])
        assert all(node.poll() is None for node in nodes), "\n".join(text(log) for log in logs)
        time.sleep(0.02)


def text(log):
    log.seek(0)
    return log.read()
