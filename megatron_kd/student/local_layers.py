"""Layers of Megatron-Core's own (not Transformer Engine's) implementation, with what it leaves out of them.

    RMSNorm              torch's, which Megatron-Core refuses under sequence parallelism: that takes no more than a
                         mark on the weight, by which its gradient is summed over the tensor-parallel ranks
    WindowedAttention    Megatron-Core's, whose sliding window replaces the mask it is given: packed documents would
                         see each other

    linear_fc2 of experts   adds its bias in place to what a reduction over one rank returned, which autograd refuses

Collectives: none of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor
from torch.nn import Module

from megatron_kd import platform


class RMSNorm(torch.nn.RMSNorm):
    """torch's, constructed as Megatron-Core constructs a norm."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


class WindowedAttention(DotProductAttention):
    """Attention in which a layer's window narrows the mask further."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._window = self.scale_mask_softmax.window_size
        self.scale_mask_softmax.window_size = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **kwargs: Any) -> Tensor:
        """As Megatron-Core's; attention_mask [b, 1, S, S] is true where attention is forbidden."""
        if self._window is not None:
            before, _ = self._window  # positions it reaches back
            attention_mask = attention_mask | torch.ones_like(attention_mask).tril(-before - 1)
        return super().forward(query, key, value, attention_mask, **kwargs)


def leave_experts_alone(chunk: Module) -> None:
    """Takes the reduction over the one rank that holds an expert out of its second linear."""
    for module in chunk.modules():
        if isinstance(module, RowParallelLinear) and module.is_expert:
            module.explicit_expert_comm = True


def local_block(config: TransformerConfig, stage: int | None) -> TransformerBlockSubmodules:
    """The layers of one chunk of a model, and its final norm. `stage`: its virtual pipeline stage."""
    platform.supply_te_general_gemm()
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, normalization="RMSNorm", qk_layernorm=config.qk_layernorm
    )
    parts, attention = layer.submodules, layer.submodules.self_attention.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention.core_attention = WindowedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if config.num_moe_experts is not None:
        # Checkpoints call this norm as Transformer Engine's layers do, which fuse it with an MLP but not with experts.
        del parts.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    return TransformerBlockSubmodules([layer] * get_num_layers_to_build(config, stage), RMSNorm)
