"""Creating, resuming, refusing; equal inputs give equal bytes."""

import numpy as np
import pytest
import zarr

from megatron_kd.cache import CacheError, CacheWriter, RankTable, TeacherCache, frequency_table, rank_table
from tests.cache.targets import files, fill, manifest, table, targets


def test_same_bytes_for_any_order_of_writing(tmp_path):
    """Three writers that take turns, backwards, against one that writes in order."""
    m = manifest()
    fill(CacheWriter.create(tmp_path / "a", m, table(m)))
    CacheWriter.create(tmp_path / "b", m, table(m))
    for index in reversed(range(m.blocks)):
        fill(CacheWriter.resume(tmp_path / "b", m), [index])
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_same_bytes_whatever_pipeline_zarr_is_set_to(tmp_path):
    """A user may have chosen another codec pipeline for reading; here one that does not exist."""
    m = manifest()
    fill(CacheWriter.create(tmp_path / "a", m, table(m)))
    with zarr.config.set({"codec_pipeline.path": "no.such.Pipeline", "array.write_empty_chunks": False}):
        fill(CacheWriter.create(tmp_path / "b", m, table(m)))
        TeacherCache.open(tmp_path / "b").read([3])
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_number_of_objects(tmp_path):
    """Nine arrays with one object a block; three tables of one chunk; metadata of these twelve and of the group."""
    m = manifest()
    fill(CacheWriter.create(tmp_path, m, table(m)))
    assert len(files(tmp_path)) == 9 * m.blocks + 3 + 12 + 1


def test_resume_computes_only_what_is_missing(tmp_path):
    m = manifest()
    fill(CacheWriter.create(tmp_path, m, table(m)), [1])
    writer = CacheWriter.resume(tmp_path, m)
    assert writer.missing_blocks() == [0, 2]
    fill(writer)
    assert writer.missing_blocks() == []


def test_resume_refuses_other_targets(tmp_path):
    m = manifest()
    CacheWriter.create(tmp_path, m, table(m))
    CacheWriter.resume(tmp_path, manifest(created="another day"))
    with pytest.raises(CacheError, match="teacher_revision: 'r1' here, 'r0' there"):
        CacheWriter.resume(tmp_path, manifest(teacher_revision="r1"))
    with pytest.raises(CacheError, match="already holds a cache"):
        CacheWriter.create(tmp_path, m, table(m))


def test_half_created_cache_is_created_again(tmp_path):
    """The group's zarr.json is written last: without it there is no cache."""
    m = manifest()
    CacheWriter.create(tmp_path, m, table(m))
    (tmp_path / "zarr.json").unlink()
    (tmp_path / "tokens" / "zarr.json").write_text("{")
    fill(CacheWriter.open_or_create(tmp_path, m, table(m)))
    TeacherCache.open(tmp_path).read(range(10))


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("tokens", (1, 2), 500, r"tokens lie in \[0, 500\), but not at \(1, 2\) .*, where it is 500"),
        ("ids", (0, 0, 0), 500, "ids lie in"),
        ("ids", (0, 0, slice(2)), 7, "ids are unique"),
        ("logprobs", (0, 1, 0), np.nan, "logprobs are at most 0"),
        ("logprobs", (0, 1), -0.5, "a sum of at most 1"),
        ("tail_logprob", (0, 1), np.nan, "tail_logprob"),
        ("logz", (0, 1, 0), np.inf, "logz is finite"),
        ("label_logprob", (0, 1), np.nan, "label_logprob is at most 0"),
        ("loss_mask", (0, 1), 2, "loss_mask is 0 or 1"),
        ("segment", (0, 1), -1, "segment is at least 0"),
    ],
)
def test_numbers_of_no_teacher_are_refused(tmp_path, name, place, value, message):
    m = manifest()
    writer = CacheWriter.create(tmp_path, m, table(m))
    bad = targets(m, m.rows(0))
    bad[name][place] = value
    with pytest.raises(ValueError, match=f"block 0: .*{message}"):
        writer.write_block(0, bad)
    assert writer.missing_blocks() == [0, 1, 2]


def test_targets_shifted_by_one_are_refused(tmp_path):
    """Where the label is an entry, its log-prob must be the label's; where it is not, no entry may lie below it."""
    m = manifest()
    writer = CacheWriter.create(tmp_path, m, table(m))
    for shift in (np.roll(targets(m, m.rows(0))["label_logprob"], 1, axis=1), np.float32(-1e-3)):
        bad = targets(m, m.rows(0))
        bad["label_logprob"][...] = shift
        with pytest.raises(ValueError, match="label_logprob is that of the label's entry, or below all entries"):
            writer.write_block(0, bad)


def test_arrays_of_another_shape_are_refused(tmp_path):
    m = manifest()
    writer = CacheWriter.create(tmp_path, m, table(m))
    good = targets(m, m.rows(0))
    with pytest.raises(ValueError, match=r"block 0, ids has shape \(4, 16, 7\); needed is \(4, 16, 8\)"):
        writer.write_block(0, good | {"ids": good["ids"][..., 1:]})
    with pytest.raises(ValueError, match="needed are exactly"):
        writer.write_block(0, {"tokens": good["tokens"]})
    with pytest.raises(ValueError, match="not a permutation"):
        CacheWriter.create(tmp_path / "b", m, np.zeros(500, np.int32))
    with pytest.raises(IndexError, match="block 3 does not exist"):
        writer.write_block(3, good)


def test_frequency_table():
    """By falling count, ties by lowest id; absent entries (−1) do not count."""
    assert frequency_table(np.array([[2, 2, 4], [4, 1, -1]]), 6).tolist() == [2, 4, 1, 0, 3, 5]


def test_rank_table():
    """After token 1 the id 5 was listed twice or more, as were 2 and 0; 3 once. Ties go to the more frequent in all."""
    tokens = np.array([[1, 1, 1, 4, 0]])
    ids = np.array([[[5, 2, 0], [5, 2, 3], [5, 0, -1], [2, 4, 1]]])
    found = rank_table(tokens, ids, 6)
    assert found.id_by_rank.tolist() == [2, 5, 0, 1, 3, 4]
    assert found.context_start.tolist() == [0, 0, 3, 3, 3, 3, 3]
    assert found.context_ids.tolist() == [5, 2, 0, -1]


@pytest.mark.parametrize(
    "change",
    [
        {"context_start": [0, 0, 3, 3, 3, 3, 2]},
        {"context_start": [0, 4, 3, 3, 3, 3, 3]},
        {"context_start": [0, 3]},
        {"context_ids": [5, 2, 6, -1]},
        {"context_ids": [5, 2, 0, 0]},
    ],
)
def test_lists_of_no_table_are_refused(change):
    good = {"id_by_rank": [2, 5, 0, 1, 3, 4], "context_start": [0, 0, 3, 3, 3, 3, 3], "context_ids": [5, 2, 0, -1]}
    RankTable(**{name: np.array(values) for name, values in good.items()}).check(6)
    with pytest.raises(ValueError, match="no lists of ids"):
        RankTable(**{name: np.array(values) for name, values in (good | change).items()}).check(6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 501}, "manifest.k is 501 but the vocabulary has 500"),
        ({"block": 0}, "manifest.block is 0"),
        ({"temperatures": (2.0, 1.0)}, "start with 1.0"),
        ({"entries": "sampled"}, "manifest.draws is 0"),
        ({"format": 2}, "format 2 but this version reads format 1"),
    ],
)
def test_manifest_refuses_nonsense(change, message):
    with pytest.raises((ValueError, CacheError), match=message):
        manifest(**change)
