"""Model families: what a Hugging Face configuration says, in the terms in which Megatron-Core is configured.

A decoder of these families is pre-norm RMSNorm, rotary positions and grouped-query attention; on top of that

    llama, mistral, qwen2, qwen3     SwiGLU
    mixtral, qwen3_moe               top-k of E experts, each SwiGLU
    gpt_oss                          top-k of E experts, each a clamped SwiGLU with an offset; attention sinks; biases

and any of them may confine some layers' attention to a window. What a configuration asks for beyond that is refused by
name: a student that silently differs from its checkpoint is worse than none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gpt_oss")
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_QUICK_GELU_ALPHA = 1.702  # x · sigmoid(1.702 x), the only gate of its kind that Megatron-Core has


@dataclass(frozen=True)
class Experts:
    """The mixture of experts that stands where the MLP is."""

    count: int
    active: int  # experts that a token goes to
    width: int  # hidden units of one
    softmax_first: bool  # weights are probabilities among all experts, rather than among those chosen


def experts_of(hf: PreTrainedConfig) -> Experts | None:
    """None for a model with a plain MLP."""
    if hf.model_type not in ("mixtral", "qwen3_moe", "gpt_oss"):
        return None
    return Experts(
        count=hf.num_experts,
        active=hf.num_experts_per_tok,
        width=getattr(hf, "moe_intermediate_size", hf.intermediate_size),
        softmax_first=not getattr(hf, "norm_topk_prob", True),
    )


def is_gpt_oss(hf: PreTrainedConfig) -> bool:
    """Whether attention has sinks, linears have biases, and experts the clamped SwiGLU: they come together."""
    return hf.model_type == "gpt_oss"


def has_qkv_bias(hf: PreTrainedConfig) -> bool:
    """Whether q, k and v have biases."""
    return hf.model_type == "qwen2" or bool(getattr(hf, "attention_bias", False))


def has_qk_norm(hf: PreTrainedConfig) -> bool:
    """Whether q and k are normalised per head."""
    return hf.model_type in ("qwen3", "qwen3_moe")


def head_dim(hf: PreTrainedConfig) -> int:
    return getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads


def windowed_layers(hf: PreTrainedConfig) -> list[bool]:
    """For each layer, whether a position sees only the last `sliding_window` positions, itself among them."""
    if not getattr(hf, "sliding_window", None):
        return [False] * hf.num_hidden_layers
    kinds = getattr(hf, "layer_types", None) or ["sliding_attention"] * hf.num_hidden_layers
    return [kind == "sliding_attention" for kind in kinds]


@dataclass(frozen=True)
class Rope:
    """Rotary positions: how far apart the frequencies are, and how they are stretched."""

    kind: str  # default, llama3 or yarn
    theta: float
    factor: float = 1.0
    yarn: tuple[tuple[str, Any], ...] = ()  # what Megatron-Core reads off the model's configuration under these names


def rope_of(hf: PreTrainedConfig) -> Rope:
    """Raises `ValueError` for a scaling that Megatron-Core's GPTModel does not build."""
    rope: dict[str, Any] = dict(hf.rope_parameters)
    kind, theta = rope.get("rope_type", "default"), float(rope["rope_theta"])
    if kind == "default":
        return Rope(kind, theta)
    if kind == "llama3":
        different = {key: rope.get(key) for key, value in _LLAMA3_ROPE.items() if rope.get(key) != value}
        if different:
            raise ValueError(f"rope_parameters holds {different}; Megatron-Core builds only {_LLAMA3_ROPE}")
        return Rope(kind, theta, float(rope["factor"]))
    if kind == "yarn":
        return Rope(kind, theta, float(rope["factor"]), _yarn(rope))
    raise ValueError(f"rope_parameters has rope_type {kind!r}; supported: 'default', 'llama3', 'yarn'")


def _yarn(rope: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    if rope.get("attention_factor") is not None:
        raise ValueError(
            f"rope_parameters has attention_factor {rope['attention_factor']}; Megatron-Core derives it from the factor"
        )
    # As transformers has it: unless both are given and not 0, the factor alone decides.
    scales = (rope.get("mscale"), rope.get("mscale_all_dim"))
    mscale, mscale_all_dim = scales if all(scales) else (None, None)
    return (
        ("yarn_rotary_scaling_factor", float(rope["factor"])),
        ("yarn_original_max_position_embeddings", int(rope["original_max_position_embeddings"])),
        ("yarn_beta_fast", float(rope.get("beta_fast") or 32)),
        ("yarn_beta_slow", float(rope.get("beta_slow") or 1)),
        ("yarn_mscale", mscale),
        ("yarn_mscale_all_dim", mscale_all_dim),
        ("yarn_correction_range_round_to_int", bool(rope.get("truncate", True))),
    )


def check_family(hf: PreTrainedConfig) -> None:
    """Raises `ValueError` naming the first setting that cannot be built."""
    if hf.model_type not in FAMILIES:
        raise ValueError(f"model_type is {hf.model_type!r}; a model is built from one of {', '.join(FAMILIES)}")
    if hf.hidden_act != "silu":
        raise ValueError(f"hidden_act is {hf.hidden_act!r}; 'silu' is needed")
    if getattr(hf, "mlp_bias", False):
        raise ValueError("mlp_bias is true; biases in the MLP are not supported")
    if hf.model_type in ("llama", "qwen3", "qwen3_moe") and getattr(hf, "attention_bias", False):
        # Their attention_bias also puts a bias on the output projection.
        raise ValueError(f"attention_bias is true; {hf.model_type} with it is not supported")
    if is_gpt_oss(hf):
        if not hf.attention_bias:
            raise ValueError("attention_bias is false; gpt_oss without it is not supported")
        if hf.swiglu_alpha != _QUICK_GELU_ALPHA:
            raise ValueError(f"swiglu_alpha is {hf.swiglu_alpha}; Megatron-Core builds only {_QUICK_GELU_ALPHA}")
    dense = getattr(hf, "mlp_only_layers", None) or getattr(hf, "decoder_sparse_step", 1) != 1
    if dense:
        raise ValueError("mlp_only_layers or decoder_sparse_step leaves some layers without experts: not supported")
