"""The real Megatron model of chosen ranks, built without memory or GPUs: what is counted is what would be trained.

A process group whose collectives do nothing stands for the run's world, so one process can be any of its ranks in turn;
every tensor is made on the meta device, which keeps shapes and no data. Counted: the parameters of the rank's chunks,
the FLOPs of the model, and the peak of the loss on its output layer, by running the very function on meta tensors of
the run's shapes.

Collectives: none that move anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from megatron_kd import platform
from megatron_kd.loss import CACHED_LOSSES, ONLINE_LOSSES, TeacherHead, TeacherTopK
from megatron_kd.plan.allocator import measure
from megatron_kd.plan.head import chunk_tokens
from megatron_kd.plan.planned import PlannedRun
from megatron_kd.plan.shape import student_config
from megatron_kd.student.architecture import architecture, transformer_config
from megatron_kd.student.flops import training_flops_per_token
from megatron_kd.student.model import build_model, initialize_parallel

LOSSES = CACHED_LOSSES | ONLINE_LOSSES


@dataclass(frozen=True)
class Counted:
    """What one rank of the real world holds."""

    rank: int
    stage: int
    parameters: int
    flops_per_token: float  # of the whole student, forward and backward
    head_bytes: int | None  # peak of the loss beyond states and hidden states; None: no output layer here


def dry_run(run: PlannedRun, ranks: Sequence[int] | None = None) -> list[Counted]:
    """Builds ranks one after the other.

    Args:
        run: what is planned.
        ranks: of the whole world; None: the first of every pipeline stage.

    Raises:
        ValueError: a rank outside the world; a model that Megatron-Core cannot build.
    """
    size = run.layout.world // run.layout.pipeline
    chosen = range(0, run.layout.world, size) if ranks is None else ranks
    outside = [rank for rank in chosen if not 0 <= rank < run.layout.world]
    if outside:
        raise ValueError(f"ranks {outside} are not in a world of {run.layout.world}")
    platform.enable_megatron_without_cuda()
    counted = []
    for rank in chosen:
        with _world(run, rank):
            config, chunks = _build(run)
            parameters = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
            flops = training_flops_per_token(config, run.shape.vocab, run.layout.sequence)
            counted.append(Counted(rank, rank // size, parameters, flops, _head_bytes(run, chunks[-1])))
    return counted


@contextmanager
def _world(run: PlannedRun, rank: int) -> Iterator[None]:
    """This process as one rank of the run's world."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ValueError("a dry run needs a process of its own: a process group exists already")
    dist.init_process_group("fake", rank=rank, world_size=run.layout.world, store=FakeStore())
    try:
        initialize_parallel(run.config.parallel, run.config.seed, gloo=False)  # gloo would wait for the other ranks
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


class _OnMeta(TorchFunctionMode):
    """Every tensor without data, whatever device the code names."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": "meta"}
        if func is torch.Tensor.to:
            args = tuple("meta" if isinstance(x, (str, torch.device)) else x for x in args)
        return func(*args, **kwargs)


def _build(run: PlannedRun) -> tuple[TransformerConfig, list[Module]]:
    hf, parallel = student_config(run.config), run.config.parallel
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[run.config.train.precision]
    config = transformer_config(hf, parallel, dtype=dtype, recompute=run.recompute)
    config.perform_initialization = False  # there is nothing to initialise
    with torch.device("meta"), _OnMeta():
        return config, build_model(config, architecture(hf, parallel), run.layout.sequence)


def _head_bytes(run: PlannedRun, chunk: Module) -> int | None:
    """Peak of forward and backward of the loss, beyond what exists before it: hidden, weight, targets, main_grad."""
    if not getattr(chunk, "post_process", False):
        return None
    layer, loss, layout = chunk.output_layer, run.loss, run.layout
    weight = (layer.weight if layer.weight is not None else chunk.shared_embedding_or_output_weight()).detach()
    weight.requires_grad_()
    weight.main_grad = torch.empty_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def rows(width: int) -> Tensor:
        return weight.new_empty(layout.local_positions, width, dtype=weight.dtype)

    hidden, n = rows(weight.shape[1]).requires_grad_(), layout.positions
    teacher: Any
    if loss.implementation in ("online", "online_dense"):
        width = run.needed_teacher.hidden
        teacher = TeacherHead(rows(width), weight.new_empty(weight.shape[0], width))
    else:
        teacher = TeacherTopK(
            weight.new_empty(n, run.entries, dtype=torch.int32),
            weight.new_empty(n, run.entries, dtype=torch.float32),
            weight.new_empty(n, dtype=torch.float32),
        )
    arguments: dict[str, Any] = {
        "objective": loss.objective,
        "labels": weight.new_empty(n, dtype=torch.int64),
        "loss_mask": weight.new_empty(n, dtype=torch.float32),
        "vocab_size": run.shape.vocab,
        "chunk_tokens": chunk_tokens(loss, run.shape, layout, run.element),
        "backward": loss.backward,
        "tp_group": layer.tp_group if layout.tensor > 1 else None,
        "sequence_parallel": layout.sequence_parallel,
    }

    def step() -> Any:
        return torch.autograd.grad(
            LOSSES[loss.implementation](hidden, weight, teacher, **arguments).loss.sum(), (hidden, weight)
        )

    return measure(step, torch.device("meta")).peak
