"""Tiny models of every family, random but reproducible, and their Megatron twins."""

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from megatron_kd.config import ParallelConfig

SIZES = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "head_dim": 8,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1.5e5,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 32,
}
FAMILY = {
    "llama, tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama 3, untied": LlamaConfig(**SIZES, tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE),
    "qwen2, biases": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen3, norms": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "mistral, window": MistralConfig(**SIZES, sliding_window=5),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "qwen3 moe": Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
    # Layers 0 and 2 see the last 5 positions; the limit is low enough to clamp.
    "gpt-oss": GptOssConfig(
        **SIZES,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=5,
        swiglu_limit=2.0,
        rope_parameters=YARN_ROPE,
    ),
}
EXPERTS = ("mixtral", "qwen3 moe", "gpt-oss")


def megatron_twin(config, tensors, length, parallel=None):
    """This rank's Megatron chunks of a model, filled from tensors by Hugging Face name; and its Architecture."""
    from megatron_kd.student.architecture import architecture, transformer_config
    from megatron_kd.student.convert import load_from_hf
    from megatron_kd.student.model import build_model

    parallel = parallel or ParallelConfig()
    arch = architecture(config, parallel)
    chunks = build_model(transformer_config(config, parallel, dtype=torch.float32), arch, length)
    load_from_hf(chunks, tensors, config, arch)
    return chunks, arch


def save_random_model(folder: Path, config: PreTrainedConfig, seed: int = 0) -> Path:
    """A model with weights large enough that every part of it shows in the logits."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    model.save_pretrained(folder)
    return folder
