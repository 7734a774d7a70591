"""Inputs of the loss tests: one description of a case, its tensors, and what dense autograd makes of them."""

from __future__ import annotations

import functools
import itertools
import random
import sys
from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import Tensor

from megatron_kd.loss import KDObjective, TeacherTopK, fused_linear_kl, reference

# The loss knows nothing of Megatron-Core, so what takes minutes is said once, under the oldest Python, and not again
# beside every version of Megatron-Core.
ONCE = pytest.mark.skipif(sys.version_info >= (3, 12), reason="the loss's whole grids run under Python 3.11 alone")
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
# For tests that say the same on a GPU.
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])]


@dataclass(frozen=True)
class Case:
    """One point of the grid; tensors follow from it and the seed."""

    kind: str = "ghost"
    ce_weight: float = 0.0
    temperature: float = 1.0
    squared: bool = True
    mask: bool = False
    bias: bool = False
    padding: int = 0  # columns past the true vocabulary
    stored_tail: bool = False
    backward: str = "recompute"
    chunk: int = 7  # 0 stands for N, −1 for N + 1
    layout: tuple[int, bool] = (1, False)  # tensor-parallel ranks, sequence parallelism
    batch: int = 0  # 0: hidden is [N, D]; b: [N/b, b, D]
    dtype: torch.dtype = torch.float64
    positions: int = 24
    hidden: int = 6
    vocab: int = 24
    k: int = 5
    seed: int = 0

    @property
    def objective(self) -> KDObjective:
        return KDObjective(self.kind, self.temperature, self.squared, 0.9, self.ce_weight)  # type: ignore[arg-type]

    @property
    def chunk_tokens(self) -> int:
        return {0: self.positions, -1: self.positions + 1}.get(self.chunk, self.chunk)


@dataclass
class Tensors:
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    teacher: TeacherTopK
    labels: Tensor
    loss_mask: Tensor | None
    upstream: Tensor  # gradient of the loss, one value per position

    def leaves(self) -> list[Tensor]:
        return [x for x in (self.hidden, self.weight, self.bias) if x is not None]


