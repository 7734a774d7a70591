"""The loss by definition: dense logits, log-softmax, autograd. For tests and for reading; no chunking, one rank.

For each position, with z = h·Wᵀ + b over the true vocabulary, q = softmax(z/τ), p the teacher's entries S and T its
mass outside them:

    truncated     Σ_S p·(log p − log q)
    renormalized  Σ_S p/M·(log p/M − log q),  M = Σ_S p
    ghost         Σ_S p·(log p − log q) + T·(log T − log Σ_{v∉S} q_v)

times τ² where asked, plus ce_weight times −log softmax(z) at the label; masked positions cost nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_kd.loss.objective import KDObjective, TeacherTopK


def reference(
    hidden: Tensor,
    weight: Tensor,
    teacher: TeacherTopK,
    *,
    objective: KDObjective = KDObjective(),  # noqa: B008 (frozen)
    labels: Tensor | None = None,
    loss_mask: Tensor | None = None,
    bias: Tensor | None = None,
    vocab_size: int | None = None,
) -> Tensor:
    """Loss of every position, in the inputs' type and differentiable by autograd.

    Args: as fused_linear_kl, for one rank.

    Returns:
        The leading shape of hidden.
    """
    leading = hidden.shape[:-1]
    mask = hidden.new_ones(leading) if loss_mask is None else loss_mask
    mask = mask.reshape(-1).to(hidden.dtype)
    alive = mask != 0
    rows = int(alive.sum())
    h = hidden.reshape(-1, hidden.shape[-1])[alive]
    ids = teacher.ids.reshape(len(alive), -1)[alive].long()
    log_p = teacher.logprobs.reshape(len(alive), -1)[alive].to(h.dtype).masked_fill(ids < 0, -math.inf)

    z = h @ weight.t() if bias is None else h @ weight.t() + bias
    z = z[:, :vocab_size]
    log_q = torch.log_softmax(z / objective.temperature, dim=-1)

    on_support = torch.zeros(rows, z.shape[1] + 1, dtype=torch.bool, device=z.device)
    on_support = on_support.scatter(1, torch.where(ids < 0, z.shape[1], ids), True)[:, :-1]
    mass = log_p.exp().sum(1)
    if objective.kind == "renormalized":
        log_p = log_p - mass.clamp(min=1e-300).log()[:, None]
    p = log_p.exp()
    kd = (torch.xlogy(p, p) - p * log_q.gather(1, ids.clamp(min=0))).sum(1)
    if objective.kind == "ghost":
        stored = teacher.tail_logprob
        tail = (1 - mass).clamp(min=0) if stored is None else stored.reshape(-1)[alive].to(h.dtype).exp()
        has_tail = ~on_support.all(1)
        log_student = torch.logsumexp(log_q.masked_fill(on_support, -math.inf)[has_tail], dim=1)
        kd = kd.index_put((has_tail,), torch.xlogy(tail, tail)[has_tail] - tail[has_tail] * log_student, True)
    if objective.scale_by_temperature_squared:
        kd = kd * objective.temperature**2
    loss = objective.kd_weight * kd
    if objective.ce_weight and labels is not None:
        log_q1 = torch.log_softmax(z, dim=-1)
        loss = loss - objective.ce_weight * log_q1.gather(1, labels.reshape(-1)[alive].long()[:, None])[:, 0]
    return torch.zeros_like(mask).index_put((alive,), loss * mask[alive]).reshape(leading)
