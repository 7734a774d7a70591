"""The `megatron` engine: a Megatron-Core model whose layers and vocabulary are split over the ranks of a replica.

It is built like a student, from the Hugging Face folder's configuration, and filled from that folder or from a
checkpoint. Its output layer hands on the hidden states that enter it: the projection is topk.py's, chunk by chunk.
A forward is one micro-batch of Megatron-Core's own schedule, so that stages pass activations on as in training; only
the last stage sees hidden states, and there the tensor-parallel ranks see the same ones.

Ranks that share out the experts need one another in every layer: together they are a replica, in which what Megatron
calls data-parallel ranks each compute a share of a micro-batch. Expert-parallel ranks are neighbours, and so are
tensor-parallel ones: the larger number must be a multiple of the smaller.

Shapes: b samples, S positions, D hidden. Collectives: the model's, and the transfers between stages.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor
from torch.nn import Module

from megatron_kd import platform
from megatron_kd.config import ParallelConfig, TeacherConfig
from megatron_kd.data.attention import document_attention
from megatron_kd.student.architecture import architecture, transformer_config
from megatron_kd.student.checkpoint import load_weights
from megatron_kd.student.convert import load_from_hf
from megatron_kd.student.families import experts_of
from megatron_kd.student.hf_weights import HfWeights
from megatron_kd.student.model import build_model, initialize_parallel
from megatron_kd.teacher.engine import Head, Replica, Share


def join_replica(teacher: TeacherConfig) -> Replica:
    """Joins the process group and finds this rank's place.

    Raises:
        ValueError: the number of ranks does not divide into replicas.
    """
    if teacher.expert % teacher.tensor and teacher.tensor % teacher.expert:
        raise ValueError(
            f"teacher.expert is {teacher.expert}, teacher.tensor {teacher.tensor}: one must be a multiple of the other"
        )
    platform.init_distributed()
    initialize_parallel(_layout(teacher), seed=0)
    group, shares = parallel_state.get_tensor_model_parallel_group(), max(teacher.expert // teacher.tensor, 1)
    index, part = divmod(parallel_state.get_data_parallel_rank(), shares)
    experts = parallel_state.get_expert_model_parallel_group() if shares > 1 else None
    return Replica(
        index=index,
        count=parallel_state.get_data_parallel_world_size() // shares,
        group=group if group.size() > 1 else None,
        leads=parallel_state.is_pipeline_last_stage(ignore_virtual=True) and group.rank() == part == 0,
        share=Share(part, shares, experts, copies=teacher.tensor),
    )


class MegatronEngine:
    """A Megatron-Core model; see `TeacherEngine` for the members."""

    def __init__(self, folder: Path, teacher: TeacherConfig, dtype: torch.dtype, sequence_length: int) -> None:
        """Builds this rank's part and fills it; `join_replica` comes first. Collective.

        Raises:
            ValueError: a model or layout that cannot be built, or weights that do not fill it; says what.
        """
        weights, layout = HfWeights(folder), _layout(teacher)
        if experts_of(weights.config) is not None:  # otherwise every tensor-parallel rank would route every token
            layout = replace(layout, sequence_parallel=teacher.tensor > 1)
        arch = architecture(weights.config, layout)
        config = transformer_config(weights.config, layout, dtype=dtype)
        (self._chunk,) = build_model(config, arch, sequence_length)
        if teacher.checkpoint:
            load_weights(Path(teacher.checkpoint), [self._chunk])
        else:
            load_from_hf([self._chunk], weights, weights.config, arch)
        self._chunk.eval().requires_grad_(False)
        self.dtype = dtype
        self.parameters = weights.parameters
        self.vocabulary_rows = arch.padded_vocab_size
        self.head = _take_head(self._chunk) if self._chunk.post_process else None
        self._packed = platform.has_transformer_engine()

    @torch.no_grad()
    def hidden_states(self, tokens: Tensor, segment: Tensor) -> Tensor | None:
        """[b, S, D] final hidden states of tokens [b, S] with document numbers [b, S]; None before the last stage."""
        device = platform.device()
        attention = document_attention(segment.cpu(), packed=self._packed, device=device)
        shape, tokens = tokens.shape, tokens.to(device)
        extra = {}
        if attention.packed is not None:
            tokens, extra = tokens.reshape(1, -1), {"packed_seq_params": attention.packed}
        positions = torch.arange(tokens.shape[1], device=device).expand_as(tokens)

        def step(_: Any, model: Module) -> tuple[Tensor, Any]:
            output = model(tokens, positions, attention.mask, **extra)
            return output, lambda hidden, non_loss_data: hidden

        found = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=None,
            model=self._chunk,
            num_microbatches=1,
            micro_batch_size=tokens.shape[0],
            seq_length=tokens.shape[1],
            forward_only=True,
            collect_non_loss_data=True,
        )
        return found[0].view(*shape, -1) if found else None


def _layout(teacher: TeacherConfig) -> ParallelConfig:
    return ParallelConfig(tensor=teacher.tensor, pipeline=teacher.pipeline, expert=teacher.expert)


def _take_head(chunk: Module) -> Head:
    """The output projection of a model's last part, which from now on returns the hidden states that enter it."""
    layer = chunk.output_layer

    def forward(hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        if layer.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=layer.tp_group)
        return hidden, None

    layer.forward = forward
    weight = chunk.shared_embedding_or_output_weight() if layer.weight is None else layer.weight
    return Head(weight, layer.bias)
