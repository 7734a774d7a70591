"""Missing, torn and altered objects: found by verify, never read as data, repaired by a resume."""

import json
import os

import numpy as np
import pytest

from megatron_kd.cache import CacheError, CacheWriter, TeacherCache, verify
from tests.cache.targets import files, fill, manifest, table

ARRAYS = (
    "tokens", "topk_rank", "topk_logprob_step", "tail_logprob", "logz",
    "label_logprob", "loss_mask", "segment", "commit",
)  # fmt: skip
M = manifest()


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache") / "c"
    fill(CacheWriter.create(folder, M, table(M)))
    return folder, files(folder)


@pytest.fixture
def cache(intact):
    """A folder that is put back as it was after the test."""
    folder, before = intact
    yield folder
    for name, data in before.items():
        (folder / name).write_bytes(data)


def path(folder, array, block):
    return next((folder / array).glob(f"c.{block}*"))


def read_all(folder):
    cache = TeacherCache.open(folder)
    for index in range(M.blocks):
        cache.read_block(index)


@pytest.mark.parametrize("array", ARRAYS)
@pytest.mark.parametrize("damage", ["delete", "empty", "truncate", "extend", "flip"])
def test_damage_is_named_and_resumed(cache, intact, array, damage):
    """Whole-block reading, reading of the samples touched, and verify; the message names block and array."""
    file = path(cache, array, 1)
    data = file.read_bytes()
    if damage == "delete":
        file.unlink()
    else:
        middle = len(data) - 3
        file.write_bytes(
            {
                "empty": b"",
                "truncate": data[:-1],
                "extend": data + b"\0",
                "flip": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
            }[damage]
        )
    opened = TeacherCache.open(cache)
    with pytest.raises(CacheError, match=rf"block 1.* \(?array {array}"):
        opened.read_block(1)
    # A sample's own bytes are intact below an added tail, and at temperature 1 no normaliser is read.
    touched = array == "commit" or (damage != "extend" and array != "logz")
    if touched:
        with pytest.raises(CacheError, match=rf"block 1.* \(?array {array}"):
            opened.read([0, 4, 5, 6, 7])
    opened.read([0, 1, 2, 3, 8, 9])

    report = verify(cache)
    assert not report.ok
    assert [*report.missing, *report.damaged] == [1]

    writer = CacheWriter.resume(cache, M)
    fill(writer, sorted({*writer.missing_blocks(), *report.missing, *report.damaged}))
    assert files(cache) == intact[1]
    assert verify(cache).ok


def test_block_in_another_place(cache):
    """All objects of block 0 copied over block 1: intact in themselves, but not block 1."""
    for array in ARRAYS:
        path(cache, array, 1).write_bytes(path(cache, array, 0).read_bytes())
    assert list(verify(cache).damaged) == [1]


@pytest.mark.parametrize("name", ["zarr.json", "tokens/zarr.json", "commit/zarr.json", "id_by_rank/zarr.json"])
def test_altered_metadata(cache, name):
    """Every value in every zarr.json counts; layout of the JSON does not."""
    document = json.loads((cache / name).read_text())
    (cache / name).write_text(json.dumps(document, indent=7))
    read_all(cache)
    (cache / name).write_text(json.dumps(document | {"extra": 1}))
    with pytest.raises(CacheError, match="was altered"):
        TeacherCache.open(cache)
    assert "was altered" in str(verify(cache))
    (cache / name).write_text("{")
    with pytest.raises(CacheError, match="is not JSON"):
        TeacherCache.open(cache)


@pytest.mark.parametrize("name", ["tokens/zarr.json", "id_by_rank/c.0"])
def test_missing_metadata(cache, name):
    (cache / name).unlink()
    with pytest.raises(CacheError, match=f"{name} is missing"):
        TeacherCache.open(cache)


def sweep(folder, offsets_of):
    """Flip one bit at each offset of each object; names and offsets that went unseen."""
    unseen = []
    for name, data in files(folder).items():
        for offset in offsets_of(data):
            flipped = bytearray(data)
            flipped[offset] ^= 1 << (offset % 8)
            if name.endswith("zarr.json"):
                try:
                    if json.loads(bytes(flipped)) == json.loads(data):
                        continue
                except ValueError:
                    pass
            (folder / name).write_bytes(flipped)
            if verify(folder, threads=1).ok:
                unseen.append((name, offset))
        (folder / name).write_bytes(data)
    return unseen


def test_flipped_bits(cache):
    """Eight offsets in every object: head, index, chunks, checksum, tail."""
    assert sweep(cache, lambda data: sorted({int(i) for i in np.linspace(0, len(data) - 1, 8)})) == []


@pytest.mark.full
def test_every_flipped_byte(tmp_path):
    """Every byte of every object of a tiny cache."""
    m = manifest(samples=2, block=1, seq_length=4, k=3, vocab_size=20)
    fill(CacheWriter.create(tmp_path, m, table(m)))
    assert sweep(tmp_path, lambda data: range(len(data))) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_unreadable(cache):
    path(cache, "tokens", 1).chmod(0)
    with pytest.raises(PermissionError):
        read_all(cache)
