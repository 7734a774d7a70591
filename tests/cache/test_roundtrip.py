"""What goes in comes out: against plain zarr and NumPy, which know nothing of this package."""

from pathlib import Path

import numpy as np
import pytest
import zarr

from megatron_kd.cache import CacheError, CacheWriter, TeacherCache, rank_table
from tests.cache.targets import fill, manifest, table, targets


def make(folder, m):
    writer = CacheWriter.create(folder, m, table(m))
    fill(writer)
    return TeacherCache.open(folder)


def plain_entries(folder):
    """ids and log-probs, by the very code that docs/cache-format.md gives."""
    text = (Path(__file__).parents[2] / "docs" / "cache-format.md").read_text(encoding="utf-8")
    code = text.split("```python\n")[1].split("```")[0]
    found = {}
    exec(code.replace("teacher.zarr", str(folder)).replace("slice(0, 8)", "slice(None)"), found)
    return found["ids"], found["logprobs"]


@pytest.mark.parametrize("vocab_size", [500, 61438, 61439, 65535, 65536, 131072, 151936, 201088, 262144])
@pytest.mark.filterwarnings("error")
def test_plain_zarr_reads_it(tmp_path, vocab_size):
    """A few lines of NumPy beyond zarr. fp16 rounds once: relative error 2⁻¹¹; ids and all else exact."""
    m = manifest(vocab_size=vocab_size)
    make(tmp_path, m)
    group, want = zarr.open_group(tmp_path, mode="r"), targets(m, range(m.samples))

    ids, logprobs = plain_entries(tmp_path)

    np.testing.assert_allclose(logprobs, want["logprobs"], rtol=2**-11)
    for row, other, lp in zip(ids.reshape(-1, m.k), want["ids"].reshape(-1, m.k), want["logprobs"].reshape(-1, m.k)):
        # Entries that fp16 makes equal are ordered by id.
        np.testing.assert_array_equal(row, other[np.lexsort((other, -lp.astype(np.float16)))])
    for name in ("tokens", "logz", "label_logprob", "loss_mask", "segment"):
        np.testing.assert_array_equal(group[name][:], want[name])
    np.testing.assert_array_equal(group["tail_logprob"][:], want["tail_logprob"].astype(np.float16))
    assert (group["commit"][:] != 0).all()


@pytest.mark.parametrize("vocab_size", [500, 201088])
def test_reader_agrees_with_plain_zarr(tmp_path, vocab_size):
    """Samples in the order asked, backwards and repeated; the last block is shorter than the others."""
    m = manifest(vocab_size=vocab_size)
    cache, group, order = make(tmp_path, m), zarr.open_group(tmp_path, mode="r"), [9, 3, 3, 0, 8, 4]
    batch = cache.read(order)
    np.testing.assert_array_equal(batch.ids, plain_entries(tmp_path)[0][order])
    np.testing.assert_array_equal(batch.tokens, group["tokens"][:][order])
    np.testing.assert_array_equal(batch.segment, group["segment"][:][order])
    for index in range(m.blocks):
        block, rows = cache.read_block(index), cache.read(range(*m.rows(index).indices(m.samples)))
        for name in vars(block):
            np.testing.assert_array_equal(getattr(block, name), getattr(rows, name), err_msg=name)


def test_ids_at_the_edges_of_their_types(tmp_path):
    """Largest ids of common vocabularies, and 65535, the mark of an absent rank where ranks have 16 bits."""
    edge = [65534, 65535, 65536, 131072, 151935, 201087, 262143]
    m = manifest(vocab_size=262144, k=len(edge), samples=1)
    want = targets(m, m.rows(0))
    want["ids"][:] = edge
    want["tokens"][:] = 3
    up = np.arange(m.vocab_size)
    tables = {"up": up, "down": up[::-1], "contexts": rank_table(want["tokens"], want["ids"], m.vocab_size)}
    for name, lists in tables.items():
        folder = tmp_path / name
        CacheWriter.create(folder, m, lists).write_block(0, want)
        np.testing.assert_array_equal(np.sort(TeacherCache.open(folder).read([0]).ids), want["ids"])


