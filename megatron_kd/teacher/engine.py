"""What a teacher is to the rest of the project: tokens in, final hidden states out, and the head that projects them.

The logits are never an engine's business: topk.py projects the hidden states chunk by chunk, so that no
[sequence, vocabulary] tensor exists.

Shapes: b samples, S positions, D hidden, Vp vocabulary rows of this rank's head.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Head(NamedTuple):
    """The output projection: logits = hidden · weightᵀ + bias, and nothing else."""

    weight: Tensor  # [Vp, D]; rows past the true vocabulary are padding
    bias: Tensor | None = None  # [Vp]


class TeacherEngine(Protocol):
    """A teacher in evaluation mode; nothing it returns carries a gradient."""

    head: Head
    dtype: torch.dtype  # what it computes in
    parameters: int  # of the whole model
    vocabulary_rows: int  # of the whole head, over all ranks

    def hidden_states(self, tokens: Tensor, segment: Tensor) -> Tensor:
        """Final hidden states, after the last norm.

        Args:
            tokens: [b, S] ids.
            segment: [b, S] document numbers; a document sees nothing of another, and its positions start at 0.

        Returns:
            [b, S, D] on the head's device.
        """
        ...


def positions_in_documents(segment: Tensor) -> Tensor:
    """[b, S] position of each token within its document, from [b, S] document numbers."""
    place = torch.arange(segment.shape[1], device=segment.device).expand_as(segment)
    begins = torch.ones_like(segment, dtype=torch.bool)
    begins[:, 1:] = segment[:, 1:] != segment[:, :-1]
    return place - torch.where(begins, place, 0).cummax(dim=1).values