def make(case: Case, device: str = "cpu") -> Tensors:
    """Tensors of a case. Some rows lack entries, half the labels lie on the support, masked rows hold garbage."""
    g = torch.Generator().manual_seed(case.seed)
    n, v, kind = case.positions, case.vocab, case.dtype

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    hidden, weight = normal(n, case.hidden), normal(v + case.padding, case.hidden)
    if case.padding:
        weight[v:] *= 100
    log_p = torch.log_softmax(normal(n, v) * 2 / case.temperature, -1)
    logprobs, ids = log_p.topk(case.k, -1)
    if case.k > 1:
        ids[1::3, -1] = -1
    tail = torch.log1p(-logprobs.exp().sum(1)).nan_to_num(neginf=-60.0)
    labels = torch.randint(0, v, (n,), generator=g)
    labels[::2] = ids[::2, 0]
    mask = None
    if case.mask:
        mask = torch.rand(n, generator=g, dtype=torch.float64).mul(2).where(torch.rand(n, generator=g) > 0.3, 0)
        dead = mask == 0
        hidden[dead] = float("nan")
        logprobs[dead], tail[dead], labels[dead] = float("nan"), float("inf"), -100
        ids[dead] = 10**6
    shape = (n,) if case.batch == 0 else (n // case.batch, case.batch)
    upstream = normal(n)
    tensors = Tensors(
        hidden=hidden.to(kind).view(*shape, -1),
        weight=weight.to(kind),
        bias=normal(v + case.padding).to(kind) if case.bias else None,
        teacher=TeacherTopK(
            ids.view(*shape, -1), logprobs.view(*shape, -1), tail.view(shape) if case.stored_tail else None
        ),
        labels=labels.view(shape),
        loss_mask=None if mask is None else mask.view(shape),
        upstream=upstream.view(shape),
    )
    tensors.teacher = TeacherTopK(*(None if x is None else x.to(device) for x in tensors.teacher))
    for field in fields(tensors):
        value = getattr(tensors, field.name)
        if isinstance(value, Tensor):
            setattr(tensors, field.name, value.to(device))
    for leaf in tensors.leaves():
        leaf.requires_grad_()
    return tensors


def dense(case: Case, tensors: Tensors) -> Tensor:
    """The reference loss."""
    return reference(
        tensors.hidden,
        tensors.weight,
        tensors.teacher,
        objective=case.objective,
        labels=tensors.labels,
        loss_mask=tensors.loss_mask,
        bias=tensors.bias,
        vocab_size=case.vocab,
    )


def dense_results(case: Case) -> list[tuple[Tensor, ...]]:
    """The reference loss, and its gradients times 2.5 and times the case's upstream."""
    return _dense_results(replace(case, backward="recompute", chunk=0, layout=(1, False)))


@functools.lru_cache(maxsize=1)
def _dense_results(case: Case) -> list[tuple[Tensor, ...]]:
    tensors = make(case)
    loss = dense(case, tensors)
    weights = torch.full_like(loss, 2.5), tensors.upstream
    gradients = [torch.autograd.grad(loss, tensors.leaves(), weight, retain_graph=True) for weight in weights]
    return [(loss.detach(),), *gradients]


def fused(case: Case, tensors: Tensors, function=fused_linear_kl, **changes):
    """fused_linear_kl, or another of its signature, on the tensors of a case."""
    arguments = {
        "objective": case.objective,
        "labels": tensors.labels,
        "loss_mask": tensors.loss_mask,
        "bias": tensors.bias,
        "vocab_size": case.vocab,
        "chunk_tokens": case.chunk_tokens,
        "backward": case.backward,
    }
    return function(tensors.hidden, tensors.weight, tensors.teacher, **(arguments | changes))


# The padding of 8 leaves the last of four ranks without any true column.
GRID = {
    "kind": ["ghost", "truncated", "renormalized"],
    "ce_weight": [0.0, 0.7],
    "temperature": [0.5, 1.0, 2.0, 4.0],
    "mask": [False, True],
    "bias": [False, True],
    "padding": [0, 8],
    "backward": ["recompute", "in_forward"],
    "chunk": [1, 7, 0, -1],
    "layout": [(1, False), (2, False), (2, True), (4, False), (4, True)],
}
# Drawn along with the grid rather than multiplied into it.
VARIED = {"squared": [True, False], "stored_tail": [False, True], "batch": [0, 1, 2]}


def pairwise() -> list[Case]:
    """Few cases in which every pair of values of the grid occurs (greedy and deterministic)."""
    axes = GRID | VARIED
    missing = {
        frozenset({(a, x), (b, y)}) for a, b in itertools.combinations(axes, 2) for x in axes[a] for y in axes[b]
    }
    cases = []
    while missing:
        chosen = dict(min(missing, key=lambda pair: sorted(map(repr, pair))))
        for axis in axes:
            if axis not in chosen:
                chosen[axis] = max(
                    axes[axis],
                    key=lambda value: sum(frozenset({(axis, value), other}) in missing for other in chosen.items()),
                )
        missing -= {frozenset(pair) for pair in itertools.combinations(chosen.items(), 2)}
        cases.append(Case(**chosen))
    return cases


def whole_grid(ranks: int) -> list[Case]:
    """Every combination of the grid at one number of ranks; cases of one dense reference stand together."""
    how = ("backward", "chunk", "layout")
    what = [axis for axis in GRID if axis not in how]
    cases, draw = [], random.Random(0)
    for values in itertools.product(*(GRID[axis] for axis in what)):
        varied = {axis: draw.choice(choices) for axis, choices in VARIED.items()}
        for ways in itertools.product(*(GRID[axis] for axis in how)):
            case = Case(**dict(zip(what, values)), **dict(zip(how, ways)), **varied, positions=16)
            if case.layout[0] == ranks:
                cases.append(case)
    return cases


def name(case: Case) -> str:
    """Short test id: what differs from the default case."""
    default = Case()
    changed = [
        f"{f.name}={getattr(case, f.name)}" for f in fields(case) if getattr(case, f.name) != getattr(default, f.name)
    ]
    return ",".join(changed) or "default"


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """max|Δ| over max|wanted|; NaN counts as infinite."""
    error = (found.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp(min=1e-300)
    return float("inf") if error.isnan() else error.item()
