"""Presets and kinds of entries: compact log-probs, sampled targets, contexts and absent entries."""

import numpy as np
import pytest

from megatron_kd.cache import CacheWriter, TeacherCache, merge_draws
from tests.cache.targets import fill, manifest, table, targets


def test_fast_and_lossless_decode_alike(tmp_path):
    """The presets differ in zstd levels alone."""
    for name in ("fast", "lossless"):
        m = manifest(codecs=name)
        fill(CacheWriter.create(tmp_path / name, m, table(m)))
    one, other = (TeacherCache.open(tmp_path / name).read(range(10)) for name in ("fast", "lossless"))
    for name in vars(one):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_compact_rounds_log_probs(tmp_path):
    """To fp16's ten bits of mantissa, then to six: relative error 2⁻¹¹ + 2⁻⁷. Nothing else is rounded; ties by id."""
    m = manifest(codecs="compact")
    fill(CacheWriter.create(tmp_path, m, table(m)))
    got, want = TeacherCache.open(tmp_path).read(range(10)), targets(m, range(10))
    np.testing.assert_allclose(got.logprobs, want["logprobs"], rtol=2**-7 + 2**-11)
    np.testing.assert_array_equal(got.tail_logprob, want["tail_logprob"].astype(np.float16))
    np.testing.assert_array_equal(np.sort(got.ids), np.sort(want["ids"]))
    tied = got.logprobs[..., 1:] == got.logprobs[..., :-1]
    assert tied.any()
    assert (np.diff(got.ids) > 0)[tied].all()


def test_unknown_preset(tmp_path):
    with pytest.raises(ValueError, match=r"manifest\.codecs is 'tiny'; it must be one of lossless, fast, compact"):
        CacheWriter.create(tmp_path, manifest(codecs="tiny"), table(manifest()))


def test_merged_draws():
    """Counts of each id over the number of draws."""
    ids, logprobs = merge_draws(np.array([[5, 2, 5, 5], [1, 2, 3, 4], [7, 7, 7, 7]]))
    assert [dict(zip(i[i >= 0].tolist(), np.exp(w[i >= 0]).round(6).tolist())) for i, w in zip(ids, logprobs)] == [
        {2: 0.25, 5: 0.75},
        {1: 0.25, 2: 0.25, 3: 0.25, 4: 0.25},
        {7: 1.0},
    ]
    assert np.isneginf(logprobs[ids < 0]).all()


def test_sampled_entries(tmp_path):
    """Weights come back as counts over draws, to fp16's 2⁻¹¹; their mass is 1 and the tail has none.

    Their mean over 4,000 draws is the teacher's probability to within five standard errors."""
    draws, v = 4000, 6
    m = manifest(entries="sampled", draws=draws, k=v, vocab_size=v, samples=1, seq_length=2, block=1)
    p = np.array([0.5, 0.3, 0.1, 0.06, 0.04, 0.0])
    ids, logprobs = merge_draws(np.random.default_rng(0).choice(v, (1, 2, draws), p=p))
    order = np.argsort(-logprobs, axis=-1)[..., :v]
    want = targets(manifest(vocab_size=v, k=v, samples=1, seq_length=2), range(1)) | {
        "ids": np.take_along_axis(ids, order, -1),
        "logprobs": np.take_along_axis(logprobs, order, -1),
        "tail_logprob": np.full((1, 2), -np.inf, np.float32),
    }
    CacheWriter.create(tmp_path, m, np.arange(v)).write_block(0, want)
    cache = TeacherCache.open(tmp_path)
    batch = cache.read([0])
    weights = np.exp(batch.logprobs)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=2**-10)
    assert np.isneginf(batch.tail_logprob).all()
    assert (batch.ids[..., -1] == -1).all()  # the impossible id was never drawn
    for i, w in zip(batch.ids[0], weights[0]):
        np.testing.assert_allclose(w[:5], p[i[:5]], atol=5 * np.sqrt(0.25 / draws))
    with pytest.raises(ValueError, match="k is 3"):
        cache.read([0], k=3)


def test_tokens_never_seen_and_rows_without_entries(tmp_path):
    """The table knows the first block only; a whole sample may have no entry at all."""
    m = manifest(samples=8)
    first, second = targets(m, range(4)), targets(m, range(4, 8), seed=1)
    second["ids"][1] = -1
    second["ids"][2, :, 3:] = -1
    writer = CacheWriter.create(tmp_path, m, table(m))
    writer.write_block(0, first)
    writer.write_block(1, second)
    batch = TeacherCache.open(tmp_path).read(range(4, 8))
    np.testing.assert_array_equal(np.sort(batch.ids), np.sort(second["ids"]))
    assert np.isneginf(batch.logprobs[1]).all()
    assert np.isneginf(batch.logprobs[2, :, 3:]).all()
    TeacherCache.open(tmp_path).read_block(1)


def test_all_of_the_vocabulary(tmp_path):
    """K = V: the tail is empty."""
    m = manifest(vocab_size=20, k=20)
    fill(CacheWriter.create(tmp_path, m, table(m)))
    batch = TeacherCache.open(tmp_path).read([0])
    assert np.isneginf(batch.tail_logprob).all()
    np.testing.assert_allclose(np.exp(batch.logprobs).sum(-1), 1, atol=20 * 2**-12)
