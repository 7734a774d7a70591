"""Cache samples → micro-batches on the device, decoded ahead of the step that needs them.

A background thread reads and decodes; the training loop takes finished batches from a short queue and reports how long
it had to wait. An error in the thread is raised where the batch was to be taken.

Of the ranks that train on the same samples one reads the targets, which are 99 % of the bytes, and broadcasts them to
the others; ranks without the output layer (a pipeline's earlier stages) receive none. The text every rank reads for
itself: where documents begin must be known on the host. Under context parallelism a rank keeps its positions of each.

Shapes: b samples, S positions, K teacher entries; T = b·S, or a context-parallel rank's share of it.
Collectives: four broadcasts a micro-batch over the ranks that share targets, where there are several.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_kd.cache import CacheBatch, TeacherCache, TokenBatch
from megatron_kd.config import LossConfig
from megatron_kd.data.attention import DocumentAttention, context_positions, document_attention
from megatron_kd.data.order import SampleOrder
from megatron_kd.loss import TeacherTopK

_AHEAD = 4  # micro-batches decoded before they are needed


@dataclass(frozen=True)
class Batch:
    """One micro-batch on the device. b samples, S positions, K teacher entries."""

    samples: tuple[int, ...]  # their numbers in the cache
    tokens: Tensor  # [b, S] int64
    labels: Tensor  # [b, S] int64, the next token
    position_ids: Tensor  # [b, S] int64
    segment: Tensor  # [b, S] document number of each position
    loss_mask: Tensor  # [b, S] float32
    teacher: TeacherTopK | None  # ids and logprobs [b, S, K]; None on ranks without the output layer
    label_logprob: Tensor | None  # [b, S] the teacher's log-probability of the label, at temperature 1
    attention: DocumentAttention


@dataclass(frozen=True)
class Place:
    """What a rank needs of the data, and whom it shares it with."""

    rank: int = 0  # data-parallel
    ranks: int = 1
    head: bool = True  # it holds the output layer, which is where targets are used
    sharers: dist.ProcessGroup | None = None  # the ranks that use the same targets, whose first one reads; None: alone
    context_rank: int = 0
    context_ranks: int = 1

    @classmethod
    def of_this_rank(cls, *, head: bool) -> Place:
        """This rank's place in the process groups Megatron-Core has made; `head`: where the output layer is."""
        from megatron.core import parallel_state

        sharers = parallel_state.get_tensor_and_context_parallel_group()
        return cls(
            rank=parallel_state.get_data_parallel_rank(),
            ranks=parallel_state.get_data_parallel_world_size(),
            head=head,
            sharers=sharers if sharers.size() > 1 else None,
            context_rank=parallel_state.get_context_parallel_rank(),
            context_ranks=parallel_state.get_context_parallel_world_size(),
        )

    @property
    def reads_targets(self) -> bool:
        """Whether this rank reads the targets rather than receive them, or do without."""
        return self.head and (self.sharers is None or self.sharers.rank() == 0)


class Targets(NamedTuple):
    """The teacher's part of a micro-batch."""

    ids: Tensor  # [b, S, K] int32
    logprobs: Tensor  # [b, S, K] fp32
    tail_logprob: Tensor  # [b, S] fp32
    label_logprob: Tensor  # [b, S] fp32


