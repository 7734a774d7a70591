"""Ids to ranks and back, entries to steps and back: on whatever Hypothesis thinks of."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_kd.cache import frequency_table, rank_table
from megatron_kd.cache.decode import decode_logprobs, join_planes
from megatron_kd.cache.encode import sort_entries
from megatron_kd.cache.ranks import RankCoder, RankScratch, RankTable


def decoded(coder, tokens, planes):
    """Ids of every sample, by the reader's arithmetic."""
    n, _, s, k = planes.shape
    out, scratch, rank = np.empty((n, s, k), np.int32), RankScratch(s, k), np.empty((s, k), coder.dtype)
    for row in range(n):
        join_planes(planes[row], rank)
        coder.decode(tokens[row], rank, out[row], scratch)
    return out


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab_size=st.sampled_from([1, 2, 50, 61_438, 61_439, 65_536, 262_144]),
    n=st.integers(1, 3),
    s=st.integers(1, 5),
    k=st.integers(1, 6),
    contexts=st.booleans(),
)
def test_ranks_invert(seed, vocab_size, n, s, k, contexts):
    """Any tokens, any distinct ids, any table: of the targets themselves, of others, or without contexts."""
    rng = np.random.default_rng(seed)
    k = min(k, vocab_size)
    ids = np.stack([rng.choice(vocab_size, k, replace=False) for _ in range(n * s)]).reshape(n, s, k).astype(np.int32)
    ids[rng.random(ids.shape) < 0.2] = -1
    tokens = rng.integers(0, min(vocab_size, 3), (n, s + 1))
    if contexts:
        table = rank_table(tokens[:1], ids[:1], vocab_size, minimum=int(rng.integers(1, 3)))
    else:
        table = RankTable.without_contexts(frequency_table(ids, vocab_size)[:: rng.choice([-1, 1])])
    table.check(vocab_size)
    coder = RankCoder(table)
    np.testing.assert_array_equal(decoded(coder, tokens[:, :-1], coder.encode(tokens[:, :-1], ids)), ids)


def test_a_list_at_its_limit():
    """One token followed by 5,000 ids, each twice: 4,096 are kept, and the rest still decodes."""
    ids = np.arange(10_000, dtype=np.int32).reshape(1, 100, 100) // 2
    tokens = np.zeros((1, 101), np.int32)
    table = rank_table(tokens, ids, 61_438)
    assert table.context_ids.size - 1 == 4096
    rng = np.random.default_rng(0)
    some = np.stack([rng.choice(61_438, 100, replace=False) for _ in range(100)])[None].astype(np.int32)
    coder = RankCoder(table)
    np.testing.assert_array_equal(decoded(coder, tokens[:, :-1], coder.encode(tokens[:, :-1], some)), some)


@settings(deadline=None)
@given(
    logprobs=st.lists(st.floats(-1e5, 0, width=32) | st.just(-np.inf), min_size=1, max_size=12),
    bits=st.sampled_from([10, 6]),
)
def test_log_probs_are_rounded_once_more_than_float16(logprobs, bits):
    """Sorted, then rounded to float16's grid (bits = 10), exactly as NumPy rounds; six bits: relative 2⁻⁷ more.

    Beyond float16's range a log-prob becomes −inf, which is a probability of 0."""
    given_ones = np.array([logprobs], np.float32)
    ids, magnitude = sort_entries(np.arange(given_ones.size)[None], given_ones, bits)
    out = np.empty(given_ones.shape, np.float32)
    decode_logprobs(np.diff(magnitude, axis=-1, prepend=np.uint16(0)), out)
    with np.errstate(over="ignore"):
        want = given_ones[:, ids[0]].astype(np.float16).astype(np.float32)
    if bits == 10:
        np.testing.assert_array_equal(out, want)
    else:
        finite = np.isfinite(out)
        np.testing.assert_allclose(out[finite], want[finite], rtol=2**-7, atol=2**-20)
        assert (want[~finite] < -65_000).all()
    assert (out[:, 1:] <= out[:, :-1]).all()
