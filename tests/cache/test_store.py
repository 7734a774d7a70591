"""A cache behind an S3 API on loopback; the writer when its store fails; how many files are open."""

import contextlib
import errno
import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import google_crc32c
import numpy as np
import pytest

from megatron_kd.cache import BlockStore, CacheError, CacheWriter, TeacherCache, merge, verify
from megatron_kd.cache.encode import commit_word
from megatron_kd.cache.layout import block_keys
from megatron_kd.cache.schema import block_arrays
from megatron_kd.cache.store import HeldStore, LocalStore, open_store
from tests.cache.targets import files, fill, manifest, table, targets

M = manifest()


@pytest.fixture(scope="module")
def s3():
    """URL of a bucket and the options that lead to it."""
    pytest.importorskip("s3fs")
    server_module = pytest.importorskip("moto.server")
    boto3 = pytest.importorskip("boto3")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    keys = {"aws_access_key_id": "k", "aws_secret_access_key": "s", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=endpoint, **keys).create_bucket(Bucket="bucket")
    options = {"key": "k", "secret": "s", "client_kwargs": {"region_name": "us-east-1"}, "endpoint_url": endpoint}
    yield "s3://bucket/caches", options
    server.stop()


def test_s3(s3, tmp_path):
    """The same bytes as on disk; read whole or in ranges; damaged and missing objects are found."""
    folder, options = s3
    url = f"{folder}/c.zarr"
    fill(CacheWriter.create(tmp_path, M, table(M)))
    writer = CacheWriter.open_or_create(url, M, table(M), options)
    fill(writer, [2, 0])
    assert CacheWriter.resume(url, M, options).missing_blocks() == [1]
    fill(CacheWriter.resume(url, M, options))
    store = open_store(url, options)
    assert {name: store.read(name) for name in files(tmp_path)} == files(tmp_path)

    want = TeacherCache.open(tmp_path).read([9, 2, 5])
    for hold in (None, 0):
        got = TeacherCache.open(url, options, hold_bytes=hold, threads=2).read([9, 2, 5])
        for name in vars(want):
            np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)

    store.write("logz/c.1.0.0", b"")
    store.delete("tokens/c.2.0")
    assert list(verify(url, options).damaged) == [1, 2]
    fill(CacheWriter.resume(url, M, options), [1, 2])
    assert verify(url, options).ok


@pytest.mark.full
def test_a_server_that_drops_connections(s3):
    """It hangs up on every other request at first, which is made good for, then on every one, which is reported."""
    folder, options = s3
    with dropping_proxy(options["endpoint_url"]) as (endpoint, every):
        through = options | {"endpoint_url": endpoint}
        writer = CacheWriter.create(f"{folder}/d.zarr", M, table(M), through)
        every[0] = 2
        fill(writer, [0])
        every[0] = 1
        begin = time.monotonic()
        with pytest.raises(OSError, match=r"s3://bucket/caches/d\.zarr"):
            fill(writer, [1])
        # It ends by itself: in two seconds on a machine of its own, later on a busy one.
        assert time.monotonic() - begin < 90
    resumed = CacheWriter.resume(f"{folder}/d.zarr", M, options)
    assert resumed.missing_blocks() == [1, 2]
    fill(resumed)
    assert verify(f"{folder}/d.zarr", options).ok


@contextmanager
def dropping_proxy(endpoint):
    """Forwards to `endpoint`; hangs up on every n-th connection. Yields its own address and [n], 0 for never."""
    host, port = endpoint.removeprefix("http://").split(":")
    listener, every, count = socket.create_server(("127.0.0.1", 0)), [0], 0

    def pump(source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def serve():
        nonlocal count
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                count += 1
                if every[0] and count % every[0] == 0:
                    client.close()
                    continue
                server = socket.create_connection((host, int(port)))
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}", every
    listener.close()


def test_any_fsspec_url(tmp_path):
    """fsspec's in-memory file system, merged onto disk."""
    fill(CacheWriter.create("memory://here/c.zarr", M, table(M)))
    assert merge(tmp_path / "m", ["memory://here/c.zarr"]).missing == ()
    assert verify(tmp_path / "m").ok


def test_held_store_stays_within_its_limit(tmp_path):
    """Least recently used objects go first; what is asked for is there whatever the limit."""
    inner = LocalStore(str(tmp_path))
    for name in "abc":
        inner.write(f"x/{name}", name.encode() * 10)
    store = HeldStore(inner, 20)
    assert store.read_ranges([("x/a", 0, 2), ("x/b", 8, 12), ("x/none", 0, 1)]) == [b"aa", b"bb", None]
    store.read_ranges([("x/a", 0, 1)])
    store.read_ranges([("x/c", 0, 1)])
    assert set(store._held) == {"x/a", "x/c"}
    inner.delete("x/a")
    assert store.read_ranges([("x/a", 0, 1), ("x/b", 0, 1)]) == [b"a", b"b"]