class BatchLoader:
    """Endless micro-batches of one data-parallel rank, starting at a step."""

    def __init__(
        self,
        cache: TeacherCache,
        order: SampleOrder,
        loss: LossConfig,
        place: Place,
        *,
        micro_batch: int,
        first_step: int,
        device: torch.device,
        packed: bool,
    ) -> None:
        """Args: place: whose batches; packed: documents as PackedSeqParams rather than a mask."""
        self.waited = 0.0  # seconds spent waiting for data since it was last set to 0
        # Of the last step, for errors.
        self.recent_samples: deque[int] = deque(maxlen=order.global_batch // place.ranks)
        self._cache, self._loss, self._place, self._device, self._packed = cache, loss, place, device, packed
        self._samples = itertools.chain.from_iterable(
            order.micro_batches(step, place.rank, place.ranks, micro_batch) for step in itertools.count(first_step)
        )
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cache-reader")
        self._pending: list[Future[tuple[Batch, Targets | None]]] = [self._submit() for _ in range(_AHEAD)]

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        started = time.perf_counter()
        batch, read = self._pending.pop(0).result()
        self.waited += time.perf_counter() - started
        self._pending.append(self._submit())
        self.recent_samples.extend(batch.samples)
        if self._place.head:
            batch = with_targets(batch, self._shared(read, batch.tokens.shape))
        if self._place.context_ranks > 1:
            batch = take_context(batch, self._place.context_rank, self._place.context_ranks)
        return batch

    def close(self) -> None:
        """Ends the thread; batches not yet taken are dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _submit(self) -> Future[tuple[Batch, Targets | None]]:
        return self._pool.submit(self._load, next(self._samples))

    def _load(self, samples: np.ndarray) -> tuple[Batch, Targets | None]:
        """A micro-batch without its targets, and those, where this rank reads them."""
        text: TokenBatch | CacheBatch
        if self._place.reads_targets:
            text = read = self._cache.read(samples, k=self._loss.k, temperature=self._loss.temperature)
            targets = targets_of(read, self._device)
        else:
            text, targets = self._cache.read_tokens(samples), None
        return make_batch(samples, text, self._device, packed=self._packed), targets

    def _shared(self, read: Targets | None, shape: torch.Size) -> Targets:
        """The targets of all positions [b, S]: those that were read, or the sharers' first rank's."""
        if read is None:
            k = self._loss.k or self._cache.manifest.k
            read = Targets(
                torch.empty((*shape, k), dtype=torch.int32, device=self._device),
                *(torch.empty(size, device=self._device) for size in ((*shape, k), shape, shape)),
            )
        if self._place.sharers is not None:
            for tensor in read:
                dist.broadcast(tensor, group=self._place.sharers, group_src=0)
        return read


def make_batch(samples: np.ndarray, text: TokenBatch | CacheBatch, device: torch.device, *, packed: bool) -> Batch:
    """The text of samples, as tensors on the device."""
    tokens = _to(text.tokens, device).long()
    segment = torch.from_numpy(np.ascontiguousarray(text.segment))
    batch = Batch(
        samples=tuple(int(sample) for sample in samples),
        tokens=tokens[:, :-1].contiguous(),
        labels=tokens[:, 1:].contiguous(),
        position_ids=torch.arange(segment.shape[1], device=device).expand_as(segment).contiguous(),
        segment=_to(text.segment, device),
        loss_mask=_to(text.loss_mask, device).float(),
        teacher=None,
        label_logprob=None,
        attention=document_attention(segment, packed=packed, device=device),
    )
    # As `thd` attention takes them: the samples of a micro-batch one behind the other, [1, b·S].
    return _each_position(batch, lambda x: x.reshape(1, -1)) if packed else batch


def targets_of(read: CacheBatch, device: torch.device) -> Targets:
    """The targets of samples, as tensors on the device."""
    return Targets(*(_to(getattr(read, name), device) for name in Targets._fields))


def with_targets(batch: Batch, targets: Targets) -> Batch:
    """The batch with its targets, whose positions are laid out as its own are."""
    ids, logprobs, tail, label = (x.view(*batch.tokens.shape, *x.shape[2:]) for x in targets)
    return replace(batch, teacher=TeacherTopK(ids, logprobs, tail), label_logprob=label)


def take_context(batch: Batch, rank: int, ranks: int) -> Batch:
    """A context-parallel rank's positions of a batch; `attention` goes on describing the whole one.

    Raises:
        ValueError: a document, or a sample without them, that cannot be cut into 2·ranks equal pieces.
    """
    positions = context_positions(batch.attention.bounds, rank, ranks).to(batch.tokens.device, non_blocking=True)
    return _each_position(batch, lambda x: x.index_select(1, positions))


def _each_position(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """The batch with a change made to every tensor that has a value for each position."""
    names = ("tokens", "labels", "position_ids", "segment", "loss_mask", "label_logprob")
    changed = {name: change(getattr(batch, name)) for name in names if getattr(batch, name) is not None}
    if batch.teacher is not None:
        changed["teacher"] = TeacherTopK(*(None if x is None else change(x) for x in batch.teacher))
    return replace(batch, **changed)


def _to(array: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
