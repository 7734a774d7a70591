"""The seam between the loss and a Megatron-Core model.

The fused loss *is* the output layer: it needs the hidden states that enter it and the weight inside it, and must
run inside `output_layer.__call__`, where Megatron's own hooks (the wait for overlapped parameter gathers, for one)
fire. So `attach` overrides two methods on the built instances, before DistributedDataParallel wraps them:

    output_layer.forward(hidden [s, b, h])      →  per-position loss [s, b] in place of logits, when targets are set
    compute_language_model_loss(labels, that)   →  the very same tensor as [b, s], recognised by identity

Class names, module names and state-dict keys stay as they are. With no targets set, both are the stock methods, bit for
bit. Targets are queued per chunk, first in first out, so that interleaved schedules, which run several forwards before
the first backward, pair each microbatch with its own.

Shapes: s sequence, b micro-batch, h hidden, K teacher entries; batch-first [b, s, …] outside, as in Megatron's data
pipeline, sequence-first inside. Collectives: the loss's own, on the output layer's tensor-parallel group.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor
from torch.nn import Module

from megatron_kd.config import LossConfig
from megatron_kd.loss import KDLoss, TeacherTopK, fused_linear_kl, validate

# Settings under which the logits, or the head's gradient, are not simply hidden · weightᵀ.
_REFUSED_SETTINGS = {
    "mtp_num_layers": "multi-token-prediction heads call the same output layer and would take the targets",
    "use_mup": "its scaling of the logits would be applied to the loss",
    "defer_embedding_wgrad_compute": "the head's weight gradient is formed inside the loss and cannot be deferred",
}


@dataclass(frozen=True)
class _Targets:
    teacher: TeacherTopK  # entries [s, b, K]
    labels: Tensor | None  # [s, b]
    loss_mask: Tensor | None  # [s, b]


class KDHandle:
    """What `attach` returns: where targets go in and metrics come out."""

    def __init__(self, heads: Sequence[_Head]) -> None:
        self._heads = {id(head.chunk): head for head in heads}

    @property
    def has_head(self) -> bool:
        """Whether a chunk of this rank has an output layer, and so needs targets."""
        return bool(self._heads)

    def set_targets(
        self,
        model_chunk: Module,
        teacher: TeacherTopK,
        *,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
    ) -> None:
        """Queues the targets of the next microbatch of this chunk. A no-op on chunks without an output layer.

        Args:
            model_chunk: the attached chunk, wrapped (DDP, Float16Module) or not.
            teacher: ids and logprobs [b, s, K], tail_logprob [b, s]; position t holds the target for token t+1.
            labels: [b, s], needed where ce_weight > 0.
            loss_mask: [b, s]; 0 where the position costs nothing.
        """
        head = self._heads.get(id(_unwrapped(model_chunk)))
        if head is None:
            return
        tail = teacher.tail_logprob
        head.queue.append(
            _Targets(
                TeacherTopK(
                    _sequence_first(teacher.ids),
                    _sequence_first(teacher.logprobs),
                    None if tail is None else _sequence_first(tail),
                ),
                None if labels is None else _sequence_first(labels),
                None if loss_mask is None else _sequence_first(loss_mask),
            )
        )

    def pop_metrics(self) -> dict[str, Tensor]:
        """Detached sums since the last call, on this rank, weighted by the loss mask.

        `kd`, `ce` in nats; `tail` the teacher's mass off its entries; `support` the student's mass on them; `tokens`
        the sum of the mask. Empty on ranks without an output layer.
        """
        total: dict[str, Tensor] = {}
        for head in self._heads.values():
            for name, value in head.sums.items():
                total[name] = total[name] + value if name in total else value
            head.sums = {}
        return total


def attach(model_chunks: Sequence[Module], loss: LossConfig, *, vocab_size: int | None = None) -> KDHandle:
    """Makes the fused distillation loss the output layer of a model. Call it before DDP wraps the chunks.

    Args:
        model_chunks: this rank's GPTModel chunks; only those with `post_process` are touched.
        loss: objective and chunking.
        vocab_size: true vocabulary; columns at or past it are padding. None: every column is real.

    Raises:
        ValueError: a setting under which the loss would be wrong, by name, with the reason.
    """
    heads = []
    for chunk in map(_unwrapped, model_chunks):
        if getattr(chunk, "post_process", False):
            _refuse_unsupported(chunk)
            heads.append(_Head(chunk, loss, vocab_size))
    return KDHandle(heads)


class _Head:
    """The two overridden methods of one chunk, its queue of targets and its sums."""

    def __init__(self, chunk: Module, loss: LossConfig, vocab_size: int | None) -> None:
        self.chunk = chunk
        self.queue: deque[_Targets] = deque()
        self.sums: dict[str, Tensor] = {}
        self._loss, self._vocab_size = loss, vocab_size
        self._validated = False
        self._passing: Tensor | None = None  # the loss on its way from the output layer to the model's loss
        self._stock_forward = chunk.output_layer.forward
        self._stock_loss = chunk.compute_language_model_loss
        chunk.output_layer.forward = self.forward
        chunk.compute_language_model_loss = self.compute_language_model_loss

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        self._passing = None
        if not self.queue:
            return self._stock_forward(input_, weight=weight, runtime_gather_output=runtime_gather_output, **kwargs)
        if runtime_gather_output:
            raise ValueError("runtime_gather_output is set while distillation targets are; the loss keeps logits local")
        targets, layer = self.queue.popleft(), self.chunk.output_layer
        head = (input_, layer.weight if weight is None else weight, targets.teacher)
        options: dict[str, Any] = {
            "objective": self._loss.objective,
            "labels": targets.labels,
            "loss_mask": targets.loss_mask,
            "bias": None if layer.skip_bias_add else layer.bias,
            "vocab_size": self._vocab_size,
            "chunk_tokens": self._loss.chunk_tokens,
            "backward": self._loss.backward,
            "tp_group": layer.tp_group,
            "sequence_parallel": layer.sequence_parallel,
            "accumulate_main_grad": layer.gradient_accumulation_fusion,
        }
        if not self._validated:
            # Looking at values makes the host wait for the device: once, before anything is trained on them.
            validate(*head, **options)
            self._validated = True
        losses = fused_linear_kl(*head, **options)
        self._add(losses, targets.loss_mask)
        self._passing = losses.loss
        return losses.loss, None

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        if logits is not self._passing or self._passing is None:
            return self._stock_loss(labels, logits)
        self._passing = None
        return logits.transpose(0, 1).contiguous()

    def _add(self, losses: KDLoss, loss_mask: Tensor | None) -> None:
        per_position = {"kd": losses.kd, "ce": losses.ce, "tail": losses.tail, "support": losses.support}
        sums = {name: value.sum() for name, value in per_position.items() if value is not None}
        sums["tokens"] = sums["kd"].new_tensor(losses.kd.numel()) if loss_mask is None else loss_mask.sum()
        for name, value in sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value


def _refuse_unsupported(chunk: Module) -> None:
    for name, reason in _REFUSED_SETTINGS.items():
        if getattr(chunk.config, name, None):
            raise ValueError(f"the model is configured with {name} = {getattr(chunk.config, name)}: {reason}")
    layer = chunk.output_layer
    if not isinstance(layer, ColumnParallelLinear):
        raise ValueError(f"output_layer is a {type(layer).__name__}; a plain ColumnParallelLinear is needed")
    if layer.gather_output:
        raise ValueError("the model was built with parallel_output=False; the loss needs the vocabulary-parallel head")


def _unwrapped(module: Module) -> Module:
    while isinstance(getattr(module, "module", None), Module):
        module = module.module
    return module


def _sequence_first(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1).contiguous()
