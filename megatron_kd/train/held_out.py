"""Evaluation while training: the loss on a cache of held-out samples, with the student's own layout.

The cache is made by the teacher launcher with `cache.split: held_out` and a `cache.url` of its own; its targets stand
for the teacher, as the training cache's do. Collectives: those of a forward, and one sum of eight numbers.
"""

from __future__ import annotations

import itertools

import torch
from megatron.core import parallel_state

from megatron_kd import platform
from megatron_kd.cache import TeacherCache
from megatron_kd.config import RunConfig
from megatron_kd.data.dataset import BatchLoader, Place
from megatron_kd.data.order import SampleOrder
from megatron_kd.student.hf_weights import HfWeights
from megatron_kd.train.checks import check_cache
from megatron_kd.train.metrics import means, sum_over_ranks
from megatron_kd.train.setup import Student
from megatron_kd.train.step import batch_shape, run_forward_backward


class HeldOut:
    """The samples that training is evaluated on, the same ones every time."""

    def __init__(self, config: RunConfig, weights: HfWeights, place: Place) -> None:
        """Raises ValueError where the cache is not named, does not fit the student, or is too small for the layout."""
        url = config.train.evaluate_cache
        if not url:
            raise ValueError(
                f"train.evaluate_interval is {config.train.evaluate_interval} and train.evaluate_cache is empty: name "
                "a cache of held-out samples, made with cache.split=held_out and a cache.url of its own"
            )
        self._cache = TeacherCache.open(url)
        check_cache(self._cache.manifest, config, weights, url)
        self._config, self._place = config, place
        wanted = config.evaluate.samples or self._cache.manifest.samples
        together = place.ranks * config.train.micro_batch
        self.samples = min(wanted, self._cache.manifest.samples) // together * together
        if not self.samples:
            raise ValueError(
                f"{url} holds {self._cache.manifest.samples} samples; {place.ranks} data-parallel rank(s) · "
                f"train.micro_batch {config.train.micro_batch} need at least {together}"
            )

    def evaluate(self, student: Student) -> dict[str, float]:
        """Mean loss and its parts over the samples, on every rank; the student is left as it was."""
        manifest, micro_batch = self._cache.manifest, self._config.train.micro_batch
        loader = BatchLoader(
            self._cache,
            SampleOrder(manifest.samples, manifest.block, self._config.seed, self.samples),
            self._config.loss,
            self._place,
            micro_batch=micro_batch,
            first_step=0,
            device=platform.device(),
            packed=platform.has_transformer_engine(),
        )
        for chunk in student.chunks:
            chunk.eval()
        try:
            with torch.no_grad(), student.gathered():
                logged = run_forward_backward(
                    student.chunks,
                    student.handle,
                    list(itertools.tee(loader, len(student.chunks))),
                    micro_batches=self.samples // (parallel_state.get_data_parallel_world_size() * micro_batch),
                    shape=batch_shape(self._config),
                    forward_only=True,
                )
        finally:
            loader.close()
            for chunk in student.chunks:
                chunk.train()
        return means(sum_over_ranks(student.handle, logged))
