"""The helper that other tests rely on: results in rank order, the cause of a failure, nothing left behind."""

import multiprocessing
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed import RankFailed, run_ranks, run_script


def add_ranks(rank, world_size, offset):
    x = torch.tensor([float(rank + offset)])
    dist.all_reduce(x)
    return rank, x.item()


def fail_on_one(rank, world_size):
    if rank == 1:
        raise ValueError("the cause")
    dist.all_reduce(torch.zeros(1))


def hang_on_one(rank, world_size):
    if rank == 1:
        time.sleep(60)
    dist.all_reduce(torch.zeros(1))


def test_results_come_in_rank_order():
    assert run_ranks(add_ranks, 2, 10) == [(0, 21.0), (1, 21.0)]


def test_first_failure_is_raised_and_nothing_is_left():
    with pytest.raises(RankFailed, match=r"(?s)rank 1 failed.*the cause"):
        run_ranks(fail_on_one, 2)
    assert not multiprocessing.active_children()


def test_timeout_ends_all_ranks():
    with pytest.raises(RankFailed, match="out of time"):
        run_ranks(hang_on_one, 2, timeout=6)
    assert not multiprocessing.active_children()


SCRIPT = """
import sys
import time
import torch.distributed as dist

dist.init_process_group("gloo")
print(sys.argv[1:], file=sys.stderr if dist.get_rank() else sys.stdout, flush=True)
dist.barrier()
if sys.argv[1] == "fail":
    time.sleep(60) if dist.get_rank() == 0 else sys.exit(3)
"""


@pytest.mark.parametrize(("argument", "code"), [("pass", 0), ("fail", 3)])
def test_a_script_runs_as_under_torchrun(tmp_path, argument, code):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = run_script(script, argument, ranks=2)
    assert (done.returncode, done.stdout, done.stderr) == (code, f"['{argument}']\n", f"['{argument}']\n")
    assert not multiprocessing.active_children()


def test_a_script_that_raises_shows_its_traceback(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("raise ValueError('the cause')")
    done = run_script(script)
    assert done.returncode == 1
    assert "ValueError: the cause" in done.stderr
