"""Floating-point operations of training a model on one token: the figure that TFLOP/s are counted in.

Only what the model needs is counted, not what is computed again (activation recompute, the fused loss's second
projection), nor a teacher. With D hidden, H heads of size d, G query groups, F the MLP's width, S positions:

    multiply-adds a layer = D·H·d + 2·D·G·d + H·d·D          projections
                          + 2·H·d·keys                       attention, keys = those that a query sees on average
                          + 3·D·F (2·D·F without a gate), or for experts: top-k · that + D · experts
    operations            = 2 · 3 · (all layers + D·V)       backward takes twice the forward

Causal attention sees S/2 keys, a window of w at most w. This is the paper's rule: it gives GPT-OSS-20B at 32,768
positions 3.13e10 (arXiv 2608.03796's TFLOP/s and step times imply the same).
"""

from __future__ import annotations

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention


def training_flops_per_token(config: TransformerConfig, vocab_size: int, sequence_length: int) -> float:
    """Floating-point operations of forward and backward, for one of `sequence_length` positions of a document."""
    d, head = config.hidden_size, config.kv_channels
    queries, keys = config.num_attention_heads * head, config.num_query_groups * head
    projections = 2 * d * queries + 2 * d * keys
    total = float(d * vocab_size)
    for layer in range(1, config.num_layers + 1):
        total += projections + 2 * queries * _visible(config, layer, sequence_length) + _mlp(config, layer)
    return 2 * 3 * total


def _visible(config: TransformerConfig, layer: int, length: int) -> float:
    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer):
        return length / 2
    window = min(config.window_size[0] + 1, length)  # Megatron counts the keys before the query
    return window - window**2 / (2 * length)


def _mlp(config: TransformerConfig, layer: int) -> float:
    matrices = 3 if config.gated_linear_unit else 2
    d, experts, every = config.hidden_size, config.num_moe_experts, config.moe_layer_freq
    routed = experts and (every[layer - 1] if isinstance(every, list) else (layer - 1) % every == 0)
    if not routed:
        return matrices * d * config.ffn_hidden_size
    shared = config.moe_shared_expert_intermediate_size or 0
    return matrices * d * (config.moe_router_topk * config.moe_ffn_hidden_size + shared) + d * experts
