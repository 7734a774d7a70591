"""Peak memory of a function, as the allocator saw it.

On CUDA: max_memory_allocated. On a CPU: the profiler's allocation events, which also see temporaries inside one
operator. Both count what is allocated beyond what existed before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Allocations:
    """What a function allocated beyond what existed before it."""

    peak: int  # bytes
    largest: list[int]  # bytes of single allocations, largest first; empty on CUDA


def measure(function: Callable[[], object], device: torch.device) -> Allocations:
    """Run `function` once and watch its allocations; its result is kept alive until the end."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        torch.cuda.synchronize(device)
        return Allocations(torch.cuda.max_memory_allocated(device) - before, [])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function()
    del result
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    now = peak = 0
    for size in sizes:
        now += size
        peak = max(peak, now)
    return Allocations(peak, sorted((size for size in sizes if size > 0), reverse=True))
