"""Checks of values, which wait for the device: for the first batch of a run, not for every step.

What shapes and types can tell, fused_linear_kl checks itself on every call. Here: ids in the vocabulary and unique in
a row, log-probabilities that are log-probabilities, masses of at most 1, labels in range, finite hidden states; over
several ranks, that hidden is the same on all and that the shards are not.

Shapes: N positions of the whole sequence, K teacher entries.
Collectives: two small all-reduces with several ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_kd.loss.objective import KDObjective, TeacherTopK
from megatron_kd.loss.plan import Plan, make_plan

# Half-precision log-probabilities of a real teacher sum to at most 1.002; 1 % above 1 is another fault.
_MASS_TOLERANCE = 0.01


def validate(
    hidden: Tensor,
    weight: Tensor,
    teacher: TeacherTopK,
    *,
    objective: KDObjective = KDObjective(),  # noqa: B008 (frozen)
    labels: Tensor | None = None,
    loss_mask: Tensor | None = None,
    bias: Tensor | None = None,
    vocab_size: int | None = None,
    **rest: Any,
) -> None:
    """Raise ValueError, naming the argument and the values, where fused_linear_kl's arguments hold nonsense.

    Args: as fused_linear_kl; masked positions may hold anything.
    """
    plan = make_plan(
        hidden,
        weight,
        teacher,
        objective=objective,
        labels=labels,
        loss_mask=loss_mask,
        bias=bias,
        vocab_size=vocab_size,
        **rest,
    )
    vocabulary = weight.shape[0] if vocab_size is None else vocab_size
    if loss_mask is None:
        alive = torch.ones(plan.positions, dtype=torch.bool, device=hidden.device)
    else:
        _forbid(~loss_mask.reshape(-1).isfinite(), "loss_mask is not finite")
        alive = loss_mask.reshape(-1) != 0
    _check_ranks(hidden, weight, alive, plan)
    _check_ids(teacher.ids.flatten(0, -2), alive, vocabulary, plan)
    _check_masses(teacher, alive, objective)
    if labels is not None:
        wrong = alive & ((labels.reshape(-1) < 0) | (labels.reshape(-1) >= vocabulary))
        _forbid(wrong, f"labels must lie in 0 … {vocabulary - 1}; mask the position otherwise", labels.reshape(-1))


def _forbid(wrong: Tensor, claim: str, values: Tensor | None = None) -> None:
    """Raise at the first position where `wrong` is true."""
    if bool(wrong.any()):
        position = int(wrong.nonzero()[0, 0])
        found = "" if values is None else f", found {values[position].tolist()}"
        raise ValueError(f"{claim}: position {position}{found} ({int(wrong.sum())} of {wrong.numel()} positions)")


def _check_ranks(hidden: Tensor, weight: Tensor, alive: Tensor, plan: Plan) -> None:
    shard = plan.shard
    mine = slice(None) if shard.parts == 1 else slice(shard.rank * len(alive) // shard.parts, None)
    rows = hidden.reshape(-1, hidden.shape[-1])
    finite = rows.isfinite().all(1) | ~alive[mine][: len(rows)]
    _forbid(~finite, "hidden is not finite")
    if shard.size == 1:
        return
    sums = torch.stack([rows.nan_to_num().double().abs().sum(), weight.double().abs().sum()])
    low, high = sums.clone(), sums.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN, group=shard.group)
    dist.all_reduce(high, op=dist.ReduceOp.MAX, group=shard.group)
    if not shard.sequence_parallel and low[0] != high[0]:
        raise ValueError(
            f"hidden differs between the {shard.size} tensor-parallel ranks (sums {low[0]:.9g} … {high[0]:.9g}); "
            "without sequence_parallel every rank must hold the same rows"
        )
    if low[1] == high[1]:
        raise ValueError(
            f"weight is the same on all {shard.size} tensor-parallel ranks (sum {low[1]:.9g}): "
            "pass each rank its own shard"
        )


def _check_ids(ids: Tensor, alive: Tensor, vocabulary: int, plan: Plan) -> None:
    present = ids.masked_fill(~alive[:, None], -1).long()
    if present.numel() == 0:
        return
    largest, smallest = int(present.max()), int(present.min())
    if largest >= vocabulary:
        raise ValueError(
            f"teacher.ids holds {largest} but the student's vocabulary has {vocabulary} columns on "
            f"{plan.shard.size} rank(s): use a student with the teacher's vocabulary"
        )
    if smallest < -1:
        raise ValueError(f"teacher.ids holds {smallest}; need vocabulary ids, or −1 for an absent entry")
    ordered = present.sort(dim=1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    _forbid(twice.any(1), "teacher.ids must be unique in a row", ordered)


def _check_masses(teacher: TeacherTopK, alive: Tensor, objective: KDObjective) -> None:
    ids, logprobs = teacher.ids.flatten(0, -2), teacher.logprobs.flatten(0, -2)
    present = (ids >= 0) & alive[:, None]
    log_p = logprobs.double().masked_fill(~present, -torch.inf)
    _forbid(log_p.isnan().any(1), "teacher.logprobs is not a number", logprobs)
    mass = log_p.exp().sum(1)
    if teacher.tail_logprob is not None:
        tail = teacher.tail_logprob.reshape(-1).double().masked_fill(~alive, -torch.inf)
        _forbid(tail.isnan(), "teacher.tail_logprob is not a number")
        mass = mass + tail.exp()
    _forbid(
        mass > 1 + _MASS_TOLERANCE,
        "teacher.logprobs (with tail_logprob) must sum to at most 1 as probabilities, in natural logarithms and at "
        f"temperature {objective.temperature}",
        mass,
    )
