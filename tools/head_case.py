"""One configuration of the head benchmark: memory, time beside the bare GEMMs, and error against fp64.

    python tools/head_case.py '{"variant": "fused", "positions": 4096, …}'      prints one JSON line

A process of its own for each, so that nothing of another configuration is in its memory. With tp > 1 there is one
process a rank (RANK and STORE in the environment, set by bench_head.py), and rank 0 prints; on the meta device one
process stands for a rank of a group whose collectives do nothing.

Time on a CPU is the process's CPU time, on a GPU events; the median of `repeats` runs, each beside one of the floor in
the same process. The floor is the bare GEMMs of the same chunks into memory that exists: three, or four for the
variant that projects twice.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from megatron_kd.loss import (
    KDObjective,
    TeacherTopK,
    choose_chunk_tokens,
    dense_kl,
    forward_chunked_kl,
    fused_linear_kl,
    gemm,
    reference,
)
from megatron_kd.plan.allocator import measure
from tools.head_peers import PEERS, WITH_FULL_TEACHER, FullTeacher, peer_version

VARIANTS: dict[str, Callable[..., Any]] = {
    "dense": dense_kl,
    "forward_chunked": forward_chunked_kl,
    "fused": fused_linear_kl,
    "fused_in_forward": partial(fused_linear_kl, backward="in_forward"),
}


@dataclass(frozen=True)
class HeadCase:
    """What is run; the shapes are those of the whole problem, of which a rank holds vocab/tp columns."""

    variant: str
    positions: int
    hidden: int
    vocab: int
    k: int = 100
    tp: int = 1
    sequence_parallel: bool = False
    chunk: int = 0  # 0: chosen by the loss
    dtype: str = "float32"
    kind: str = "ghost"
    main_grad: bool = False  # dW into an fp32 main_grad, as under Megatron
    device: str = "cpu"  # "meta": simulate
    repeats: int = 5  # 0: memory only

    @property
    def columns(self) -> int:
        """Vocabulary columns of a rank."""
        return self.vocab // self.tp

    @property
    def element(self) -> int:
        """Bytes of one element of the parameters."""
        return getattr(torch, self.dtype).itemsize

    @property
    def chunk_tokens(self) -> int:
        """Positions per chunk."""
        return self.chunk or choose_chunk_tokens(self.positions, self.columns, self.element)

    def expected_bytes(self) -> int | None:
        """What a rank must hold beyond hidden, weight and targets: dh, dW and one chunk; None if not chunked."""
        if not self.variant.startswith("fused"):
            return None
        rows = self.positions // (self.tp if self.sequence_parallel else 1)
        gathered = self.element * self.chunk_tokens * self.hidden if self.sequence_parallel else 0
        chunk, size = self.element * self.chunk_tokens * self.columns, self.columns * self.hidden
        result = 0
        if self.main_grad:
            sums = 8 * size if self.variant == "fused_in_forward" else 4 * size
        else:  # a half-precision result is made when the chunk is gone
            sums, result = 4 * size, 0 if self.element == 4 else self.element * size
        return self.element * rows * self.hidden + gathered + sums + max(chunk, result)


Inputs = tuple[Tensor, Tensor, TeacherTopK | FullTeacher]


def make_inputs(case: HeadCase) -> Inputs:
    """This rank's tensors; targets as a cache delivers them: int32 ids, fp16 log-probabilities."""
    kind, device = getattr(torch, case.dtype), torch.device(case.device)
    torch.manual_seed(0)
    rows = case.positions // (case.tp if case.sequence_parallel else 1)
    hidden = torch.empty(rows, case.hidden, dtype=kind, device=device).normal_().requires_grad_()
    weight = torch.empty(case.columns, case.hidden, dtype=kind, device=device).normal_(std=case.hidden**-0.5)
    weight.requires_grad_()
    if case.variant in WITH_FULL_TEACHER:
        return hidden, weight, FullTeacher.like(hidden, weight)
    stride = case.vocab // case.k
    ids = torch.empty(case.positions, case.k, dtype=torch.int32, device=device).random_(0, stride)
    ids += torch.arange(case.k, dtype=torch.int32, device=device) * stride
    logprobs = torch.empty(case.positions, case.k, dtype=torch.float16, device=device).normal_().clamp_(-4, 4)
    logprobs = (logprobs.float().log_softmax(1) - 0.1).half()
    if case.main_grad:
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
        weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    return hidden, weight, TeacherTopK(ids, logprobs)


