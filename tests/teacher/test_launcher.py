"""`launch/cache_teacher.py` as a user runs it: stopped and killed, failing, and from the command line."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_kd.config_io import load_config
from megatron_kd.teacher.run import cache_teacher
from tests.teacher.models import write_run

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "cache_teacher.py"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A configuration whose run has some twenty blocks: seconds of work after the third, in which it is stopped."""
    folder = tmp_path_factory.mktemp("launcher")
    write_run(folder, documents=60, micro_batch=1, data={"sequence_length": 64}, cache={"k": 20, "block": 3})
    return folder


def config_of(teacher, url):
    return load_config(teacher / "run.yaml", ["--cache.url", url])


@pytest.fixture(scope="module")
def undisturbed(teacher):
    """The cache that one process makes without being disturbed."""
    return cache_teacher(config_of(teacher, str(teacher / "undisturbed.zarr")))


def start(teacher, *overrides, launcher=(), **options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *launcher, str(SCRIPT), "--config", str(teacher / "run.yaml"), *overrides]
    options = {"preexec_fn": _as_from_a_terminal} | options
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def _as_from_a_terminal():
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs, and what they start, ignore it


def committed(url) -> int:
    return len(list((Path(url) / "commit").glob("c*"))) if Path(url).exists() else 0


def stop(process, url, blocks, how):
    """Sends a signal once `blocks` are committed; returns (exit code, stderr)."""
    deadline = time.monotonic() + 400
    while committed(url) < blocks and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(how)
    _, errors = process.communicate(timeout=90)
    return process.returncode, errors


def objects(url):
    """Bytes of every object but the group's own metadata, which holds the time it was made."""
    root = Path(url)
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file() and p.parent != root}


def test_a_killed_run_is_completed_to_the_same_bytes(teacher, undisturbed):
    url = str(teacher / "killed.zarr")
    assert stop(start(teacher, "--cache.url", url), url, 3, signal.SIGKILL)[0] == -signal.SIGKILL
    assert 3 <= committed(url) < committed(undisturbed)
    cache_teacher(config_of(teacher, url))
    assert objects(url) == objects(undisturbed)


@pytest.mark.full
def test_an_interrupted_run_says_so_and_computes_only_the_rest(teacher, undisturbed):
    url = str(teacher / "interrupted.zarr")
    code, errors = stop(start(teacher, "--cache.url", url), url, 3, signal.SIGINT)
    assert code == 130
    assert "interrupted" in errors
    assert "Traceback" not in errors
    before = committed(url)
    assert 3 <= before < committed(undisturbed)
    process = start(teacher, "--cache.url", url)
    output, errors = process.communicate(timeout=400)
    assert (process.returncode, output) == (0, url + "\n")
    assert int(errors.split("missing blocks")[1].split()[0]) == committed(undisturbed) - before
    assert objects(url) == objects(undisturbed)


def test_bad_input_is_one_message(teacher):
    process = start(teacher, "--cache.kk", "3")
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (2, "")
    assert "did you mean 'k'?" in errors
    assert len(errors.splitlines()) == 1


@pytest.mark.full
@pytest.mark.parametrize("launcher", [(), ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")])
def test_a_store_that_takes_no_more_ends_all_ranks(teacher, undisturbed, launcher):
    """Files may grow to 3 KB and no more, as on a full disk: the first cause is on screen, within seconds."""
    url = str(teacher / f"full{len(launcher)}.zarr")
    limit = 3000
    began = time.monotonic()
    process = start(
        teacher, "--cache.url", url, "--cache.block", "24", "--run_dir", str(teacher / f"full{len(launcher)}"),
        "--data.samples_dir", str(teacher / "run" / "samples"), launcher=launcher,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )  # fmt: skip
    _, errors = process.communicate(timeout=400)
    assert process.returncode != 0
    assert "File too large" in errors
    assert time.monotonic() - began < 110  # imports included, on busy cores
