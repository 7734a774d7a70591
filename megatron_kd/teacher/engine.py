"""What a teacher is to the rest of the project: tokens in, final hidden states out, and the head that projects them.

The logits are never an engine's business: topk.py projects the hidden states chunk by chunk, so that no
[sequence, vocabulary] tensor exists.

Shapes: b samples, S positions, D hidden, Vp vocabulary rows of this rank's head.
"""

from __future__ import annotations

import os
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_kd.data.attention import document_starts


class Head(NamedTuple):
    """The output projection: logits = hidden · weightᵀ + bias, and nothing else."""

    weight: Tensor  # [Vp, D]; rows past the true vocabulary are padding
    bias: Tensor | None = None  # [Vp]


class Share(NamedTuple):
    """This rank's part of a micro-batch, where ranks that hold different experts each compute some of its samples."""

    index: int = 0
    count: int = 1
    group: dist.ProcessGroup | None = None  # the ranks among which a micro-batch is split, in the order of their parts
    copies: int = 1  # ranks of the group, in a row, that compute the same part

    def rows(self, batch: range) -> list[int]:
        """This rank's samples: as many as on every other rank, for which the last one is repeated if need be."""
        each = -(-len(batch) // self.count)
        first = batch.start + self.index * each
        return [min(row, batch[-1]) for row in range(first, first + each)]

    def together(self, part: Tensor, samples: int) -> Tensor:
        """[samples, …] of the whole micro-batch from every rank's [rows, …]."""
        if self.group is None:
            return part
        everyone = part.new_empty((self.group.size(), *part.shape))
        dist.all_gather_into_tensor(everyone.flatten(0, 1), part.contiguous(), group=self.group)
        return everyone[:: self.copies].flatten(0, 1)[:samples]


class Replica(NamedTuple):
    """A whole teacher, on one rank or several, and this rank's part in it. Replicas share nothing but the cache."""

    index: int
    count: int
    group: dist.ProcessGroup | None = None  # the ranks that hold the other rows of the head; None: there are none
    leads: bool = True  # hands the targets on: one rank of each replica
    share: Share = Share()

    @staticmethod
    def of_one_rank() -> Replica:
        """Each rank that torchrun started, or the only process, is a replica by itself."""
        return Replica(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


class TeacherEngine(Protocol):
    """A teacher in evaluation mode; nothing it returns carries a gradient."""

    head: Head | None  # None on ranks that end before it
    dtype: torch.dtype  # what it computes in
    parameters: int  # of the whole model
    vocabulary_rows: int  # of the whole head, over all ranks

    def hidden_states(self, tokens: Tensor, segment: Tensor) -> Tensor | None:
        """Final hidden states, after the last norm. Every rank of the replica calls it, with its share of the samples.

        Args:
            tokens: [b, S] ids.
            segment: [b, S] document numbers; a document sees nothing of another, and its positions start at 0.

        Returns:
            [b, S, D] on the head's device, the same on all ranks that hold some of it; None on the others.
        """
        ...


def positions_in_documents(segment: Tensor) -> Tensor:
    """[b, S] position of each token within its document, from [b, S] document numbers."""
    place = torch.arange(segment.shape[1], device=segment.device).expand_as(segment)
    return place - torch.where(document_starts(segment), place, 0).cummax(dim=1).values
