"""Megatron-Core models built from a Hugging Face configuration: the student, or a teacher run by Megatron.

`build_model` gives this rank's chunks (one, or one per virtual pipeline stage), unwrapped; `initialize_parallel` makes
the process groups first. Layers are Transformer Engine's where it is installed, else local_layers.py's.

Expert-parallel ranks hold whole experts and are taken from the tensor- and data-parallel ones, so the data-parallel
size stays world / (tensor · pipeline · context). Collectives: the creation of the groups.
"""

from __future__ import annotations

import math

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch.nn import Module

from megatron_kd import platform
from megatron_kd.config import ParallelConfig
from megatron_kd.student.architecture import Architecture
from megatron_kd.student.local_layers import leave_experts_alone, local_block


def initialize_parallel(parallel: ParallelConfig, seed: int, *, gloo: bool = True) -> None:
    """Makes Megatron-Core's process groups for this layout.

    Args:
        parallel: the layout.
        seed: of each rank's random numbers.
        gloo: also make the groups over gloo that checkpoints of a distributed optimizer go through.

    Raises:
        ValueError: the world size does not divide into the layout.
    """
    world = torch.distributed.get_world_size()
    for names in (("tensor", "pipeline", "context"), ("expert", "pipeline")):
        sizes = [getattr(parallel, name) for name in names]
        if world % math.prod(sizes):
            raise ValueError(
                f"{world} rank(s) do not divide by parallel.{' · '.join(names)} = "
                f"{' · '.join(map(str, sizes))} = {math.prod(sizes)}"
            )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=gloo,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def build_model(config: TransformerConfig, arch: Architecture, sequence_length: int) -> list[Module]:
    """GPTModel chunks of this rank on its device, weights not initialised."""
    stages = config.virtual_pipeline_model_parallel_size
    chunks = []
    for stage in range(stages or 1):
        where = {"ignore_virtual": False, "vp_stage": stage if stages else None}
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=_layers(config, where["vp_stage"]),
            vocab_size=arch.padded_vocab_size,
            max_sequence_length=max(sequence_length, arch.max_positions),
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            share_embeddings_and_output_weights=arch.tied,
            position_embedding_type="yarn" if arch.rope.kind == "yarn" else "rope",
            rotary_base=arch.rope.theta,
            rope_scaling=arch.rope.kind == "llama3",
            rope_scaling_factor=arch.rope.factor,
            vp_stage=where["vp_stage"],
        )
        leave_experts_alone(chunk)
        _mark_parameters(chunk)
        chunks.append(chunk.to(platform.device()))
    return chunks


def _layers(config: TransformerConfig, stage: int | None) -> ModuleSpec | TransformerBlockSubmodules:
    if not platform.has_transformer_engine():
        return local_block(config, stage)
    return get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
    )


def _mark_parameters(chunk: Module) -> None:
    """Says of sinks and experts which ranks hold them, where Megatron-Core leaves that out or gets it wrong.

    Its gradient norm counts what is marked `tensor_model_parallel` on every tensor-parallel rank, the rest on the first
    one alone. Gradients marked `sequence_parallel` are summed over the tensor-parallel ranks. Those not marked
    `allreduce` are summed over the ranks with the same experts rather than the data-parallel ones, and have an
    optimizer of their own; with one expert-parallel rank, too, or checkpoints would not go from layout to layout.
    """
    for name, parameter in chunk.named_parameters():
        if name.endswith("softmax_offset"):
            parameter.tensor_model_parallel = True
        elif ".experts." in name:
            parameter.tensor_model_parallel, parameter.sequence_parallel = True, False
            parameter.allreduce = False
