"""Megatron-Core models built from a Hugging Face configuration: the student, or a teacher run by Megatron.

`build_model` gives this rank's chunks (one, or one per virtual pipeline stage), unwrapped; `initialize_parallel` makes
the process groups first. Collectives: the creation of the groups.
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig
from torch.nn import Module

from megatron_kd import platform
from megatron_kd.config import ParallelConfig
from megatron_kd.student.architecture import Architecture


def initialize_parallel(parallel: ParallelConfig, seed: int) -> None:
    """Makes Megatron-Core's process groups for this layout.

    Raises:
        ValueError: the world size does not divide into the layout.
    """
    world, model = torch.distributed.get_world_size(), parallel.tensor * parallel.pipeline * parallel.context
    if world % model:
        raise ValueError(
            f"{world} rank(s) do not divide by parallel.tensor · pipeline · context = "
            f"{parallel.tensor} · {parallel.pipeline} · {parallel.context} = {model}"
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def build_model(config: TransformerConfig, arch: Architecture, sequence_length: int) -> list[Module]:
    """GPTModel chunks of this rank on its device, weights not initialised."""
    if platform.has_transformer_engine():
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    else:
        spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    stages = config.virtual_pipeline_model_parallel_size
    chunks = []
    for stage in range(stages or 1):
        where = {"ignore_virtual": False, "vp_stage": stage if stages else None}
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=arch.padded_vocab_size,
            max_sequence_length=max(sequence_length, arch.max_positions),
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            share_embeddings_and_output_weights=arch.tied,
            position_embedding_type="rope",
            rotary_base=arch.rope_theta,
            rope_scaling=arch.rope_factor is not None,
            rope_scaling_factor=arch.rope_factor or 8.0,
            vp_stage=where["vp_stage"],
        )
        chunks.append(chunk.to(platform.device()))
    return chunks
