"""The launchers, run as a user runs them, on a tiny teacher: caching, training, stopping, resuming, exporting."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_kd.cache import TeacherCache
from megatron_kd.loss import KDObjective, TeacherTopK, reference
from tests.data.texts import write_jsonl
from tests.distributed import run_script
from tests.teacher.models import save_llama

ROOT = Path(__file__).parents[2]
CONFIG = """
run_dir: {folder}/run
teacher: {{model: {folder}/teacher, micro_batch: 2}}
data: {{source: {folder}/text.jsonl, sequence_length: 32, held_out: 0.2}}
cache: {{k: 16, block: 4}}
student: {{keep_layers: [1, 0]}}
loss: {{ce_weight: 0.1, chunk_tokens: 20}}
optimizer: {{lr: 1.0e-2, warmup_steps: 2}}
train: {{steps: 6, global_batch: 4, micro_batch: 1, precision: fp32}}
"""
COMMAND = Path(sys.executable).with_name("megatron-kd")


def run(script, *arguments, ranks=1, config, check=True, **overrides):
    """One of the project's commands; `overrides` become --section.key arguments, with __ for the dot."""
    done = run_script(ROOT / script, *arguments, *settings_of(config, overrides), ranks=ranks, timeout=900)
    assert not check or done.returncode == 0, done.stderr
    return done