def run(case: HeadCase, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """The case's figures, as a row of the benchmark's table."""
    device = torch.device(case.device)
    tensors = make_inputs(case)
    inputs = sum(x.nbytes for x in (*tensors[:2], *tensors[2][:2]))
    main_grad = 4 * tensors[1].numel() if case.main_grad else 0  # exists before, but is a gradient
    arguments = {
        "objective": KDObjective(case.kind),  # type: ignore[arg-type]
        "chunk_tokens": case.chunk_tokens,
        "vocab_size": case.vocab,
        "tp_group": group,
        "sequence_parallel": case.sequence_parallel,
    }

    function = (VARIANTS | PEERS)[case.variant]

    def forward() -> Tensor:
        return function(*tensors, **arguments).loss.sum()

    def step() -> Any:
        return torch.autograd.grad(forward(), tensors[:2])

    row = asdict(case) | {"chunk": case.chunk_tokens, "input_bytes": inputs, "expected_bytes": case.expected_bytes()}
    row["peer"] = peer_version(case.variant)
    try:
        if device.type != "meta":
            step()  # libraries' workspaces and compilation are not the loss's
        row["kept_bytes"] = measure(forward, device).kept
        row["peak_bytes"] = measure(step, device).peak + main_grad
        row["total_bytes"] = inputs + row["peak_bytes"]
        if device.type != "meta" and case.repeats:
            row |= compare_with_floor(case, tensors, step)
    except torch.OutOfMemoryError:
        return row | {"status": "out of memory"}
    except ImportError as error:
        return row | {"status": "not installed", "reason": str(error)}
    return row | errors(case) | {"status": "ok"}


def compare_with_floor(case: HeadCase, tensors: Inputs, step: Callable[[], Any]) -> dict:
    """Median seconds of the variant and of the bare GEMMs, and the median of the ratios of neighbouring runs.

    A machine that is shared changes its speed within minutes: what ran side by side met the same one.
    """
    device = torch.device(case.device)
    hidden, weight = (x.detach() for x in tensors[:2])
    projections = 2 if case.variant == "fused" else 1
    buffer = weight.new_empty(case.chunk_tokens, case.columns)
    rows = hidden.repeat(case.tp, 1)[: case.positions] if case.sequence_parallel else hidden
    d_hidden, total = torch.empty_like(rows), torch.zeros_like(weight, dtype=torch.float32)

    def floor() -> None:
        for first in range(0, case.positions, case.chunk_tokens):
            chunk = rows[first : first + case.chunk_tokens]
            logits = buffer[: len(chunk)]
            for _ in range(projections):
                gemm.project(chunk, weight, None, logits)
            gemm.multiply(logits, weight, d_hidden[first : first + case.chunk_tokens])
            gemm.accumulate(total, logits, chunk)

    floor()
    times: dict[str, list[float]] = {"seconds": [], "floor_seconds": []}
    for _ in range(case.repeats):
        times["floor_seconds"].append(seconds(floor, device))
        times["seconds"].append(seconds(step, device))
    found = {name: statistics.median(values) for name, values in times.items()}
    ratios = [one / other for one, other in zip(times["seconds"], times["floor_seconds"])]
    work = 2 * (2 + projections) * case.positions * case.hidden * case.columns
    return found | {"ratio": statistics.median(ratios), "tflops": work / found["seconds"] / 1e12}


def seconds(function: Callable[[], Any], device: torch.device) -> float:
    """Time of one run."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(end) / 1e3
    began = time.process_time()
    function()
    return time.process_time() - began


def errors(case: HeadCase) -> dict[str, float]:
    """max|Δ|/max|reference| of loss, dh and dW against fp64 dense, on a small problem of the same type and objective.

    In half precision most of it is the rounding of the logits, which all variants share.
    """
    device = "cpu" if case.device == "meta" else case.device
    small = HeadCase(
        **asdict(case)
        | {"positions": 64, "hidden": 128, "vocab": 4096, "k": min(case.k, 100), "tp": 1, "device": device, "chunk": 24}
        | {"sequence_parallel": False, "main_grad": False}
    )
    hidden, weight, teacher = make_inputs(small)
    objective = KDObjective(case.kind)  # type: ignore[arg-type]
    found = (VARIANTS | PEERS)[case.variant](hidden, weight, teacher, objective=objective, chunk_tokens=24).loss
    exact = [x.detach().cpu().double().requires_grad_() for x in (hidden, weight)]
    if isinstance(teacher, FullTeacher):
        targets = teacher.entries()
    else:
        targets = TeacherTopK(teacher.ids.cpu(), teacher.logprobs.cpu())
    wanted = reference(*exact, targets, objective=objective)
    pairs = {"loss_error": (found.sum(), wanted.sum())}
    gradients = torch.autograd.grad(found.sum(), (hidden, weight)), torch.autograd.grad(wanted.sum(), exact)
    pairs |= dict(zip(("dh_error", "dw_error"), zip(*gradients)))
    return {
        name: ((x.detach().cpu().double() - y).abs().max() / y.abs().max()).item() for name, (x, y) in pairs.items()
    }


def join_group(case: HeadCase) -> dist.ProcessGroup | None:
    """The tensor-parallel group of this process; on the meta device one whose collectives do nothing."""
    if case.tp == 1:
        return None
    if case.device == "meta":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=case.tp, store=FakeStore())
    else:
        rank = int(os.environ["RANK"])
        if case.device == "cuda":
            torch.cuda.set_device(rank)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend = "nccl" if case.device == "cuda" else "gloo"
        dist.init_process_group(backend, rank=rank, world_size=case.tp, store=dist.FileStore(os.environ["STORE"]))
    return dist.group.WORLD


def main() -> None:
    """Run the case given as JSON and print its row as JSON."""
    case = HeadCase(**json.loads(sys.argv[1]))
    group = join_group(case)
    row = run(case, group)
    if group is None or group.rank() == 0:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
