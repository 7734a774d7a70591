"""What one call of the loss does, settled before any tensor is touched: shapes checked, shard, chunks, kernels.

Every check here reads shapes, types and attributes only, so it costs no device synchronisation; checks of values are
validate's. Shapes: N positions of the whole sequence, n = N/t or N of this rank, D hidden, Vp columns, K entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_kd.loss.kernels import KernelChoice, RowKernels, select
from megatron_kd.loss.objective import KDObjective, TeacherHead, TeacherTopK
from megatron_kd.loss.vocab_parallel import VocabShard
from megatron_kd.loss.weight_grad import takes_main_grad

BackwardMode = Literal["recompute", "in_forward"]

_BUFFER_BYTES = 512 << 20
_ROW_MULTIPLE = 128  # rows of a GEMM tile


@dataclass(frozen=True)
class Plan:
    """Everything about a call that is not a tensor."""

    objective: KDObjective
    shard: VocabShard
    kernels: RowKernels
    leading: torch.Size  # shape of the loss
    positions: int  # N
    chunk_tokens: int  # C
    two_partitions: bool  # CE at τ ≠ 1 needs softmax(z) beside softmax(z/τ)
    in_forward: bool  # gradients are formed during forward, where there is a backward at all
    main_grad: bool  # dW goes to weight.main_grad

    def spans(self, slots: int) -> list[slice]:
        """Local rows of each chunk, where a buffer of C rows serves `slots` chunks at a time."""
        local = self.positions // self.shard.parts
        step = max(1, -(-self.chunk_tokens // (self.shard.parts * slots)))
        return [slice(first, min(first + step, local)) for first in range(0, local, step)]


def choose_chunk_tokens(positions: int, weight_rows: int, element_size: int, budget: int = _BUFFER_BYTES) -> int:
    """Positions per chunk such that the [C, Vp] chunk buffer stays within `budget` bytes.

    The positions are spread evenly over the chunks, in whole GEMM tiles, so that no chunk is a small remainder.
    """
    most = max(1, budget // max(1, weight_rows * element_size))
    if most >= positions:
        return max(1, positions)
    if most < _ROW_MULTIPLE:
        return most
    most -= most % _ROW_MULTIPLE
    even = -(-positions // -(-positions // most))
    return min(most, -(-even // _ROW_MULTIPLE) * _ROW_MULTIPLE)


def make_plan(
    hidden: Tensor,
    weight: Tensor,
    teacher: TeacherTopK | None,
    *,
    objective: KDObjective,
    labels: Tensor | None,
    loss_mask: Tensor | None,
    bias: Tensor | None,
    vocab_size: int | None,
    chunk_tokens: int | None = None,
    backward: BackwardMode = "recompute",
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    kernels: KernelChoice = "auto",
    accumulate_main_grad: bool | None = None,
) -> Plan:
    """Check the arguments of fused_linear_kl, or (teacher None) of online_kl; settle the plan; raises ValueError."""
    if hidden.dim() not in (2, 3) or weight.dim() != 2:
        raise ValueError(
            f"hidden is {list(hidden.shape)} and weight {list(weight.shape)}; need [N, D] or [s, b, D], and [Vp, D]"
        )
    _same("hidden's last dimension", hidden.shape[-1], "weight's", weight.shape[1])
    _same("hidden.dtype", hidden.dtype, "weight.dtype", weight.dtype)
    if not hidden.dtype.is_floating_point:
        raise ValueError(f"hidden.dtype is {hidden.dtype}; need a floating type")
    if bias is not None:
        _same("bias's shape", list(bias.shape), "weight's rows", [weight.shape[0]])
        _same("bias.dtype", bias.dtype, "weight.dtype", weight.dtype)
    if backward not in get_args(BackwardMode):
        raise ValueError(f"backward is {backward!r}; known modes are {', '.join(get_args(BackwardMode))}")

    tp = 1 if tp_group is None else tp_group.size()
    _check_vocabulary(weight.shape[0], vocab_size, tp)
    shard = VocabShard.of(weight.shape[0], vocab_size, tp_group, sequence_parallel)
    leading = torch.Size((hidden.shape[0] * shard.parts, *hidden.shape[1:-1]))
    if teacher is not None:
        _check_targets(teacher, leading, weight.shape[0] * tp)
    if objective.ce_weight != 0 and labels is None:
        raise ValueError(f"ce_weight is {objective.ce_weight} but labels is None: give labels or set ce_weight to 0")
    if labels is not None:
        _same_positions("labels", labels, leading)
        if labels.dtype.is_floating_point:
            raise ValueError(f"labels.dtype is {labels.dtype}; need an integer type")
    if loss_mask is not None:
        _same_positions("loss_mask", loss_mask, leading)
    if chunk_tokens is None:
        chunk_tokens = choose_chunk_tokens(leading.numel(), weight.shape[0], weight.element_size())
    elif chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; need at least 1")
    return Plan(
        objective=objective,
        shard=shard,
        kernels=select(kernels, hidden.device),
        leading=leading,
        positions=leading.numel(),
        chunk_tokens=chunk_tokens,
        two_partitions=labels is not None and objective.temperature != 1,
        # In fp16 gradients that are not yet multiplied by the loss scale would underflow.
        in_forward=backward == "in_forward" and hidden.dtype != torch.float16 and leading.numel() > 0,
        main_grad=takes_main_grad(weight, accumulate_main_grad),
    )


def check_teacher_head(hidden: Tensor, weight: Tensor, teacher: TeacherHead) -> None:
    """Raise ValueError where a resident teacher does not match the student's positions, columns or type."""
    if teacher.hidden.shape[:-1] != hidden.shape[:-1]:
        raise ValueError(
            f"teacher.hidden is {list(teacher.hidden.shape)} but hidden is {list(hidden.shape)}; "
            "both must hold the same positions"
        )
    _same("teacher.hidden's last dimension", teacher.hidden.shape[-1], "teacher.weight's", teacher.weight.shape[-1])
    _same("teacher.weight's rows", teacher.weight.shape[0], "weight's", weight.shape[0])
    _same("teacher.hidden.dtype", teacher.hidden.dtype, "teacher.weight.dtype", teacher.weight.dtype)


