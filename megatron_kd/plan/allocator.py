"""Peak memory of a function: measured, or simulated without memory.

Measured on CUDA: max_memory_allocated. Measured on a CPU: the profiler's allocation events, which also see
temporaries inside one operator. Simulated: tensors on the meta device, whose storages are counted while they live;
temporaries inside one operator are invisible there, so a simulated peak is worth something only where it agrees with
a measured one. All count what is allocated beyond what existed before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Allocations:
    """What a function allocated beyond what existed before it."""

    peak: int  # bytes
    kept: int  # bytes still allocated while the result is alive
    largest: list[int] = field(default_factory=list)  # single allocations, largest first; not known on CUDA


def measure(function: Callable[[], object], device: torch.device) -> Allocations:
    """Run `function` once on `device` ("meta": simulate) and watch its allocations."""
    if device.type == "meta":
        with _LiveStorages() as live:
            result = function()
            kept = live.now
        del result
        return Allocations(live.peak, kept, sorted(live.sizes, reverse=True))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = function()
        torch.cuda.synchronize(device)
        kept = torch.cuda.memory_allocated(device) - before
        del result
        return Allocations(torch.cuda.max_memory_allocated(device) - before, kept)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function()
    del result
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    now = peak = 0
    for size in sizes:
        now += size
        peak = max(peak, now)
    return Allocations(peak, now, sorted((size for size in sizes if size > 0), reverse=True))


class _LiveStorages(TorchDispatchMode):
    """Counts the bytes of every storage made by an operator until it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.sizes: list[int] = []
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor) and not x.is_sparse and x.untyped_storage()._cdata not in self._known:
                self._watch(x.untyped_storage(), (args, kwargs))
        return result

    def _watch(self, storage: torch.UntypedStorage, inputs: Any) -> None:
        """A storage seen for the first time: what an input lives in existed before and is not counted."""
        key = storage._cdata
        given = any(isinstance(x, torch.Tensor) and x.untyped_storage()._cdata == key for x in tree_leaves(inputs))
        size = 0 if given else storage.nbytes()
        self._known.add(key)
        self.sizes.append(size)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
