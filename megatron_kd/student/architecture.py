"""Hugging Face configuration → Megatron-Core configuration, for decoders of the Llama family.

The family: pre-norm RMSNorm, rotary positions, grouped-query attention, SwiGLU, optional biases on q, k, v, optional
norms on q and k, tied or untied head. What a configuration asks for beyond that is refused by name: a student that
silently differs from its checkpoint is worse than none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedConfig

from megatron_kd import platform
from megatron_kd.config import ParallelConfig

_FAMILY = ("llama", "mistral", "qwen2", "qwen3")
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class Architecture:
    """What a GPTModel needs beside its TransformerConfig."""

    vocab_size: int  # true vocabulary
    padded_vocab_size: int  # rows of the embedding and the head: a multiple of 128 · tensor-parallel size
    tied: bool  # the head is the embedding
    max_positions: int
    rope_theta: float
    rope_factor: float | None  # Llama 3's frequency scaling; None: plain rotary embedding


def architecture(hf: PreTrainedConfig, parallel: ParallelConfig) -> Architecture:
    """The parts of the model outside the transformer block.

    Raises:
        ValueError: rotary scaling of a kind Megatron-Core's GPTModel does not build.
    """
    rope: dict[str, Any] = dict(hf.rope_parameters)
    kind = rope.get("rope_type", "default")
    if kind == "llama3":
        different = {key: rope.get(key) for key, value in _LLAMA3_ROPE.items() if rope.get(key) != value}
        if different:
            raise ValueError(f"rope_parameters holds {different}; Megatron-Core builds only {_LLAMA3_ROPE}")
    elif kind != "default":
        raise ValueError(f"rope_parameters has rope_type {kind!r}; supported: 'default', 'llama3'")
    multiple = 128 * parallel.tensor
    return Architecture(
        vocab_size=hf.vocab_size,
        padded_vocab_size=-(-hf.vocab_size // multiple) * multiple,
        tied=hf.tie_word_embeddings,
        max_positions=hf.max_position_embeddings,
        rope_theta=float(rope["rope_theta"]),
        rope_factor=float(rope["factor"]) if kind == "llama3" else None,
    )


def transformer_config(
    hf: PreTrainedConfig, parallel: ParallelConfig, *, dtype: torch.dtype, recompute: bool = False
) -> TransformerConfig:
    """Megatron-Core's configuration of the same model.

    Args:
        hf: a model of the Llama family.
        parallel: the layout; sizes that do not divide are refused here, by the number that fails.
        dtype: of parameters and activations.
        recompute: recompute each layer's activations in backward.

    Raises:
        ValueError: a model or layout that cannot be built, naming what fails.
    """
    _check_family(hf)
    _check_layout(hf, parallel)
    fused = platform.has_transformer_engine()
    return TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=_head_dim(hf),
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        add_qkv_bias=has_qkv_bias(hf),
        qk_layernorm=has_qk_norm(hf),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        bias_activation_fusion=fused,
        bias_dropout_fusion=fused,
        apply_rope_fusion=fused,
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
        sequence_parallel=parallel.sequence_parallel,
        calculate_per_token_loss=True,  # the step's loss is a mean over tokens, not over micro-batches' means
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
    )


def _leave_as_it_is(weight: Tensor) -> Tensor:
    return weight


def has_qkv_bias(hf: PreTrainedConfig) -> bool:
    """Whether q, k and v have biases."""
    return hf.model_type == "qwen2" or bool(getattr(hf, "attention_bias", False))


def has_qk_norm(hf: PreTrainedConfig) -> bool:
    """Whether q and k are normalised per head."""
    return hf.model_type == "qwen3"


def _head_dim(hf: PreTrainedConfig) -> int:
    return getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads


def _check_family(hf: PreTrainedConfig) -> None:
    if hf.model_type not in _FAMILY:
        raise ValueError(f"model_type is {hf.model_type!r}; a student is built from one of {', '.join(_FAMILY)}")
    if hf.hidden_act != "silu":
        raise ValueError(f"hidden_act is {hf.hidden_act!r}; 'silu' is needed")
    if getattr(hf, "mlp_bias", False):
        raise ValueError("mlp_bias is true; biases in the MLP are not supported")
    if hf.model_type in ("llama", "qwen3") and getattr(hf, "attention_bias", False):
        # Their attention_bias also puts a bias on the output projection.
        raise ValueError(f"attention_bias is true; {hf.model_type} with it is not supported")
    windows = getattr(hf, "sliding_window", None) if getattr(hf, "use_sliding_window", True) else None
    if windows:
        raise ValueError(f"sliding_window is {windows}; only full attention is supported")


def _check_layout(hf: PreTrainedConfig, parallel: ParallelConfig) -> None:
    chunks = parallel.pipeline * (parallel.virtual_pipeline or 1)
    for what, number, by, divisor in (
        ("num_attention_heads", hf.num_attention_heads, "parallel.tensor", parallel.tensor),
        ("num_key_value_heads", hf.num_key_value_heads, "parallel.tensor", parallel.tensor),
        ("intermediate_size", hf.intermediate_size, "parallel.tensor", parallel.tensor),
        ("num_hidden_layers", hf.num_hidden_layers, "parallel.pipeline · virtual_pipeline", chunks),
    ):
        if number % divisor:
            raise ValueError(f"{what} = {number} does not divide by {by} = {divisor}")
