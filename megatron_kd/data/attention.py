"""Documents packed into one sample must not attend to one another: one function, two forms.

Where the attention kernel understands packed sequences (Transformer Engine), documents become the sequences of a
`thd` batch, the whole micro-batch laid end to end; elsewhere a block-diagonal causal mask says the same. Rotary
positions are relative, so the mask form needs no restart; the packed form restarts by itself.

Context parallelism cuts every sequence into pieces and gives each rank two of them (`context_positions`).

Shapes: b samples, S positions, T = b·S.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams


@dataclass(frozen=True)
class DocumentAttention:
    """What a GPTModel's forward takes to keep documents apart: exactly one of `mask` and `packed` is set."""

    bounds: Tensor  # on the host: along the token tensors' second dimension, where each sequence begins, and the end
    mask: Tensor | None = None  # [b, 1, S, S] bool, true where attention is forbidden
    packed: PackedSeqParams | None = None  # for token tensors of shape [1, T]


def document_attention(segment: Tensor, *, packed: bool, device: torch.device | None = None) -> DocumentAttention:
    """Keeps the documents of each sample apart.

    Args:
        segment: [b, S] document number of each position, contiguous runs; on the host, for the kernel is told how
            long the longest document is, and reading that from a device would wait for it.
        packed: PackedSeqParams rather than a mask. The mask takes S² bytes a sample: for short samples only.
        device: where the result is wanted; None: where `segment` is.
    """
    if not packed:
        segment = segment if device is None else segment.to(device)
        size = segment.shape[1]
        future = torch.ones(size, size, dtype=torch.bool, device=segment.device).triu(1)
        foreign = segment[:, :, None] != segment[:, None, :]
        return DocumentAttention(torch.tensor([0, size]), mask=(foreign | future)[:, None])
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds = document_bounds(segment)
    longest = int((bounds[1:] - bounds[:-1]).max())
    cumulative = bounds.to(device=device, dtype=torch.int32)
    return DocumentAttention(
        bounds,
        packed=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cumulative,
            cu_seqlens_kv=cumulative,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
    )


def document_starts(segment: Tensor) -> Tensor:
    """[b, S] bool: where a document begins; a sample's first position always does."""
    starts = torch.ones_like(segment, dtype=torch.bool)
    starts[:, 1:] = segment[:, 1:] != segment[:, :-1]
    return starts


def document_bounds(segment: Tensor) -> Tensor:
    """[documents + 1]: where each document begins in the samples laid end to end, and where the last one ends."""
    starts = document_starts(segment).flatten().nonzero().flatten()
    return torch.cat([starts, torch.tensor([segment.numel()], device=segment.device)])


def context_positions(bounds: Tensor, rank: int, ranks: int) -> Tensor:
    """The positions of one context-parallel rank: of every sequence, pieces `rank` and 2·ranks − 1 − rank.

    Causal attention does about the same work for each rank so: Megatron-Core's and Transformer Engine's order.

    Args:
        bounds: [sequences + 1] where each sequence begins, and where the last ends; on the host.
        rank, ranks: this rank's place in the context-parallel group.

    Raises:
        ValueError: a sequence that does not divide into 2·ranks pieces.
    """
    lengths = bounds[1:] - bounds[:-1]
    pieces = 2 * ranks
    if bool((lengths % pieces).any()):
        odd = int(lengths[lengths % pieces != 0][0])
        raise ValueError(
            f"a document of {odd} positions does not divide into 2 · parallel.context = {pieces} pieces: prepare the "
            f"samples with data.document_multiple {pieces}"
        )
    order = torch.arange(int(bounds[-1]))
    begin = torch.repeat_interleave(bounds[:-1], lengths)
    piece = (order - begin) * pieces // torch.repeat_interleave(lengths, lengths)
    return order[(piece == rank) | (piece == pieces - 1 - rank)]
