"""Checkpoints of a run, through Megatron-Core's `dist_checkpointing`.

    <folder>/step_00000040/     sharded weights, optimizer, learning-rate schedule; any later layout can load it

A checkpoint is written beside its final name and renamed when it is complete, so that whatever carries the name
`step_…` can be resumed from. Collectives: those of `dist_checkpointing`, and barriers around the writing.
"""

from __future__ import annotations

import inspect
import shutil
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.utils import unwrap_model
from torch.nn import Module

_DISTRIBUTED = {"distrib_optim_sharding_type": "fully_reshardable"}


def complete_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """[(steps done, its folder)] of every complete checkpoint, the newest last."""
    return sorted((int(path.name.removeprefix("step_")), path) for path in folder.glob("step_*") if not path.suffix)


def latest_checkpoint(folder: Path) -> tuple[int, Path] | None:
    """The newest complete checkpoint: (steps done, its folder)."""
    return max(complete_checkpoints(folder), default=None)


class CheckpointWriter:
    """Writes checkpoints under one folder; all methods are collective."""

    def __init__(self, folder: Path, *, background: bool = False, kept: int = 0) -> None:
        """A writer of the checkpoints under `folder`.

        Args:
            background: `save` returns when the state is copied; a forked process writes it.
            kept: newest checkpoints that stay once a later one is complete; 0: all.
        """
        self._folder, self._background, self._kept = folder, background, kept
        self._queue = AsyncCallsQueue()

    def save(self, step: int, chunks: list[Module], optimizer: Any, scheduler: Any) -> Path:
        """Writes `step_<step>`; it appears under that name when it is complete."""
        self.close()  # one at a time: a second copy of the state would wait in memory
        final = self._folder / f"step_{step:08d}"
        partial = final.with_suffix(".partial")
        on_first_rank = torch.distributed.get_rank() == 0
        if on_first_rank:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        torch.distributed.barrier()
        state = {**_sharded_state(chunks, optimizer, scheduler, is_loading=False), "step": step}
        request = dist_checkpointing.save(state, str(partial), async_sharded_save=True, **_OWN_WRITER)

        def publish() -> None:
            if on_first_rank:
                shutil.rmtree(final, ignore_errors=True)
                partial.rename(final)
                self._remove_old()
            torch.distributed.barrier()

        request.add_finalize_fn(publish)
        if self._background:
            self._queue.schedule_async_request(request)
        else:
            request.execute_sync()
        return final

    def _remove_old(self) -> None:
        for _, path in complete_checkpoints(self._folder)[: -self._kept] if self._kept else ():
            # Renamed first: what is deleted in part must not look complete.
            shutil.rmtree(path.rename(path.with_suffix(".removed")))

    def poll(self) -> None:
        """Publishes what has been written in the meantime."""
        self._queue.maybe_finalize_async_calls(blocking=False)

    def close(self) -> None:
        """Waits for what is being written."""
        self._queue.maybe_finalize_async_calls(blocking=True)


# From 0.19 on another package's writer is the default where it is installed.
_OWN_WRITER = (
    {"async_strategy": "mcore"} if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters else {}
)


def load_checkpoint(folder: Path, chunks: list[Module], optimizer: Any = None, scheduler: Any = None) -> int:
    """Fills model, and optimizer and schedule if given, from a checkpoint; returns the steps done. Collective."""
    loaded = _load(folder, {**_sharded_state(chunks, optimizer, scheduler, is_loading=True), "step": 0}, chunks)
    if optimizer is not None:
        optimizer.load_state_dict(loaded["optimizer"])
    if scheduler is not None:
        scheduler.load_state_dict(loaded["scheduler"])
    return int(loaded["step"])


def load_weights(folder: Path, chunks: list[Module]) -> None:
    """Fills a model from any checkpoint of `dist_checkpointing`, this project's or Megatron-LM's. Collective."""
    _load(folder, _sharded_state(chunks, None, None, is_loading=True), chunks)


def _load(folder: Path, wanted: dict[str, Any], chunks: list[Module]) -> dict[str, Any]:
    loaded = dist_checkpointing.load(wanted, str(folder), strict=_IGNORE_UNREQUESTED)
    for name, chunk in _named(chunks):
        chunk.load_state_dict(loaded[name])
    return loaded


_IGNORE_UNREQUESTED = dist_checkpointing.validation.StrictHandling.ASSUME_OK_UNEXPECTED


def _sharded_state(chunks: list[Module], optimizer: Any, scheduler: Any, *, is_loading: bool) -> dict[str, Any]:
    state: dict[str, Any] = {name: chunk.sharded_state_dict() for name, chunk in _named(chunks)}
    if optimizer is not None:
        weights = state if len(chunks) > 1 else state["model"]
        state["optimizer"] = optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=_DISTRIBUTED)
    if scheduler is not None:
        state["scheduler"] = scheduler.state_dict()
    return state


def _named(chunks: list[Module]) -> list[tuple[str, Module]]:
    """Megatron's own names: `model`, or `model0`, `model1`, … under interleaving."""
    several = len(chunks) > 1
    return [(f"model{index}" if several else "model", chunk) for index, chunk in enumerate(unwrap_model(chunks))]
