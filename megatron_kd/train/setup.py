"""From a run's configuration to something that can take a step: model, plugin, DDP, optimizer, schedule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch.nn import Module

from megatron_kd import platform
from megatron_kd.cache import Manifest
from megatron_kd.config import RunConfig
from megatron_kd.plugin import KDHandle, attach
from megatron_kd.student.architecture import architecture, transformer_config
from megatron_kd.student.convert import load_from_hf
from megatron_kd.student.flops import training_flops_per_token
from megatron_kd.student.hf_weights import HfWeights
from megatron_kd.student.model import build_model


@dataclass(frozen=True)
class Student:
    """A model ready to train, on this rank."""

    chunks: list[Module]  # wrapped
    handle: KDHandle
    optimizer: Any
    scheduler: OptimizerParamScheduler
    config: TransformerConfig
    flops_per_token: float  # of forward and backward

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """With every parameter up to date, though gathering overlaps with a forward that has not come yet."""
        hooked = [chunk for chunk in self.chunks if chunk.ddp_config.overlap_param_gather]
        for chunk in hooked:
            chunk.disable_forward_pre_hook()
        yield
        for chunk in hooked:
            chunk.enable_forward_pre_hook()


def build_student(config: RunConfig, weights: HfWeights, manifest: Manifest) -> Student:
    """Builds, loads, attaches, wraps. The process groups exist already. Collective."""
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[config.train.precision]
    arch = architecture(weights.config, config.parallel)
    model_config = transformer_config(weights.config, config.parallel, dtype=dtype, recompute=config.student.recompute)
    chunks = build_model(model_config, arch, manifest.seq_length)
    load_from_hf(chunks, weights, weights.config, arch)
    _freeze(config, chunks, tied=arch.tied)
    handle = attach(chunks, config.loss, vocab_size=manifest.vocab_size)
    model_config.calculate_per_token_loss = config.train.mean_over == "tokens"
    chunks = _wrap(config, chunks, model_config)
    optimizer = _optimizer(config, chunks, dtype)
    # Megatron's schedules call back through the model's configuration.
    model_config.finalize_model_grads_func = finalize_model_grads
    model_config.grad_scale_func = optimizer.scale_loss
    if config.optimizer.overlap_grad_reduce:  # once a step, not once a micro-batch
        pauses = [chunk.no_sync for chunk in chunks]
        model_config.no_sync_func = pauses if len(chunks) > 1 else pauses[0]
    flops = training_flops_per_token(model_config, arch.vocab_size, manifest.seq_length)
    return Student(chunks, handle, optimizer, _scheduler(config, optimizer), model_config, flops)


def uses_distributed_optimizer(config: RunConfig) -> bool:
    """`optimizer.distributed`, where `auto` means: if what Megatron-Core needs to resume it exactly is installed.

    With torch's Adam in the place of Transformer Engine's or apex's, Megatron-Core's distributed optimizer saves
    checkpoints from which it does not resume (0.16 and 0.19).
    """
    available = platform.has_transformer_engine() or platform.has_accumulating_gemm()
    return {"auto": available, "yes": True, "no": False}[config.optimizer.distributed]


def _freeze(config: RunConfig, chunks: list[Module], *, tied: bool) -> None:
    """Leaves out what `student.frozen` names; collective where it names anything."""
    if not config.student.frozen:
        return
    if tied and config.parallel.pipeline > 1:
        raise ValueError(
            f"student.frozen is {config.student.frozen} and parallel.pipeline {config.parallel.pipeline}: the head is "
            "tied to the embedding on another stage, whose gradients Megatron-Core sums in any case; use one stage"
        )
    for prefix in config.student.frozen:
        named = [p for chunk in chunks for name, p in chunk.named_parameters() if name.startswith(prefix)]
        for parameter in named:
            parameter.requires_grad_(False)
        found = torch.tensor(len(named), device=platform.device())
        torch.distributed.all_reduce(found)  # it may be on another stage
        if not found:
            raise ValueError(f"student.frozen names {prefix!r}, with which no parameter's name begins")


def _wrap(config: RunConfig, chunks: list[Module], model_config: TransformerConfig) -> list[Module]:
    settings, distributed = config.optimizer, uses_distributed_optimizer(config)
    if settings.overlap_param_gather and not (distributed and settings.overlap_grad_reduce):
        raise ValueError(
            f"optimizer.overlap_param_gather is true, the optimizer {'' if distributed else 'not '}distributed and "
            f"overlap_grad_reduce {settings.overlap_grad_reduce}: it needs both"
        )
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=distributed,
        overlap_grad_reduce=settings.overlap_grad_reduce,
        overlap_param_gather=settings.overlap_param_gather,
        check_for_nan_in_grad=False,
    )
    if model_config.bf16:
        chunks = [Float16Module(model_config, chunk) for chunk in chunks]
    return [DistributedDataParallel(model_config, ddp_config, chunk) for chunk in chunks]


def _optimizer(config: RunConfig, chunks: list[Module], dtype: torch.dtype) -> Any:
    settings = config.optimizer
    return get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.min_lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.eps,
            clip_grad=settings.clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=uses_distributed_optimizer(config),
            overlap_param_gather=settings.overlap_param_gather,
        ),
        chunks,
    )


def _scheduler(config: RunConfig, optimizer: Any) -> OptimizerParamScheduler:
    settings = config.optimizer
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=max(config.train.steps, settings.warmup_steps + 1),
        lr_decay_style=settings.decay,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=config.train.steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
