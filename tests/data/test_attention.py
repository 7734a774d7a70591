"""Packed documents do not see each other, in both forms."""

import pytest
import torch

from megatron_kd.data.attention import context_positions, document_attention, document_bounds

SEGMENT = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]])


def test_the_mask_allows_exactly_the_past_of_the_same_document():
    mask = document_attention(SEGMENT, packed=False).mask
    assert mask.shape == (2, 1, 6, 6)
    for sample in range(2):
        for query in range(6):
            for key in range(6):
                allowed = key <= query and SEGMENT[sample, key] == SEGMENT[sample, query]
                assert bool(mask[sample, 0, query, key]) != bool(allowed)


def test_the_packed_form_has_the_same_documents_end_to_end():
    packed = document_attention(SEGMENT, packed=True).packed
    # Lengths 3, 2, 1 of the first sample and 1, 5 of the second: a sample's end ends a document though both
    # neighbours may carry equal numbers.
    assert packed.cu_seqlens_q.tolist() == packed.cu_seqlens_kv.tolist() == [0, 3, 5, 6, 7, 12]
    assert packed.cu_seqlens_q.dtype == torch.int32
    assert packed.max_seqlen_q == 5
    assert packed.qkv_format == "thd"


def test_a_document_running_across_samples_is_cut_there():
    packed = document_attention(torch.zeros(2, 4, dtype=torch.int32), packed=True).packed
    assert packed.cu_seqlens_q.tolist() == [0, 4, 8]


def test_context_parallel_ranks_take_the_first_and_the_last_pieces():
    """S = 8 on two ranks: 0, 1, 6, 7 and 2, 3, 4, 5."""
    bounds = torch.tensor([0, 8])
    assert context_positions(bounds, 0, 2).tolist() == [0, 1, 6, 7]
    assert context_positions(bounds, 1, 2).tolist() == [2, 3, 4, 5]
    assert context_positions(bounds, 0, 1).tolist() == list(range(8))


def test_context_parallel_ranks_cut_every_document_by_itself():
    """Documents of 4 and 8 positions, the latter in a second sample: all ranks together have every position once."""
    segment = torch.tensor([[0] * 4 + [1] * 4, [0] * 8])
    bounds = document_bounds(segment)
    assert bounds.tolist() == [0, 4, 8, 16]
    assert context_positions(bounds, 0, 2).tolist() == [0, 3, 4, 7, 8, 9, 14, 15]
    assert context_positions(bounds, 1, 2).tolist() == [1, 2, 5, 6, 10, 11, 12, 13]


def test_a_document_that_cannot_be_cut_is_refused():
    with pytest.raises(ValueError, match=r"a document of 6 positions .* data.document_multiple 4"):
        context_positions(torch.tensor([0, 8, 14]), 0, 2)
