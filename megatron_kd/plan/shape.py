"""A model in numbers: what its configuration says about sizes, and how many parameters a rank holds.

Letters: h hidden, q = heads · head size, k = key-value heads · head size, f width of the MLP or of one expert,
E experts, t tensor-, x expert-parallel ranks. A layer's parameters on a rank:

    attention    h·(q + 2k)/t + q·h/t,  biases (q + 2k)/t + h,  one sink a head,  two norms h
    MLP          3·h·f/t
    experts      router E·h, and E/x experts of 3·h·f each, whole on their rank; with biases 2f + h each

plus the embedding and the head, V/t rows of h each, V padded to a multiple of 128·t; one tensor where they are tied
and on one stage. What is split over experts' ranks is counted apart, as other ranks share its optimizer state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megatron_kd.config import RunConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder."""

    layers: int
    hidden: int  # h
    heads: int
    key_value_heads: int
    head_size: int
    width: int  # f
    experts: int  # E; 0 where there is a plain MLP
    active: int  # experts a token goes to; 1 for a plain MLP
    vocab: int  # V
    tied: bool
    windows: tuple[int | None, ...]  # of each layer: how many positions it sees; None: all before
    qkv_bias: bool = False
    qk_norm: bool = False
    biases: bool = False  # in every other linear, and sinks: GPT-OSS

    @property
    def query(self) -> int:
        """Q."""
        return self.heads * self.head_size

    @property
    def key_value(self) -> int:
        """K."""
        return self.key_value_heads * self.head_size

    def padded_vocab(self, tensor: int) -> int:
        """Rows of embedding and head over all ranks."""
        multiple = 128 * tensor
        return -(-self.vocab // multiple) * multiple


class Parameters(NamedTuple):
    """Of one rank."""

    shared: float  # outside the experts
    experts: float

    @property
    def total(self) -> float:
        return self.shared + self.experts


def model_shape(hf: PreTrainedConfig) -> ModelShape:
    """Reads a Hugging Face configuration; raises ValueError for a family that is not known."""
    from megatron_kd.student import families

    families.check_family(hf)
    experts = families.experts_of(hf)
    return ModelShape(
        layers=hf.num_hidden_layers,
        hidden=hf.hidden_size,
        heads=hf.num_attention_heads,
        key_value_heads=hf.num_key_value_heads,
        head_size=families.head_dim(hf),
        width=hf.intermediate_size if experts is None else experts.width,
        experts=0 if experts is None else experts.count,
        active=1 if experts is None else experts.active,
        vocab=hf.vocab_size,
        tied=hf.tie_word_embeddings,
        windows=tuple(hf.sliding_window if windowed else None for windowed in families.windowed_layers(hf)),
        qkv_bias=families.has_qkv_bias(hf),
        qk_norm=families.has_qk_norm(hf),
        biases=families.is_gpt_oss(hf),
    )


def student_config(config: RunConfig) -> PreTrainedConfig:
    """The student's Hugging Face configuration, its layers pruned; weights are not needed."""
    hf = (
        _hf_config(config.student.config or config.student.init, "student")
        if config.student.init or (config.student.config)
        else teacher_config(config)
    )
    kept = config.student.keep_layers
    if kept is not None:
        if getattr(hf, "layer_types", None):
            hf.layer_types = [hf.layer_types[layer] for layer in kept]
        hf.num_hidden_layers = len(kept)
    return hf


def teacher_config(config: RunConfig) -> PreTrainedConfig:
    """The teacher's Hugging Face configuration."""
    return _hf_config(config.teacher.config or config.teacher.model, "teacher")


def _hf_config(spec: str, who: str) -> PreTrainedConfig:
    from transformers import AutoConfig

    if spec.startswith("package:") or spec.endswith(".gguf"):
        from megatron_kd.teacher.weights import resolve_model

        spec = str(resolve_model(spec))
    try:
        return AutoConfig.from_pretrained(Path(spec).expanduser() if Path(spec).expanduser().exists() else spec)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{who}: no configuration found at {spec!r}; set {who}.config to a config.json: {reason}"
        ) from None


def rank_parameters(shape: ModelShape, layers: int, *, tensor: int, expert: int, first: bool, last: bool) -> Parameters:
    """Parameters of a rank that holds `layers` layers, and the embedding (first) or the head (last) or both."""
    h, q, k, f, t = shape.hidden, shape.query, shape.key_value, shape.width, tensor
    shared = h * (q + 2 * k) / t + q * h / t + 2 * h
    experts = 0.0
    shared += (q + 2 * k) / t * shape.qkv_bias + 2 * shape.head_size * shape.qk_norm
    shared += (h + shape.heads / t) * shape.biases
    if shape.experts:
        shared += shape.experts * (h + shape.biases)
        experts = shape.experts / expert * (3 * h * f + (2 * f + h) * shape.biases)
    else:
        shared += 3 * h * f / t
    vocabulary = shape.padded_vocab(t) / t * h
    tables = 1 if shape.tied and first and last else int(first) + int(last)
    return Parameters(layers * shared + tables * vocabulary + h * last, layers * experts)


def model_parameters(shape: ModelShape) -> float:
    """Of the whole model, without padding."""
    whole = replace(shape, vocab=0)
    tables = (1 if shape.tied else 2) * shape.vocab * shape.hidden
    return rank_parameters(whole, shape.layers, tensor=1, expert=1, first=True, last=True).total + tables


class TokenFlops(NamedTuple):
    """Forward FLOPs of one position, by what does them; training takes three times as many."""

    layers: tuple[float, ...]  # of each layer
    head: float


def token_flops(shape: ModelShape, sequence: int) -> TokenFlops:
    """A multiplication and an addition each, by student/flops.py's rule, which reads the same off a Megatron model."""
    h, q, k = shape.hidden, shape.query, shape.key_value
    linears = 2 * (h * (q + 2 * k) + q * h + shape.experts * h + shape.active * 3 * h * shape.width)
    seen = [_mean_seen(sequence, window) for window in shape.windows]
    return TokenFlops(tuple(linears + 2 * 2 * q * positions for positions in seen), 2 * h * shape.vocab)


def _mean_seen(sequence: int, window: int | None) -> float:
    window = min(window or sequence, sequence)
    return window - window**2 / (2 * sequence)
