"""Hugging Face configuration → Megatron-Core configuration, for the families of families.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedConfig

from megatron_kd import platform
from megatron_kd.config import ParallelConfig
from megatron_kd.student.families import (
    Rope,
    check_family,
    experts_of,
    has_qk_norm,
    has_qkv_bias,
    head_dim,
    is_gpt_oss,
    rope_of,
    windowed_layers,
)


@dataclass(frozen=True)
class Architecture:
    """What a GPTModel needs beside its TransformerConfig."""

    vocab_size: int  # true vocabulary
    padded_vocab_size: int  # rows of the embedding and the head: a multiple of 128 · tensor-parallel size
    tied: bool  # the head is the embedding
    max_positions: int
    rope: Rope


def architecture(hf: PreTrainedConfig, parallel: ParallelConfig) -> Architecture:
    """The parts of the model outside the transformer block.

    Raises:
        ValueError: rotary scaling of a kind Megatron-Core's GPTModel does not build.
    """
    multiple = 128 * parallel.tensor
    return Architecture(
        vocab_size=hf.vocab_size,
        padded_vocab_size=-(-hf.vocab_size // multiple) * multiple,
        tied=hf.tie_word_embeddings,
        max_positions=hf.max_position_embeddings,
        rope=rope_of(hf),
    )


def transformer_config(
    hf: PreTrainedConfig, parallel: ParallelConfig, *, dtype: torch.dtype, recompute: bool = False
) -> TransformerConfig:
    """Megatron-Core's configuration of the same model.

    Args:
        hf: a model of one of the families.
        parallel: the layout; sizes that do not divide are refused here, by the number that fails.
        dtype: of parameters and activations.
        recompute: recompute each layer's activations in backward.

    Raises:
        ValueError: a model or layout that cannot be built, naming what fails.
    """
    check_family(hf)
    _check_layout(hf, parallel)
    fused = platform.has_transformer_engine()
    rope = rope_of(hf)
    config = TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=head_dim(hf),
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True,
        add_qkv_bias=has_qkv_bias(hf),
        qk_layernorm=has_qk_norm(hf),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        bias_activation_fusion=fused,
        bias_dropout_fusion=fused,
        # The fused rotation of packed sequences leaves YaRN's scale of the attention out, silently (0.16).
        apply_rope_fusion=fused and rope.kind != "yarn",
        masked_softmax_fusion=fused,
        gradient_accumulation_fusion=platform.has_accumulating_gemm(),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Every weight is loaded, but initialisation stays on: it is also what marks a weight as split over ranks,
        # without which Megatron-Core's gradient norm would count one rank's part alone.
        init_method=_leave_as_it_is,
        output_layer_init_method=_leave_as_it_is,
        embedding_init_method=_leave_as_it_is,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
        # Under interleaving two stages send each other activations and gradients at a time; sent as one batch, one
        # would be taken for the other.
        overlap_p2p_comm=parallel.virtual_pipeline is not None,
        batch_p2p_comm=parallel.virtual_pipeline is None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,  # an expert is whole on its rank, which biases in experts need anyway
        sequence_parallel=parallel.sequence_parallel,
        calculate_per_token_loss=True,  # the step's loss is a mean over tokens, not over micro-batches' means
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
        **_windows(hf),
        **_mixture(hf, fused),
        **_gpt_oss(hf),
    )
    for name, value in rope.yarn:  # GPTModel reads them off the configuration, whose class does not declare them
        setattr(config, name, value)
    return config


def _windows(hf: PreTrainedConfig) -> dict[str, Any]:
    windowed = windowed_layers(hf)
    if not any(windowed):
        return {}
    # Megatron-Core counts the positions before the query's own.
    return {"window_size": (hf.sliding_window - 1, 0), "window_attn_skip_freq": [int(flag) for flag in windowed]}


def _mixture(hf: PreTrainedConfig, fused: bool) -> dict[str, Any]:
    experts = experts_of(hf)
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.count,
        "moe_router_topk": experts.active,
        "moe_ffn_hidden_size": experts.width,
        "moe_router_pre_softmax": experts.softmax_first,
        "moe_router_dtype": "fp32",
        # The teacher's distribution is the only objective: a loss that evens out the experts would pull a student that
        # starts from trained weights away from the routing those weights were trained with.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": fused,
        "moe_permute_fusion": fused,
    }


def _gpt_oss(hf: PreTrainedConfig) -> dict[str, Any]:
    if not is_gpt_oss(hf):
        return {"activation_func": functional.silu, "add_bias_linear": False}
    return {
        "activation_func": quick_gelu,
        "activation_func_clamp_value": hf.swiglu_limit,
        "glu_linear_offset": 1.0,
        "add_bias_linear": True,
        "softmax_type": "learnable",
    }


def _leave_as_it_is(weight: Tensor) -> Tensor:
    return weight


def _check_layout(hf: PreTrainedConfig, parallel: ParallelConfig) -> None:
    chunks, experts = parallel.pipeline * (parallel.virtual_pipeline or 1), experts_of(hf)
    if experts is None and parallel.expert > 1:
        raise ValueError(f"parallel.expert is {parallel.expert}, but {hf.model_type} has no experts")
    if experts is not None and parallel.tensor > 1 and not parallel.sequence_parallel:
        raise ValueError(
            f"parallel.tensor is {parallel.tensor}: every rank would send every token to the experts of "
            f"{hf.model_type}; set parallel.sequence_parallel"
        )
    for what, number, by, divisor in (
        ("num_attention_heads", hf.num_attention_heads, "parallel.tensor", parallel.tensor),
        ("num_key_value_heads", hf.num_key_value_heads, "parallel.tensor", parallel.tensor),
        ("intermediate_size", hf.intermediate_size if experts is None else 0, "parallel.tensor", parallel.tensor),
        ("num_hidden_layers", hf.num_hidden_layers, "parallel.pipeline · virtual_pipeline", chunks),
        ("num_experts", 0 if experts is None else experts.count, "parallel.expert", parallel.expert),
    ):
        if number % divisor:
            raise ValueError(f"{what} = {number} does not divide by {by} = {divisor}")
