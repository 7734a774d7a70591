"""Many processes and threads at once: creating, writing, reading, forking."""

import multiprocessing
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from megatron_kd.cache import CacheError, CacheWriter, Prefetcher, TeacherCache, verify
from tests.cache.targets import files, fill, manifest, table

M = manifest()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("cache") / "c"
    fill(CacheWriter.create(path, M, table(M)))
    return path


@pytest.mark.parametrize("number", [3, pytest.param(8, marks=pytest.mark.full)])
def test_many_ranks_start_at_once(tmp_path, folder, number):
    """On an empty place: none reads half a cache, each writes its own blocks, the bytes are those of one writer."""
    command = [sys.executable, "-m", "tests.cache.killed_writer", str(tmp_path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([*command, str(rank), str(number), "-1"], **pipes) for rank in range(number)]
    for rank in ranks:
        _, errors = rank.communicate(timeout=120)
        assert rank.returncode == 0, errors
    assert files(tmp_path) == files(folder)


def test_writers_with_other_tables_are_found_out(tmp_path):
    """Two runs whose tables differ cannot both believe to have created the cache."""
    CacheWriter.create(tmp_path, M, table(M))
    other = tmp_path / "other"
    CacheWriter.create(other, M, np.arange(M.vocab_size))
    (tmp_path / "id_by_rank" / "c.0").write_bytes((other / "id_by_rank" / "c.0").read_bytes())
    with pytest.raises(CacheError, match=r"id_by_rank/c\.0.*not what the cache was made with"):
        CacheWriter.resume(tmp_path, M)


def same(batch, want):
    for name in vars(want):
        np.testing.assert_array_equal(getattr(batch, name), getattr(want, name), err_msg=name)


def test_threads_share_a_cache(folder):
    """Twelve threads and the cache's own, forty batches."""
    cache, order = TeacherCache.open(folder, threads=3), np.random.default_rng(0).integers(0, 10, (40, 5))
    with ThreadPoolExecutor(12) as pool:
        for samples, batch in zip(order, pool.map(cache.read, order)):
            same(batch, TeacherCache.open(folder).read(samples))


def _read_in_child(cache, samples, queue):
    queue.put(cache.read(samples).ids)


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_worker_processes(folder, method):
    """A cache opened and used before the fork, or pickled to a fresh process."""
    cache = TeacherCache.open(folder, threads=2)
    want = cache.read([7, 1]).ids
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    with Prefetcher(cache, ([n] for n in range(10))):  # a thread at work during the fork
        worker = context.Process(target=_read_in_child, args=(cache, [7, 1], queue))
        worker.start()
    np.testing.assert_array_equal(queue.get(timeout=60), want)
    worker.join()


def test_a_cache_can_be_pickled(folder):
    same(pickle.loads(pickle.dumps(TeacherCache.open(folder))).read([4]), TeacherCache.open(folder).read([4]))


def test_prefetcher_keeps_the_order(folder):
    cache, lists = TeacherCache.open(folder), [[3, 1], [9], [], [0, 0, 5]]
    with Prefetcher(cache, lists, k=2, depth=1) as batches:
        for batch, samples in zip(batches, lists, strict=True):
            same(batch, cache.read(samples, k=2))


def test_prefetcher_raises_where_the_error_is(folder):
    """The batches before the bad one arrive; the error arrives in the consumer."""
    batches = iter(Prefetcher(TeacherCache.open(folder), [[0], [99], [1]]))
    next(batches)
    with pytest.raises(IndexError, match="sample 99"):
        next(batches)
    assert list(batches) == []


def test_prefetcher_closes_at_any_time(folder):
    """Endless batches, none read, or one."""
    for read in (0, 1):
        prefetcher = Prefetcher(TeacherCache.open(folder), iter(lambda: [0], None))
        for _ in range(read):
            next(iter(prefetcher))
        prefetcher.close()
        assert list(prefetcher) == []


def test_reading_while_another_process_writes(tmp_path):
    """A committed block can be read at once; the others say that they are not there."""
    writer = CacheWriter.create(tmp_path, M, table(M))
    cache = TeacherCache.open(tmp_path)
    for index in range(M.blocks):
        with pytest.raises(CacheError, match=f"block {index} was never committed"):
            cache.read([index * M.block])
        fill(writer, [index])
        cache.read([index * M.block])
    assert verify(tmp_path).ok
