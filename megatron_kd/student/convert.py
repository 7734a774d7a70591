"""Weights between Hugging Face's layout of the Llama family and Megatron-Core's GPTModel.

Megatron packs what is computed together. With g query groups on a rank,

    linear_qkv = for each group: its q heads, its k head, its v head        (g groups of three parts)
    linear_fc1 = gate, up                                                   (one group of two parts)

and everything else is one part in one group, so a single pair of functions, `_pack` and `_unpack`, covers all.
Tensor-parallel ranks hold a slice of every *part*, which is why slicing comes before packing.

Collectives: none; each rank reads its own slices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module, functional
from transformers import PreTrainedConfig

from megatron_kd.student.architecture import Architecture


@dataclass(frozen=True)
class _Packed:
    """How one Megatron parameter is made of Hugging Face tensors."""

    parts: tuple[str, ...]  # Hugging Face names, in packing order
    split: int | None  # dimension of each part that tensor parallelism slices; None: replicated
    groups: int = 1  # groups on this rank whose parts alternate
    vocabulary: bool = False  # rows are vocabulary entries and padded


def load_from_hf(chunks: list[Module], weights: Mapping[str, Tensor], hf: PreTrainedConfig, arch: Architecture) -> None:
    """Fills this rank's model chunks, any TP × PP layout, in place.

    Args:
        chunks: GPTModels of this rank, not yet wrapped.
        weights: tensors by Hugging Face name; read once each.
        hf: the model's configuration.
        arch: what lies outside its transformer block.

    Raises:
        ValueError: a parameter without a counterpart, or a tensor of the wrong shape, by name.
    """
    with torch.no_grad():
        for chunk in chunks:
            rank, size = chunk.pg_collection.tp.rank(), chunk.pg_collection.tp.size()
            for name, parameter, packed in _layout(chunk, hf):
                parts = [_part(weights, part, packed, arch, rank, size) for part in packed.parts]
                value = _pack(parts, packed.groups)
                if value.shape != parameter.shape:
                    raise ValueError(
                        f"{name} has shape {tuple(parameter.shape)}; the checkpoint gives {tuple(value.shape)}"
                    )
                parameter.copy_(value)


def export_to_hf(chunks: list[Module], hf: PreTrainedConfig, arch: Architecture) -> dict[str, Tensor]:
    """Hugging Face names and tensors of a model that is whole on this rank (TP 1, PP 1)."""
    tensors: dict[str, Tensor] = {}
    for chunk in chunks:
        if chunk.pg_collection.tp.size() > 1 or chunk.pg_collection.pp.size() > 1:
            raise ValueError("export needs the whole model on one rank: load the checkpoint with TP 1 and PP 1")
        for _, parameter, packed in _layout(chunk, hf):
            sizes = _part_sizes(packed, hf, parameter)
            for part, tensor in zip(packed.parts, _unpack(parameter.detach(), packed.groups, sizes)):
                # A copy: parts of one parameter share its storage, which safetensors refuses to write.
                tensors[part] = tensor[: arch.vocab_size].clone() if packed.vocabulary else tensor.clone()
    return tensors


def _layout(chunk: Module, hf: PreTrainedConfig) -> Iterator[tuple[str, Tensor, _Packed]]:
    groups = hf.num_key_value_heads // chunk.pg_collection.tp.size()
    parameters = dict(chunk.named_parameters())
    layers = getattr(chunk.decoder, "layers", ())
    number = {f"decoder.layers.{index}.": layer.layer_number - 1 for index, layer in enumerate(layers)}
    for name, parameter in parameters.items():
        prefix = next((prefix for prefix in number if name.startswith(prefix)), "")
        packed = _outside(name) if not prefix else _inside(name.removeprefix(prefix), number[prefix], groups)
        if packed is None:
            raise ValueError(f"{name}: no counterpart in a Hugging Face checkpoint of the Llama family")
        if name == "output_layer.weight" and hf.tie_word_embeddings:
            packed = _outside("embedding.word_embeddings.weight")
            assert packed is not None
        yield name, parameter, packed


def _outside(name: str) -> _Packed | None:
    return {
        "embedding.word_embeddings.weight": _Packed(("model.embed_tokens.weight",), 0, vocabulary=True),
        "decoder.final_layernorm.weight": _Packed(("model.norm.weight",), None),
        "output_layer.weight": _Packed(("lm_head.weight",), 0, vocabulary=True),
    }.get(name)


def _inside(name: str, layer: int, groups: int) -> _Packed | None:
    prefix = f"model.layers.{layer}."
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    qkv = ("q_proj", "k_proj", "v_proj")
    input_norm = _Packed((prefix + "input_layernorm.weight",), None)
    mlp_norm = _Packed((prefix + "post_attention_layernorm.weight",), None)
    return {
        # Transformer Engine's layers carry the norm inside the linear; the local ones have it apart.
        "input_layernorm.weight": input_norm,
        "self_attention.linear_qkv.layer_norm_weight": input_norm,
        "pre_mlp_layernorm.weight": mlp_norm,
        "mlp.linear_fc1.layer_norm_weight": mlp_norm,
        "self_attention.linear_qkv.weight": _Packed(tuple(f"{attention}{p}.weight" for p in qkv), 0, groups),
        "self_attention.linear_qkv.bias": _Packed(tuple(f"{attention}{p}.bias" for p in qkv), 0, groups),
        "self_attention.q_layernorm.weight": _Packed((attention + "q_norm.weight",), None),
        "self_attention.k_layernorm.weight": _Packed((attention + "k_norm.weight",), None),
        "self_attention.linear_proj.weight": _Packed((attention + "o_proj.weight",), 1),
        "mlp.linear_fc1.weight": _Packed((mlp + "gate_proj.weight", mlp + "up_proj.weight"), 0),
        "mlp.linear_fc2.weight": _Packed((mlp + "down_proj.weight",), 1),
    }.get(name)


def _part(
    weights: Mapping[str, Tensor], name: str, packed: _Packed, arch: Architecture, rank: int, size: int
) -> Tensor:
    if name not in weights:
        raise ValueError(f"the checkpoint has no tensor {name!r}")
    tensor = weights[name]
    if packed.vocabulary:
        tensor = functional.pad(tensor, (0, 0, 0, arch.padded_vocab_size - tensor.shape[0]))
    return tensor if packed.split is None else tensor.chunk(size, dim=packed.split)[rank]


def _pack(parts: list[Tensor], groups: int) -> Tensor:
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)


def _unpack(tensor: Tensor, groups: int, sizes: list[int]) -> list[Tensor]:
    parts = tensor.unflatten(0, (groups, -1)).split([size // groups for size in sizes], dim=1)
    return [part.flatten(0, 1) for part in parts]


def _part_sizes(packed: _Packed, hf: PreTrainedConfig, parameter: Tensor) -> list[int]:
    rows = parameter.shape[0]
    if len(packed.parts) == 3:
        per_group = rows // (hf.num_attention_heads + 2 * hf.num_key_value_heads)
        return [per_group * hf.num_attention_heads] + 2 * [per_group * hf.num_key_value_heads]
    return [rows // len(packed.parts)] * len(packed.parts)
