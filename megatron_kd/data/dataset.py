"""Cache samples → micro-batches on the device, decoded ahead of the step that needs them.

A background thread reads and decodes; the training loop takes finished batches from a short queue and reports how long
it had to wait. An error in the thread is raised where the batch was to be taken.

Shapes: b samples, S positions, K teacher entries. Collectives: none; ranks that train on the same samples read them
each for itself.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_kd.cache import CacheBatch, TeacherCache
from megatron_kd.config import LossConfig
from megatron_kd.data.attention import DocumentAttention, document_attention
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
    teacher: TeacherTopK  # ids and logprobs [b, S, K]
    label_logprob: Tensor  # [b, S] the teacher's log-probability of the label, at temperature 1
    attention: DocumentAttention


class BatchLoader:
    """Endless micro-batches of one data-parallel rank, starting at a step."""

    def __init__(
        self,
        cache: TeacherCache,
        order: SampleOrder,
        loss: LossConfig,
        *,
        rank: int,
        ranks: int,
        micro_batch: int,
        first_step: int,
        device: torch.device,
        packed: bool,
    ) -> None:
        """Args: rank, ranks: data-parallel; packed: documents as PackedSeqParams rather than a mask."""
        self.waited = 0.0  # seconds spent waiting for data since it was last set to 0
        self.recent_samples: deque[int] = deque(maxlen=order.global_batch // ranks)  # of the last step, for errors
        self._cache, self._loss, self._device, self._packed = cache, loss, device, packed
        self._samples = itertools.chain.from_iterable(
            order.micro_batches(step, rank, ranks, micro_batch) for step in itertools.count(first_step)
        )
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cache-reader")
        self._pending: list[Future[Batch]] = [self._submit() for _ in range(_AHEAD)]

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        started = time.perf_counter()
        batch = self._pending.pop(0).result()
        self.waited += time.perf_counter() - started
        self._pending.append(self._submit())
        self.recent_samples.extend(batch.samples)
        return batch

    def close(self) -> None:
        """Ends the thread; batches not yet taken are dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _submit(self) -> Future[Batch]:
        return self._pool.submit(self._load, next(self._samples))

    def _load(self, samples: np.ndarray) -> Batch:
        read = self._cache.read(samples, k=self._loss.k, temperature=self._loss.temperature)
        return make_batch(samples, read, self._device, packed=self._packed)


def make_batch(samples: np.ndarray, read: CacheBatch, device: torch.device, *, packed: bool) -> Batch:
    """What the cache returned, as tensors on the device."""
    tokens = _to(read.tokens, device).long()
    segment = _to(read.segment, device)
    positions = torch.arange(segment.shape[1], device=device).expand_as(segment)
    batch = Batch(
        samples=tuple(int(sample) for sample in samples),
        tokens=tokens[:, :-1].contiguous(),
        labels=tokens[:, 1:].contiguous(),
        position_ids=positions.contiguous(),
        segment=segment,
        loss_mask=_to(read.loss_mask, device).float(),
        teacher=TeacherTopK(_to(read.ids, device), _to(read.logprobs, device), _to(read.tail_logprob, device)),
        label_logprob=_to(read.label_logprob, device),
        attention=document_attention(segment, packed=packed),
    )
    return end_to_end(batch) if packed else batch


def end_to_end(batch: Batch) -> Batch:
    """The samples of a micro-batch laid one behind the other, [1, b·S], as `thd` attention takes them."""

    def flat(tensor: Tensor) -> Tensor:
        return tensor.reshape(1, -1, *tensor.shape[2:])

    teacher = batch.teacher
    return Batch(
        samples=batch.samples,
        tokens=flat(batch.tokens),
        labels=flat(batch.labels),
        position_ids=flat(batch.position_ids),
        segment=flat(batch.segment),
        loss_mask=flat(batch.loss_mask),
        label_logprob=flat(batch.label_logprob),
        teacher=TeacherTopK(
            flat(teacher.ids),
            flat(teacher.logprobs),
            None if teacher.tail_logprob is None else flat(teacher.tail_logprob),
        ),
        attention=batch.attention,
    )


def _to(array: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
