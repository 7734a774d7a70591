"""A writer killed at any moment leaves a cache that a second run completes to the same bytes."""

import random
import signal
import subprocess
import sys
import time

import pytest

from megatron_kd.cache import CacheWriter, TeacherCache, verify
from tests.cache.killed_writer import STEPS_PER_OBJECT
from tests.cache.targets import files, fill, manifest, table

M = manifest()
METADATA, PER_BLOCK = 16, 9  # objects
STEPS = STEPS_PER_OBJECT * (METADATA + PER_BLOCK * M.blocks)


def start(folder, rank, ranks, kill_at=-1):
    command = [sys.executable, "-m", "tests.cache.killed_writer", str(folder), str(rank), str(ranks), str(kill_at)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def finish(process):
    """Its exit status and the blocks it computed."""
    output, _ = process.communicate(timeout=60)
    return process.returncode, [int(line) for line in output.split()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    fill(CacheWriter.create(folder, M, table(M)))
    return files(folder)


def check_resume(folder, undisturbed):
    """Whatever was committed is good already; the rest, and only it, is computed again."""
    before = {name: data for name, data in files(folder).items() if name.startswith("commit/c.")}
    writer = CacheWriter.open_or_create(folder, M, table(M))
    missing = writer.missing_blocks()
    assert missing == [index for index in range(M.blocks) if f"commit/c.{index}" not in before]
    cache = TeacherCache.open(folder)
    for index in set(range(M.blocks)) - set(missing):
        cache.read_block(index)
    fill(writer)
    assert {name: data for name, data in files(folder).items() if not name.endswith(".partial")} == undisturbed
    assert verify(folder).ok


# First object, middle of the metadata, just before and after the group's zarr.json, inside block 1, its commit word.
BLOCK_1 = STEPS_PER_OBJECT * (METADATA + PER_BLOCK)
CHOSEN = [1, 33, 63, 64, BLOCK_1 + 2 * STEPS_PER_OBJECT + 2, BLOCK_1 + PER_BLOCK * STEPS_PER_OBJECT - 2]


@pytest.mark.parametrize("step", CHOSEN)
def test_kill_at_chosen_steps(tmp_path, undisturbed, step):
    assert finish(start(tmp_path, 0, 1, step))[0] == -signal.SIGKILL
    check_resume(tmp_path, undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("step", sorted(set(range(3, STEPS, 5)) - set(CHOSEN)))
def test_kill_at_many_steps(tmp_path, undisturbed, step):
    assert finish(start(tmp_path, 0, 1, step))[0] == -signal.SIGKILL
    check_resume(tmp_path, undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(20))
def test_kill_one_of_two_writers_at_a_random_moment(tmp_path, undisturbed, seed):
    """The other goes on undisturbed."""
    writers = [start(tmp_path, rank, 2) for rank in range(2)]
    time.sleep(random.Random(seed).uniform(0.1, 1.5))
    writers[seed % 2].kill()
    assert finish(writers[1 - seed % 2])[0] == 0
    writers[seed % 2].wait()
    check_resume(tmp_path, undisturbed)
