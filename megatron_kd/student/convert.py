"""Weights between Hugging Face's layouts of the families and Megatron-Core's GPTModel.

Megatron packs what is computed together. With g query groups on a rank,

    linear_qkv = for each group: its q heads, its k head, its v head        (g groups of three parts)
    linear_fc1 = gate, up                                                   (one group of two parts)

and everything else is one part in one group, so a single pair of functions, `_pack` and `_unpack`, covers all.
Tensor-parallel ranks hold a slice of every *part*, which is why slicing comes before packing. Expert-parallel ranks
hold whole experts, rank r of n those from r·E/n on. GPT-OSS keeps its E experts in one tensor [E, inputs, outputs],
where gate and up take turns: as many groups of two parts as there are hidden units.

Collectives: none; each rank reads its own slices.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import Module, functional
from transformers import PreTrainedConfig

from megatron_kd.student.architecture import Architecture
from megatron_kd.student.families import experts_of

# An expert's parameter, one module an expert, or one grouped module (Transformer Engine) with numbered parameters.
_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.)?(linear_fc[12]\.(?:weight|bias))(\d*)")


@dataclass(frozen=True)
class _Packed:
    """How one Megatron parameter is made of Hugging Face tensors."""

    parts: tuple[str, ...]  # Hugging Face names, in packing order
    split: int | None = None  # dimension of each part that tensor parallelism slices; None: replicated
    groups: int = 1  # groups on this rank whose parts alternate
    vocabulary: bool = False  # rows are vocabulary entries and padded
    expert: int | None = None  # where one tensor holds all experts: which of them
    turns: int = 1  # parts in such a tensor, whose rows take turns


def load_from_hf(chunks: list[Module], weights: Mapping[str, Tensor], hf: PreTrainedConfig, arch: Architecture) -> None:
    """Fills this rank's model chunks, any TP × PP × EP layout, in place.

    Args:
        chunks: GPTModels of this rank, not yet wrapped.
        weights: tensors by Hugging Face name; read once each.
        hf: the model's configuration.
        arch: what lies outside its transformer block.

    Raises:
        ValueError: a parameter without a counterpart, or a tensor of the wrong shape, by name.
    """
    parameters = [(chunk, *entry) for chunk in chunks for entry in _layout(chunk, hf)]
    parameters.sort(key=lambda entry: entry[-1].parts)
    with torch.no_grad():
        for names, entries in groupby(parameters, key=lambda entry: entry[-1].parts):
            stored = [_stored(weights, name) for name in names]
            for chunk, name, parameter, packed in entries:
                tp = chunk.pg_collection.tp
                parts = [part for tensor in stored for part in _parts(tensor, packed, arch, tp.rank(), tp.size())]
                value = _pack(parts, packed.groups)
                if value.shape != parameter.shape:
                    raise ValueError(
                        f"{name} has shape {tuple(parameter.shape)}; the checkpoint gives {tuple(value.shape)}"
                    )
                parameter.copy_(value)


def export_to_hf(chunks: list[Module], hf: PreTrainedConfig, arch: Architecture) -> dict[str, Tensor]:
    """Hugging Face names and tensors of a model that is whole on this rank (TP 1, PP 1, EP 1)."""
    tensors: dict[str, Tensor] = {}
    for chunk in chunks:
        groups = chunk.pg_collection
        if max(groups.tp.size(), groups.pp.size(), groups.ep.size()) > 1:
            raise ValueError("export needs the whole model on one rank: load the checkpoint with TP 1, PP 1 and EP 1")
        for _, parameter, packed in _layout(chunk, hf):
            value = parameter.detach()
            if packed.expert is not None:
                _store_expert(tensors, value, packed, hf)
                continue
            for part, tensor in zip(packed.parts, _unpack(value, packed.groups, _part_sizes(packed, hf, value))):
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
        inside = name.removeprefix(prefix)
        if not prefix:
            packed = _outside(name)
        elif match := _EXPERT.fullmatch(inside):
            local, kind, grouped = match.groups()
            ep = chunk.pg_collection.ep
            first = ep.rank() * _experts(hf) // ep.size()
            packed = _expert(kind, f"model.layers.{number[prefix]}.", first + int(local or grouped), hf.model_type)
        else:
            packed = _inside(inside, f"model.layers.{number[prefix]}.", groups, hf.model_type)
        if packed is None:
            raise ValueError(f"{name}: no counterpart in a Hugging Face checkpoint of a {hf.model_type} model")
        if name == "output_layer.weight" and hf.tie_word_embeddings:
            packed = _outside("embedding.word_embeddings.weight")
            assert packed is not None
        yield name, parameter, packed


def _outside(name: str) -> _Packed | None:
    return {
        "embedding.word_embeddings.weight": _Packed(("model.embed_tokens.weight",), 0, vocabulary=True),
        "decoder.final_layernorm.weight": _Packed(("model.norm.weight",)),
        "output_layer.weight": _Packed(("lm_head.weight",), 0, vocabulary=True),
    }.get(name)


def _inside(name: str, prefix: str, groups: int, family: str) -> _Packed | None:
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    router = {"mixtral": prefix + "block_sparse_moe.gate.", "gpt_oss": mlp + "router."}.get(family, mlp + "gate.")
    qkv = ("q_proj", "k_proj", "v_proj")
    input_norm = _Packed((prefix + "input_layernorm.weight",))
    mlp_norm = _Packed((prefix + "post_attention_layernorm.weight",))
    return {
        # Transformer Engine's layers carry the norm inside the linear; the local ones have it apart.
        "input_layernorm.weight": input_norm,
        "self_attention.linear_qkv.layer_norm_weight": input_norm,
        "pre_mlp_layernorm.weight": mlp_norm,
        "mlp.linear_fc1.layer_norm_weight": mlp_norm,
        "self_attention.linear_qkv.weight": _Packed(tuple(f"{attention}{p}.weight" for p in qkv), 0, groups),
        "self_attention.linear_qkv.bias": _Packed(tuple(f"{attention}{p}.bias" for p in qkv), 0, groups),
        "self_attention.q_layernorm.weight": _Packed((attention + "q_norm.weight",)),
        "self_attention.k_layernorm.weight": _Packed((attention + "k_norm.weight",)),
        "self_attention.core_attention.softmax_offset": _Packed((attention + "sinks",), 0),
        "self_attention.linear_proj.weight": _Packed((attention + "o_proj.weight",), 1),
        "self_attention.linear_proj.bias": _Packed((attention + "o_proj.bias",)),
        "mlp.linear_fc1.weight": _Packed((mlp + "gate_proj.weight", mlp + "up_proj.weight"), 0),
        "mlp.linear_fc2.weight": _Packed((mlp + "down_proj.weight",), 1),
        "mlp.router.weight": _Packed((router + "weight",)),
        "mlp.router.bias": _Packed((router + "bias",)),
    }.get(name)


def _expert(name: str, prefix: str, expert: int, family: str) -> _Packed | None:
    if family == "gpt_oss":
        experts = prefix + "mlp.experts."
        return {
            "linear_fc1.weight": _Packed((experts + "gate_up_proj",), expert=expert, turns=2),
            "linear_fc1.bias": _Packed((experts + "gate_up_proj_bias",), expert=expert, turns=2),
            "linear_fc2.weight": _Packed((experts + "down_proj",), expert=expert),
            "linear_fc2.bias": _Packed((experts + "down_proj_bias",), expert=expert),
        }.get(name)
    mixtral = family == "mixtral"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    one = f"{prefix}{'block_sparse_moe' if mixtral else 'mlp'}.experts.{expert}."
    return {
        "linear_fc1.weight": _Packed((f"{one}{gate}.weight", f"{one}{up}.weight")),
        "linear_fc2.weight": _Packed((f"{one}{down}.weight",)),
    }.get(name)


def _stored(weights: Mapping[str, Tensor], name: str) -> Tensor:
    try:
        return weights[name]
    except KeyError:
        raise ValueError(f"the checkpoint has no tensor {name!r}") from None


def _parts(tensor: Tensor, packed: _Packed, arch: Architecture, rank: int, size: int) -> list[Tensor]:
    """What this rank holds of the parts in one stored tensor; one, but for experts stored together."""
    if packed.expert is not None:
        tensor = tensor[packed.expert].movedim(-1, 0)
        rows = len(tensor) // packed.turns
        return _unpack(tensor, rows, [rows] * packed.turns)
    if packed.vocabulary:
        tensor = functional.pad(tensor, (0, 0, 0, arch.padded_vocab_size - tensor.shape[0]))
    return [tensor if packed.split is None else tensor.chunk(size, dim=packed.split)[rank]]


def _store_expert(tensors: dict[str, Tensor], value: Tensor, packed: _Packed, hf: PreTrainedConfig) -> None:
    """The inverse of `_parts` for experts stored together: their parts take turns again, and outputs come last."""
    parts = value.chunk(packed.turns)
    value = _pack(list(parts), len(parts[0])).movedim(0, -1)
    (name,) = packed.parts
    if name not in tensors:
        tensors[name] = value.new_empty(_experts(hf), *value.shape)
    tensors[name][packed.expert] = value


def _experts(hf: PreTrainedConfig) -> int:
    experts = experts_of(hf)
    return 0 if experts is None else experts.count


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
