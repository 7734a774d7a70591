"""What a step reports: sums over all ranks, their means over tokens, and the most memory of any rank.

Collectives: one sum over all ranks, of eight numbers and one more for each rank, which carries the metrics to rank 0
and a stop request to everybody; where a number is no longer finite, one exchange of what every rank knows about it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_kd.plugin import KDHandle

_SUMS = ("loss", "loss_tokens", "kd", "ce", "tail", "support", "tokens", "stop")


class TrainingError(RuntimeError):
    """Training cannot go on; the message names step, rank and samples."""


def sum_over_ranks(handle: KDHandle, logged: Tensor, *, stop: bool = False, memory: int = 0) -> dict[str, float]:
    """Sums over all data-parallel ranks and pipeline stages, and the largest `memory`, on every rank.

    Args:
        handle: the plugin's, whose metrics are taken.
        logged: [2] this rank's sum of the loss and number of tokens.
        stop: this rank was asked to stop.
        memory: this rank's peak, bytes.
    """
    metrics = handle.pop_metrics()
    values = torch.zeros(len(_SUMS) + torch.distributed.get_world_size(), dtype=torch.float64, device=logged.device)
    if parallel_state.get_tensor_model_parallel_rank() == 0:  # tensor-parallel ranks hold the same sums
        values[:2] = logged
        for index, name in enumerate(_SUMS):
            if name in metrics:
                values[index] = metrics[name].double()
    values[_SUMS.index("stop")] = float(stop)
    values[len(_SUMS) + torch.distributed.get_rank()] = memory  # each rank's in a place of its own, for their maximum
    torch.distributed.all_reduce(values)
    found = values.tolist()
    return dict(zip(_SUMS, found)) | {"memory": max(found[len(_SUMS) :])}


def means(sums: Mapping[str, float]) -> dict[str, float]:
    """Loss, divergence and cross-entropy in nats a token; teacher's tail and student's mass on the support."""
    tokens = max(sums["tokens"], 1.0)
    return {"loss": sums["loss"] / max(sums["loss_tokens"], 1.0)} | {
        name: sums[name] / tokens for name in ("kd", "ce", "tail", "support")
    }


def check_finite(step: int, values: Mapping[str, float], logged: Tensor, samples: Sequence[int]) -> None:
    """Ends training where loss or gradient is not finite; every rank holds the same `values`.

    Args:
        step: being trained.
        values: its loss and gradient norm.
        logged: [2] this rank's own sum of the loss.
        samples: this rank's own.

    Raises:
        TrainingError: on every rank, naming the ranks whose own loss is at fault, or else all of them.
    """
    loss, gradient_norm = values["loss"], values["gradient_norm"]
    if math.isfinite(loss) and math.isfinite(gradient_norm):
        return
    known: list[tuple[bool, list[int]] | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(known, (bool(torch.isfinite(logged).all()), list(samples)))
    ranks = {rank: entry for rank, entry in enumerate(known) if entry is not None}
    guilty = {rank: entry for rank, entry in ranks.items() if not entry[0]} or ranks
    raise TrainingError(
        f"step {step}: loss {loss}, gradient norm {gradient_norm}; "
        + "; ".join(f"rank {rank} had samples {entry[1]}" for rank, entry in guilty.items())
        + ". Lower optimizer.lr, or look at these samples with `megatron-kd cache inspect`"
    )
