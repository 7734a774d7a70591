"""Every valid token exactly once, and nothing learnt across documents."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_kd.data.packing import TokenStream, pack

PAD = 0


def stream(*lengths: int, learnt: bool = True) -> TokenStream:
    """Documents whose tokens are all different, so that a token tells where it came from. learnt: all or two thirds."""
    total = sum(lengths)
    starts = np.cumsum([0, *lengths[:-1]]).astype(np.int64)
    marks = ((np.arange(total) % 3 != 1) | learnt).astype(np.uint8)
    return TokenStream(np.arange(1, total + 1, dtype=np.int32), starts, marks)


def test_two_documents_of_7_and_5():
    """Samples of 6 positions: the boundary's token is a label of one sample and an input of the next."""
    packed = pack(stream(7, 5), 6, 0, 2, PAD)
    assert packed.tokens.tolist() == [[1, 2, 3, 4, 5, 6, 7], [7, 8, 9, 10, 11, 12, PAD]]
    assert packed.segment.tolist() == [[0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1]]
    assert packed.loss_mask.tolist() == [[1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0]]


def test_padding_is_a_document_that_costs_nothing():
    packed = pack(stream(3), 4, 0, 1, PAD)
    assert packed.tokens.tolist() == [[1, 2, 3, PAD, PAD]]
    assert packed.segment.tolist() == [[0, 0, 0, 1]]
    assert packed.loss_mask.tolist() == [[1, 1, 0, 0]]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    size=st.integers(1, 17),
    learnt=st.booleans(),
)
def test_every_valid_token_is_a_label_exactly_once(lengths, size, learnt):
    """Against a loop over documents: the multiset of learnt (input, label) pairs, and documents kept apart."""
    source = stream(*lengths, learnt=learnt)
    count = source.sample_count(size)
    packed = pack(source, size, 0, count, PAD)
    wanted = []
    for begin, length in zip(source.starts, lengths):
        for position in range(begin, begin + length - 1):
            if source.learnt[position + 1]:
                wanted.append((source.tokens[position], source.tokens[position + 1]))
    mask = packed.loss_mask.astype(bool)
    found = list(zip(packed.tokens[:, :-1][mask], packed.tokens[:, 1:][mask]))
    assert sorted(found) == sorted(wanted)
    # Equal numbers within a sample exactly where the tokens are of one document.
    document_of = np.zeros(sum(lengths) + 1, int)
    document_of[source.starts + 1] = 1
    document_of = np.cumsum(document_of)
    for tokens, segment in zip(packed.tokens[:, :-1], packed.segment):
        documents = np.where(tokens == PAD, -1, document_of[tokens])
        assert segment[0] == 0
        assert ((np.diff(segment) != 0) == (np.diff(documents) != 0)).all()
        assert (np.diff(segment) >= 0).all()


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6), size=st.integers(1, 9), step=st.integers(1, 4))
def test_packing_in_parts_gives_the_same(lengths, size, step):
    source = stream(*lengths)
    count = source.sample_count(size)
    whole = pack(source, size, 0, count, PAD)
    for first in range(0, count, step):
        last = min(first + step, count)
        for part, full in zip(pack(source, size, first, last, PAD), whole):
            assert np.array_equal(part, full[first:last])


def test_a_stream_of_one_token_has_no_sample():
    assert stream(1).sample_count(8) == 0


@pytest.mark.parametrize(("first", "last", "tokens"), [(0, 1, [1, 2, 3]), (1, 3, [4, 5, 6, 7, 8, 9]), (1, 1, [])])
def test_a_range_of_documents_is_a_stream(first, last, tokens):
    part = stream(3, 4, 2).documents(first, last)
    assert part.tokens.tolist() == tokens
    assert part.starts.tolist() == {(0, 1): [0], (1, 3): [0, 4], (1, 1): []}[first, last]