def test_ties_go_to_the_lowest_id_and_absent_entries_come_last(tmp_path):
    """Given in any order, entries come back by falling log-prob; −inf is a probability of 0, not an absent entry."""
    m = manifest(samples=1, seq_length=1, k=5)
    want = targets(m, m.rows(0)) | {
        "ids": np.array([[[7, -1, 499, 3, 0]]]),
        "logprobs": np.array([[[-2.0, np.nan, -np.inf, -2.0, -1.9]]], np.float32),
    }
    want["tokens"][:], want["label_logprob"][:] = 7, -2.0
    CacheWriter.create(tmp_path, m, table(m)).write_block(0, want)
    batch = TeacherCache.open(tmp_path).read([0])
    assert batch.ids.tolist() == [[[0, 3, 7, 499, -1]]]
    np.testing.assert_array_equal(batch.logprobs[0, 0], np.float32([np.float16(-1.9), -2, -2, -np.inf, -np.inf]))


def test_the_text_can_be_read_without_its_targets(tmp_path):
    cache = make(tmp_path, manifest())
    whole, text = cache.read([5, 0, 5]), cache.read_tokens([5, 0, 5])
    for name in ("tokens", "loss_mask", "segment"):
        np.testing.assert_array_equal(getattr(text, name), getattr(whole, name))
    with pytest.raises(IndexError, match="sample 99 does not exist"):
        cache.read_tokens([99])


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("temperature", [1.0, 2.0, 0.5])
def test_fewer_entries_and_other_temperatures(tmp_path, k, temperature):
    """Against softmax(logits/τ) in float64. Log-probs: one fp16 rounding over τ (|logprob| < 32: 2⁻⁷ at most), and the
    fp32 of logz. Tail: stored in fp16 at τ = 1; elsewhere 1 − Σp, absolute error Σ p·2⁻⁷ ≤ 2⁻⁷."""
    m = manifest(temperatures=(1.0, 2.0, 0.5))
    batch = make(tmp_path, m).read([5, 1], k=k, temperature=temperature)
    assert batch.ids.shape == batch.logprobs.shape == (2, m.seq_length, k)
    for row, n in enumerate([5, 1]):
        full = targets(manifest(temperatures=m.temperatures, k=m.vocab_size), range(n, n + 1))
        logits = full["logprobs"][0].astype(np.float64) + full["logz"][0, :, :1]
        want = logits / temperature - full["logz"][0, :, [m.temperatures.index(temperature)]].T
        np.testing.assert_allclose(batch.logprobs[row], want[:, :k], atol=2**-7 / temperature)
        np.testing.assert_allclose(
            np.exp(batch.tail_logprob[row]), np.exp(want[:, k:]).sum(-1), atol=2**-7 if temperature != 1 else 2**-9
        )


@pytest.mark.parametrize("samples", [0, 1, 3, 4, 5])
def test_any_number_of_samples(tmp_path, samples):
    """None, one, a partial block, exactly one block, one more."""
    m = manifest(samples=samples)
    cache = make(tmp_path, m)
    batch = cache.read(range(samples))
    assert batch.tokens.shape == (samples, 17)
    if samples:
        np.testing.assert_array_equal(batch.tokens, targets(m, range(samples))["tokens"])
    assert cache.read([]).ids.shape == (0, 16, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"samples": [10]}, "sample 10 does not exist: the cache has 10 samples"),
        ({"samples": [-1]}, "sample -1"),
        ({"samples": [0], "k": 9}, "k is 9 but the cache stores 8"),
        ({"samples": [0], "k": 0}, "k is 0"),
        ({"samples": [0], "temperature": 3.0}, r"temperature 3.0 is not stored: the cache has \(1.0,\)"),
    ],
)
def test_what_is_not_there_is_refused(tmp_path, arguments, message):
    cache = make(tmp_path, manifest())
    with pytest.raises((ValueError, IndexError), match=message):
        cache.read(**arguments)


def test_no_cache(tmp_path):
    with pytest.raises(CacheError, match="holds no teacher cache"):
        TeacherCache.open(tmp_path / "nothing")