def start(script, ranks, config, **overrides):
    """The same under torchrun, without waiting, in a process group of its own."""
    torchrun = [str(COMMAND.with_name("torchrun")), "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.Popen(
        [*torchrun, script, *settings_of(config, overrides)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def settings_of(config, overrides):
    return ["--config", str(config), *(f"--{key.replace('__', '.')}={value}" for key, value in overrides.items())]


def losses(run_dir, stage="distill"):
    records = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record for record in records if record["stage"] == stage}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A configuration whose teacher is cached already, on the held-out samples too."""
    folder = tmp_path_factory.mktemp("job")
    save_llama(folder / "teacher")
    write_jsonl(folder / "text.jsonl", 40)
    (folder / "run.yaml").write_text(CONFIG.format(folder=folder))
    for split, name in (("train", "teacher"), ("held_out", "held_out")):
        url = folder / "run" / f"{name}.zarr"
        run("launch/cache_teacher.py", config=folder / "run.yaml", cache__split=split, cache__url=url)
    return folder / "run.yaml"


def test_a_stopped_and_resumed_run_equals_an_undisturbed_one_whatever_the_ranks(config):
    """fp32; another number of ranks sums gradients in another order, which six Adam steps turn into 1e-5 at most."""
    folder = config.parent
    undisturbed = run("launch/distill.py", ranks=2, config=config)
    assert undisturbed.stdout.strip() == f"{folder}/run/checkpoints/step_00000006"
    for ranks, last in ((1, 3), (2, 6)):
        run("launch/distill.py", ranks=ranks, config=config, train__stop_after=last, run_dir=folder / "stopped",
            cache__url=folder / "run/teacher.zarr", train__checkpoint_async=True,
            train__checkpoint_interval=2, train__checkpoints_kept=2)  # fmt: skip
    left = sorted(path.name for path in (folder / "stopped/checkpoints").iterdir())
    assert left == ["step_00000004", "step_00000006"]  # those of steps 2 and 3 are gone, and none is half-written
    whole, parts = losses(folder / "run"), losses(folder / "stopped")
    assert sorted(whole) == sorted(parts) == list(range(1, 7))
    for step, record in whole.items():
        for name in ("loss", "kd", "ce", "tail", "support", "gradient_norm", "lr"):
            assert parts[step][name] == pytest.approx(record[name], rel=1e-4, abs=1e-6), (step, name)
    assert whole[6]["loss"] < whole[1]["loss"] - 0.1

    again = run("launch/distill.py", config=config)
    assert "nothing to train" in again.stderr


@pytest.mark.full
def test_a_model_split_over_ranks_trains_as_one_that_is_whole(config, tmp_path):
    """Two tensor-parallel ranks in each of two pipeline stages: the loss and the gradients are sums in another order.

    Only the last stage's first rank reads targets.
    """
    settings = {
        "cache__url": config.parent / "run/teacher.zarr",
        "train__stop_after": 3,
        "train__evaluate_interval": 2,
        "train__evaluate_cache": config.parent / "run/held_out.zarr",
        "loss__backward": "in_forward",
    }
    run("launch/distill.py", config=config, run_dir=tmp_path / "whole", **settings)
    layout = {"parallel__tensor": 2, "parallel__pipeline": 2}
    run("launch/distill.py", ranks=4, config=config, run_dir=tmp_path / "split", **layout, **settings)
    whole, split = losses(tmp_path / "whole"), losses(tmp_path / "split")
    assert sorted(whole) == sorted(split) == [1, 2, 3]
    for step, record in whole.items():
        for name in ("loss", "kd", "ce", "tail", "support", "gradient_norm"):
            assert split[step][name] == pytest.approx(record[name], rel=1e-4, abs=1e-6), (step, name)
    held_out, split_held_out = (losses(tmp_path / name, "held_out") for name in ("whole", "split"))
    assert sorted(held_out) == sorted(split_held_out) == [2, 3]
    for step, record in held_out.items():
        for name in ("loss", "kd", "ce", "tail", "support"):
            assert split_held_out[step][name] == pytest.approx(record[name], rel=1e-4, abs=1e-6), (step, name)
    students = []
    for name, sizes in (("whole", {}), ("split", layout)):
        run(COMMAND, "export", config=config, run_dir=tmp_path / name, **sizes)
        students.append(AutoModelForCausalLM.from_pretrained(tmp_path / name / "student_hf", dtype=torch.float32))
    wanted = held_out_loss(students[0], config.parent / "run/held_out.zarr")
    assert held_out[3]["loss"] == pytest.approx(wanted, rel=1e-4)  # two implementations of the model in fp32
    for x, y in zip(*(student.parameters() for student in students)):
        # Adam's first steps are ±lr where a gradient is nearly 0: three of them, each either way.
        assert (x - y).abs().max() <= 6e-2
        assert (x - y).norm() <= 1e-2 * x.norm()


def held_out_loss(student, url):
    """The loss's definition on transformers' logits, document by document, a mean over tokens."""
    cache = TeacherCache.open(url)
    read = cache.read(range(cache.manifest.samples))
    total = tokens = 0
    for row in range(len(read.tokens)):
        for document in np.unique(read.segment[row]):
            here = np.flatnonzero(read.segment[row] == document)
            with torch.no_grad():
                logits = student(torch.from_numpy(read.tokens[row, here])[None].long()).logits[0].double()
            teacher = (torch.from_numpy(x[row, here]) for x in (read.ids, read.logprobs, read.tail_logprob))
            mask = torch.from_numpy(read.loss_mask[row, here]).double()
            total += reference(
                logits,
                torch.eye(logits.shape[1], dtype=torch.float64),
                TeacherTopK(*teacher),
                objective=KDObjective(ce_weight=0.1),
                labels=torch.from_numpy(read.tokens[row, here + 1]).long(),
                loss_mask=mask,
            ).sum()
            tokens += mask.sum()
    return float(total / tokens)


def test_the_students_export_and_evaluation(config):
    folder = config.parent
    run("launch/distill.py", config=config)
    assert run(COMMAND, "export", config=config).stdout.strip() == f"{folder}/run/student_hf"
    model = AutoModelForCausalLM.from_pretrained(folder / "run/student_hf", dtype=torch.float32)
    assert model.config.num_hidden_layers == 2
    table = run(COMMAND, "evaluate", config=config).stdout
    evaluation = json.loads((folder / "run/evaluation.json").read_text())
    assert list(evaluation) == ["teacher", "student_before", "student_after"]
    assert all(name in table for name in evaluation)
    assert evaluation["teacher"]["kl"] == 0
    assert evaluation["teacher"]["top1_agreement"] == 1
    assert evaluation["student_after"]["kl"] < evaluation["student_before"]["kl"]
    run(COMMAND, "report", config=config)
    assert (folder / "run/loss.png").stat().st_size > 1000


def test_the_way_without_megatron_trains_the_same_student(config):
    """transformers and Megatron-Core compute the same model: the first step's losses agree to fp32 rounding."""
    folder = config.parent
    settings = {"cache__url": folder / "run/teacher.zarr", "train__steps": 6}
    done = run("launch/distill_hf.py", config=config, run_dir=folder / "hf", **settings)
    run("launch/distill.py", config=config, run_dir=folder / "megatron", train__stop_after=1, **settings)
    with_megatron, without = losses(folder / "megatron"), losses(folder / "hf")
    for name in ("loss", "kd", "ce", "tail", "support", "gradient_norm"):
        assert without[1][name] == pytest.approx(with_megatron[1][name], rel=1e-4), name
    assert without[6]["loss"] < without[1]["loss"] - 0.1
    student = AutoModelForCausalLM.from_pretrained(done.stdout.strip(), dtype=torch.float32)
    assert student.config.num_hidden_layers == 2


@pytest.mark.full
def test_a_failing_rank_ends_the_job(config, tmp_path):
    """Both ranks meet the same error; it is said once, and torchrun's exit code is not 0."""
    url = config.parent / "run/teacher.zarr"
    job = start("launch/distill.py", ranks=2, config=config, run_dir=tmp_path, loss__k=17, cache__url=url)
    _, errors = job.communicate(timeout=900)
    assert job.returncode != 0
    assert errors.count("error: ") == 1


@pytest.mark.full
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_all_ranks_and_leaves_checkpoints_to_resume_from(config, tmp_path, how):
    """Ctrl-C reaches every process of the terminal's group; schedulers signal the launcher; a rank is killed alone.

    A scheduler's signal leaves time for the step and a checkpoint. What was trained after the last checkpoint is
    trained again, to the same losses.
    """
    settings = {
        "run_dir": tmp_path,
        "cache__url": config.parent / "run/teacher.zarr",
        "train__steps": 400,
        "train__checkpoint_interval": 2,
    }
    job = start("launch/distill.py", ranks=2, config=config, **settings)
    deadline = time.monotonic() + 400
    while len(list((tmp_path / "checkpoints").glob("step_*[0-9]"))) < 2:
        assert time.monotonic() < deadline
        assert job.poll() is None
        time.sleep(0.2)
    helpers = psutil.Process(job.pid).children(recursive=True)
    if how == signal.SIGINT:
        os.killpg(job.pid, how)
    elif how == signal.SIGTERM:
        job.send_signal(how)
    else:
        next(helper for helper in helpers if "launch/distill.py" in _command(helper)).kill()
    job.communicate(timeout=60)
    assert job.returncode != 0
    assert not psutil.wait_procs(helpers, timeout=60)[1], "nothing stays behind"
    assert not [process for process in psutil.process_iter() if str(tmp_path) in _command(process)]
    before = losses(tmp_path)
    reached = max(before)
    assert reached < 400
    if how == signal.SIGTERM:
        assert (tmp_path / f"checkpoints/step_{reached:08d}").exists()
    if how != signal.SIGKILL:  # the way back is the same for all
        return
    resumed = run("launch/distill.py", ranks=2, config=config, train__stop_after=reached + 3, **settings)
    assert "resumed from" in resumed.stderr
    after = losses(tmp_path)
    assert max(after) == reached + 3
    for step, record in before.items():
        assert after[step]["loss"] == pytest.approx(record["loss"], rel=1e-4), step


def _command(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
