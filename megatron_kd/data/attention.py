"""Documents packed into one sample must not attend to one another: one function, two forms.

Where the attention kernel understands packed sequences (Transformer Engine), documents become the sequences of a
`thd` batch, the whole micro-batch laid end to end; elsewhere a block-diagonal causal mask says the same. Rotary
positions are relative, so the mask form needs no restart; the packed form restarts by itself.

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
    """What a GPTModel's forward takes to keep documents apart: exactly one of the two is set."""

    mask: Tensor | None = None  # [b, 1, S, S] bool, true where attention is forbidden
    packed: PackedSeqParams | None = None  # for token tensors of shape [1, T]


def document_attention(segment: Tensor, *, packed: bool) -> DocumentAttention:
    """Keeps the documents of each sample apart.

    Args:
        segment: [b, S] document number of each position, contiguous runs.
        packed: PackedSeqParams rather than a mask. The mask takes S² bytes a sample: for short samples only.
    """
    if not packed:
        size = segment.shape[1]
        future = torch.ones(size, size, dtype=torch.bool, device=segment.device).triu(1)
        foreign = segment[:, :, None] != segment[:, None, :]
        return DocumentAttention(mask=(foreign | future)[:, None])
    from megatron.core.packed_seq_params import PackedSeqParams

    starts = torch.ones_like(segment, dtype=torch.bool)  # a sample's first position always starts a document
    starts[:, 1:] = segment[:, 1:] != segment[:, :-1]
    bounds = torch.cat([starts.flatten().nonzero().flatten(), segment.new_tensor([segment.numel()]).long()])
    bounds = bounds.to(torch.int32)
    longest = int((bounds[1:] - bounds[:-1]).max())
    return DocumentAttention(
        packed=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
    )
