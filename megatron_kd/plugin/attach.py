"""The seam between the loss and a Megatron-Core model.

The fused loss *is* the output layer: it needs the hidden states that enter it and the weight inside it, and must
run inside `output_layer.__call__`, where Megatron's own hooks (the wait for overlapped parameter gathers, for one)
fire. So `attach` overrides methods on the built instances, before DistributedDataParallel wraps them:

    output_layer.forward(hidden [s, b, h])    the per-position loss [s, b] in place of logits, where there are targets

and one of two ways to bring a microbatch's targets there and its loss back:

    model.forward, build_schedule_plan        where they take `output_processor` (GPTModel from megatron-core 0.18 on):
                                              targets travel as its context, whatever the schedule, and its result, the
                                              loss [b, s], is the model's
    compute_language_model_loss(labels, loss) elsewhere: the next call of the output layer takes the targets, and the
                                              loss is recognised here by identity and passed through as [b, s]

Class names, module names and state-dict keys stay as they are. With no targets set, all are the stock methods, bit for
bit. Targets are queued per chunk, first in first out, so that interleaved schedules, which run several forwards before
the first backward, pair each microbatch with its own.

Shapes: s sequence, b micro-batch, h hidden, K teacher entries; batch-first [b, s, …] outside, as in Megatron's data
pipeline, sequence-first inside. Collectives: the loss's own, on the output layer's tensor-parallel group.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor
from torch.nn import Module

from megatron_kd.config import LossConfig
from megatron_kd.loss import CACHED_LOSSES, KDLoss, TeacherTopK, validate

# Settings under which the logits, or the head's gradient, are not simply hidden · weightᵀ.
_REFUSED_SETTINGS = {
    "use_mup": "the loss does not know its scaling of the logits",
    "final_logit_softcapping": "the loss does not know of capped logits",
    "logit_dtype": "the loss chooses the precision of its logits itself",
    "fp8_output_proj": "the head's products are formed inside the loss, in the weight's own precision",
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
    if loss.implementation not in CACHED_LOSSES:
        raise ValueError(
            f"loss.implementation is {loss.implementation!r}, which takes a resident teacher's hidden states: call "
            f"megatron_kd.loss.online_kl yourself; from cached targets there are {', '.join(CACHED_LOSSES)}"
        )
    heads = []
    for chunk in map(_unwrapped, model_chunks):
        if getattr(chunk, "post_process", False):
            _refuse_unsupported(chunk)
            heads.append(_Head(chunk, loss, vocab_size))
    return KDHandle(heads)


class _Head:
    """The overridden methods of one chunk, its queue of targets and its sums."""

    def __init__(self, chunk: Module, loss: LossConfig, vocab_size: int | None) -> None:
        self.chunk = chunk
        self.queue: deque[_Targets] = deque()
        self.sums: dict[str, Tensor] = {}
        self._loss, self._vocab_size = loss, vocab_size
        self._validated = False
        self._stock_output_layer = chunk.output_layer.forward
        chunk.output_layer.forward = self.output_layer
        self._processes = takes_output_processor(chunk)
        if self._processes:
            self._handed_over: _Targets | None = None  # from the processor to the output layer that it calls
            for name in ("forward", "build_schedule_plan"):
                setattr(chunk, name, self._with_processor(getattr(chunk, name)))
        else:
            self._passing: Tensor | None = None  # the loss on its way from the output layer to the model's loss
            self._stock_loss = chunk.compute_language_model_loss
            chunk.compute_language_model_loss = self.compute_language_model_loss

    def output_layer(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """In the place of the output layer's forward."""
        targets = self._take()
        if targets is None:
            return self._stock_output_layer(
                input_, weight=weight, runtime_gather_output=runtime_gather_output, **kwargs
            )
        if runtime_gather_output:
            raise ValueError("runtime_gather_output is set while distillation targets are; the loss keeps logits local")
        layer = self.chunk.output_layer
        losses = self._distil(input_, layer.weight if weight is None else weight, targets)
        self._add(losses, targets.loss_mask)
        if not self._processes:
            self._passing = losses.loss
        return losses.loss, None

    def _take(self) -> _Targets | None:
        if self._processes:  # multi-token-prediction heads call the output layer too, with nothing handed over
            targets, self._handed_over = self._handed_over, None
            return targets
        self._passing = None
        return self.queue.popleft() if self.queue else None

    def _distil(self, hidden: Tensor, weight: Tensor, targets: _Targets) -> KDLoss:
        layer = self.chunk.output_layer
        head = (hidden, weight, targets.teacher)
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
        return CACHED_LOSSES[self._loss.implementation](*head, **options)

    def _with_processor(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """A method of the model that runs a microbatch, given its targets if there are any."""

        def method(*args: Any, **kwargs: Any) -> Any:
            if self.queue:
                kwargs |= {"output_processor": self.process, "output_processor_context": self.queue.popleft()}
            return stock(*args, **kwargs)

        return method

    def process(
        self,
        *,
        hidden_states: Tensor,
        output_layer: Module,
        output_weight: Tensor | None,
        runtime_gather_output: bool | None,
        context: _Targets,
        **rest: Any,
    ) -> Tensor:
        """Megatron-Core's output processor: the loss [b, s] of the targets in `context`."""
        self._handed_over = context
        loss, _ = output_layer(hidden_states, weight=output_weight, runtime_gather_output=runtime_gather_output)
        return _sequence_first(loss)

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """In the place of the model's method of that name."""
        if logits is not self._passing or self._passing is None:
            return self._stock_loss(labels, logits)
        self._passing = None
        return _sequence_first(logits)

    def _add(self, losses: KDLoss, loss_mask: Tensor | None) -> None:
        per_position = {"kd": losses.kd, "ce": losses.ce, "tail": losses.tail, "support": losses.support}
        sums = {name: value.sum() for name, value in per_position.items() if value is not None}
        sums["tokens"] = sums["kd"].new_tensor(losses.kd.numel()) if loss_mask is None else loss_mask.sum()
        for name, value in sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value


def takes_output_processor(chunk: Module) -> bool:
    """Whether the model lets its caller form the output, as GPTModel does from megatron-core 0.18 on."""
    return "output_processor" in inspect.signature(chunk.forward).parameters


def _refuse_unsupported(chunk: Module) -> None:
    for name, reason in _REFUSED_SETTINGS.items():
        if getattr(chunk.config, name, None):
            raise ValueError(f"the model is configured with {name} = {getattr(chunk.config, name)}: {reason}")
    if chunk.config.mtp_num_layers and not takes_output_processor(chunk):
        raise ValueError(
            f"the model is configured with mtp_num_layers = {chunk.config.mtp_num_layers}: its multi-token-prediction "
            "heads call the same output layer and would take the targets; GPTModel of megatron-core 0.18 or later can"
        )
    layer = chunk.output_layer
    if not isinstance(layer, ColumnParallelLinear) or type(layer).forward is not ColumnParallelLinear.forward:
        raise ValueError(f"output_layer is a {type(layer).__name__}; a plain ColumnParallelLinear is needed")
    if "forward" in vars(layer):
        raise ValueError("output_layer.forward is overridden already: attach once, and before anything else wraps it")
    if layer.gather_output:
        raise ValueError("the model was built with parallel_output=False; the loss needs the vocabulary-parallel head")
    if getattr(layer, "gtp_remat_size", 1) > 1:
        raise ValueError(
            f"the output layer's weight is spread over gtp_remat_size = {layer.gtp_remat_size} more ranks; "
            "the loss needs it whole on each tensor-parallel rank: use gtp_weight_remat_size = 1"
        )


def _unwrapped(module: Module) -> Module:
    while isinstance(getattr(module, "module", None), Module):
        module = module.module
    return module


def _sequence_first(tensor: Tensor) -> Tensor:
    """The first two dimensions exchanged; it is its own inverse."""
    return tensor.transpose(0, 1).contiguous()