def test_options_need_a_url(tmp_path):
    with pytest.raises(ValueError, match="local folder"):
        open_store(tmp_path, {"key": "k"})


_FULL_DISK = """
mount -t tmpfs -o size={size}k tmpfs {folder} || exit 77
{python} -m tests.cache.killed_writer {folder}/c.zarr 0 1 -1
echo status=$?
mount -o remount,size=10m {folder}
{python} -m tests.cache.killed_writer {folder}/c.zarr 0 1 -1
echo status=$?
cp -r {folder}/c.zarr {copy}
"""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs a mount of its own")
def test_full_disk(tmp_path):
    """A tmpfs too small: the writer ends with the cause within seconds; with more room it completes, same bytes."""
    fill(CacheWriter.create(tmp_path / "whole", M, table(M)))
    folder = tmp_path / "small"
    folder.mkdir()
    # Files take whole pages of 4 KiB: the metadata and the first block, not the others.
    pages = len(files(tmp_path / "whole")) - 12
    script = _FULL_DISK.format(size=4 * pages, folder=folder, python=sys.executable, copy=tmp_path / "copy")
    begin = time.monotonic()
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("may not mount")
    first, second = (line for line in done.stdout.splitlines() if line.startswith("status"))
    assert first != "status=0"
    assert second == "status=0"
    assert "No space left on device" in done.stderr
    assert time.monotonic() - begin < 30  # two starts of Python included
    assert files(tmp_path / "copy") == files(tmp_path / "whole")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO])
def test_failing_writes(tmp_path, monkeypatch, code):
    """The error of the system is raised as it is; the block stays missing; nothing partial is left."""
    writer = CacheWriter.create(tmp_path, M, table(M))
    replace, calls = os.replace, []

    def fail(source, target):
        calls.append(target)
        if len(calls) == 4:
            raise OSError(code, os.strerror(code), target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match=os.strerror(code)) as caught:
        fill(writer, [0])
    assert caught.value.errno == code
    monkeypatch.undo()
    assert writer.missing_blocks() == [0, 1, 2]
    assert not list(tmp_path.rglob("*.partial"))
    fill(writer)
    assert verify(tmp_path).ok


def test_read_only_folder(tmp_path):
    """Nothing can be created under what is not a folder; what can only be read can be read."""
    fill(CacheWriter.create(tmp_path / "c", M, table(M)))
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="Not a directory"):
        CacheWriter.create(tmp_path / "file" / "c", M, table(M))
    for path in (tmp_path / "c").rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    assert verify(tmp_path / "c").ok
    with pytest.raises(CacheError, match="already holds"):
        CacheWriter.create(tmp_path / "c", M, table(M))
    for path in (tmp_path / "c").rglob("*"):
        path.chmod(0o755)


_MANY_BLOCKS = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from megatron_kd.cache import TeacherCache, CacheWriter, Prefetcher
cache = TeacherCache.open(sys.argv[1], threads=4)
blocks = cache.manifest.blocks
assert CacheWriter.resume(sys.argv[1], cache.manifest).missing_blocks() == []
with Prefetcher(cache, ([n, blocks - 1 - n] for n in range(blocks))) as batches:
    for n, batch in enumerate(batches):
        assert (batch.tokens[0] == batch.tokens[1]).all()
print(n + 1, blocks)
"""


@pytest.mark.parametrize("blocks", [100, pytest.param(10_000, marks=pytest.mark.full)])
def test_many_blocks_with_few_open_files(tmp_path, blocks):
    """One sample a block, 64 file descriptors in all. The blocks copy the first, but for their commit words."""
    m = manifest(samples=blocks, block=1, seq_length=2, k=2, codecs="fast")
    CacheWriter.create(tmp_path, m, table(m)).write_block(0, targets(m, range(1)))
    stored = BlockStore(open_store(tmp_path)).block(0)
    for index in range(1, blocks):
        for name, key in block_keys(0).items():
            shutil.copy(tmp_path / key, tmp_path / block_keys(index)[name])
        word = commit_word(index, stored, block_arrays(m)).to_bytes(8, "little")
        checksum = google_crc32c.value(word).to_bytes(4, "little")
        (tmp_path / block_keys(index)["commit"]).write_bytes(word + checksum)
    done = subprocess.run([sys.executable, "-c", _MANY_BLOCKS, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout.split() == [str(blocks), str(blocks)], done.stderr
