"""Losses of other projects, for bench_head.py --peers: called as theirs are meant to be called, where installed.

    megatron_cached_logits   Megatron-LM's top-K loss on whole logits (megatron-core ≥ 0.19), the same objective as ours
    liger                    Liger-Kernel's fused linear JSD with β = 0, which is KL(teacher‖student)
    trl                      TRL's chunked divergence with β = 0, the same

The latter two want a teacher with all its logits, from a hidden state and a head: theirs here has a hidden size of 16,
so that its projection costs next to nothing. Their error is taken against the full KL.

Shapes: N positions, D hidden, V vocabulary, K teacher entries.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_kd.loss import KDObjective, TeacherTopK

TEACHER_HIDDEN = 16


class FullTeacher(NamedTuple):
    """A teacher that is projected whole."""

    hidden: Tensor  # [N, 16]
    weight: Tensor  # [V, 16]

    @staticmethod
    def like(hidden: Tensor, weight: Tensor) -> FullTeacher:
        """A teacher for a student's tensors."""
        new = [x.new_empty(x.shape[0], TEACHER_HIDDEN, requires_grad=False).normal_() for x in (hidden, weight)]
        return FullTeacher(*new)

    def entries(self) -> TeacherTopK:
        """All its probabilities, in double precision."""
        log_p = (self.hidden.cpu().double() @ self.weight.cpu().double().t()).log_softmax(1)
        return TeacherTopK(torch.arange(log_p.shape[1]).expand_as(log_p), log_p)


class PeerLoss(NamedTuple):
    """What is read of KDLoss here."""

    loss: Tensor


def megatron_cached_logits(
    hidden: Tensor, weight: Tensor, teacher: TeacherTopK, *, objective: KDObjective, **_: Any
) -> PeerLoss:
    """The loss Megatron-LM applies to the output layer's logits."""
    from megatron.training.distillation.cached_logits_loss import topk_kl_div

    logits = (hidden @ weight.t())[:, None]
    targets = teacher.logprobs[:, None], teacher.ids[:, None].long()
    return PeerLoss(topk_kl_div(logits, *targets, 1, 0, None, add_ghost_token=objective.kind == "ghost"))


def liger(hidden: Tensor, weight: Tensor, teacher: FullTeacher, *, chunk_tokens: int, **_: Any) -> PeerLoss:
    """Its loss is a mean over positions."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    loss = LigerFusedLinearJSDLoss(0.0, 1.0, beta=0.0, compiled=hidden.is_cuda, chunk_size=chunk_tokens)
    labels = torch.zeros(len(hidden), dtype=torch.long, device=hidden.device)
    return PeerLoss(loss(hidden, weight, teacher.hidden, teacher.weight, labels) * len(hidden))


def trl(hidden: Tensor, weight: Tensor, teacher: FullTeacher, **_: Any) -> PeerLoss:
    """One divergence a position."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    return PeerLoss(ChunkedDivergenceFunction.apply(hidden, weight, None, *teacher, None, 0.0)[0])


PEERS: dict[str, Callable[..., PeerLoss]] = {
    "megatron_cached_logits": megatron_cached_logits,
    "liger": liger,
    "trl": trl,
}
WITH_FULL_TEACHER = ("liger", "trl")
PACKAGES = {"megatron_cached_logits": "megatron-core", "liger": "liger-kernel", "trl": "trl"}


def peer_version(variant: str) -> str:
    """Package and version a variant comes from; empty for this project's own, or where it is not installed."""
    try:
        return f"{PACKAGES[variant]} {version(PACKAGES[variant])}"
    except (KeyError, PackageNotFoundError):
        return ""
