"""How far a student is from its teacher on text neither was shown, over the whole vocabulary.

Per position t, with p the teacher's and q the student's softmax over the true vocabulary and y the next token:

    kl            Σ_v p_v · (log p_v − log q_v)
    cross_entropy −log q_y
    agreement     argmax q = argmax p

averaged over the positions that the loss mask counts. Logits exist for a chunk of positions at a time, in fp32.

Shapes: N positions, D hidden (of each model its own), V true vocabulary, C positions in a chunk.
Collectives: one sum of four numbers a model, at the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_kd import platform


@dataclass
class Divergence:
    """Sums over positions; add batches with `update`, read means with `result`."""

    kl: float = 0.0
    cross_entropy: float = 0.0
    agreement: float = 0.0
    positions: int = 0

    def sum_over_ranks(self) -> None:
        """Adds up what each rank of the process group has seen."""
        sums = torch.tensor([self.kl, self.cross_entropy, self.agreement, self.positions], dtype=torch.float64)
        sums = sums.to(platform.device())
        torch.distributed.all_reduce(sums)
        self.kl, self.cross_entropy, self.agreement = sums[:3].tolist()
        self.positions = int(sums[3])

    def result(self) -> dict[str, float]:
        """Means a token, in nats: kl, cross_entropy, perplexity, top1_agreement.

        Raises:
            ValueError: no position was counted.
        """
        if self.positions == 0:
            raise ValueError("no held-out position to evaluate on: raise data.held_out or evaluate.samples")
        cross_entropy = self.cross_entropy / self.positions
        return {
            "kl": self.kl / self.positions,
            "cross_entropy": cross_entropy,
            "perplexity": math.exp(cross_entropy),
            "top1_agreement": self.agreement / self.positions,
        }


@torch.no_grad()
def update(
    divergences: list[Divergence],
    hidden: list[Tensor],
    heads: list[Tensor],
    labels: Tensor,
    loss_mask: Tensor,
    *,
    vocab_size: int,
    chunk: int = 256,
) -> None:
    """Adds one batch for several models at once; the first model is the teacher of all.

    Args:
        divergences: one per model, added to in place.
        hidden: per model [N, D].
        heads: per model [at least V, D].
        labels: [N] the next token.
        loss_mask: [N]; positions with 0 are left out.
        vocab_size: V.
        chunk: C.
    """
    kept = loss_mask.nonzero().flatten()
    heads = [head[:vocab_size].float() for head in heads]
    for rows in kept.split(chunk):
        teacher: Tensor | None = None
        for divergence, states, head in zip(divergences, hidden, heads):
            log_q = (states[rows].float() @ head.T).log_softmax(-1)
            teacher = log_q if teacher is None else teacher
            divergence.kl += float((teacher.exp() * (teacher - log_q)).sum())
            divergence.cross_entropy -= float(log_q.gather(1, labels[rows, None]).sum())
            divergence.agreement += float((log_q.argmax(-1) == teacher.argmax(-1)).sum())
            divergence.positions += len(rows)