def _check_vocabulary(weight_rows: int, vocab_size: int | None, tp: int) -> None:
    if vocab_size is None:
        if tp > 1:
            # Without it a whole weight on every rank looks like a shard, and adds log t to the loss.
            raise ValueError(
                f"vocab_size is None with {tp} tensor-parallel ranks; give the true vocabulary size, so that "
                "the shards can be checked against it"
            )
        return
    if vocab_size < 1 or vocab_size > weight_rows * tp:
        raise ValueError(f"vocab_size is {vocab_size} but weight has {weight_rows * tp} columns on {tp} rank(s)")
    if tp > 1 and weight_rows >= vocab_size:
        raise ValueError(
            f"weight has {weight_rows} rows on each of {tp} tensor-parallel ranks, which is a vocabulary of "
            f"{weight_rows * tp}, but vocab_size is {vocab_size}: pass this rank's shard, not the whole weight"
        )


def _check_targets(teacher: TeacherTopK, leading: torch.Size, columns: int) -> None:
    ids, logprobs, tail = teacher
    if ids.dtype.is_floating_point or ids.dtype == torch.bool:
        raise ValueError(f"teacher.ids.dtype is {ids.dtype}; need an integer type")
    if not logprobs.dtype.is_floating_point:
        raise ValueError(f"teacher.logprobs.dtype is {logprobs.dtype}; need a floating type")
    _same("teacher.logprobs's shape", list(logprobs.shape), "teacher.ids's", list(ids.shape))
    if ids.dim() < 2 or ids.shape[:-1] not in (leading, (leading.numel(),)):
        raise ValueError(f"teacher.ids is {list(ids.shape)}; need [{', '.join(map(str, leading))}, K]")
    if ids.shape[-1] > columns:
        raise ValueError(f"teacher.ids has K = {ids.shape[-1]} entries but weight has only {columns} columns")
    if tail is not None:
        _same_positions("teacher.tail_logprob", tail, leading)
        if not tail.dtype.is_floating_point:
            raise ValueError(f"teacher.tail_logprob.dtype is {tail.dtype}; need a floating type")


def _same_positions(name: str, x: Tensor, leading: torch.Size) -> None:
    if x.shape not in (leading, (leading.numel(),)):
        raise ValueError(f"{name} is {list(x.shape)}; need {list(leading)}, one value per position")


def _same(name: str, value: object, other_name: str, other: object) -> None:
    if value != other:
        raise ValueError(f"{name} is {value} but {other_name} is {other}; they must be equal")
