"""head.py's bytes and traffic a logit against the operations that the losses really run, on the meta device."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_kd.config import LossConfig
from megatron_kd.loss import TeacherHead, TeacherTopK
from megatron_kd.plan.allocator import measure
from megatron_kd.plan.dry_run import LOSSES
from megatron_kd.plan.head import head_cost
from megatron_kd.plan.layout import Layout
from megatron_kd.plan.shape import ModelShape

N, D, V, K, CHUNK = 2048, 16, 16_384, 4, 512


def shape(vocab=V, hidden=D):
    return ModelShape(1, hidden, 1, 1, hidden, hidden, 0, 1, vocab, True, (None,))


def layout(positions=N, tensor=1, sequence_parallel=False):
    return Layout(tensor, tensor, 1, 1, 1, 1, sequence_parallel, positions, 1, 1, 8)


class Traffic(TorchDispatchMode):
    """Bytes that operations other than GEMMs read and write: each input and output once."""

    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if func.is_view or "mm" in name or "empty" in name:
            return result
        read, written = ([x for x in tree_leaves(y) if isinstance(x, torch.Tensor)] for y in ((args, kwargs), result))
        if name in ("gather", "scatter_add_", "scatter_"):  # touch the entries only
            read, written = read[1:], []
        elif "zeros" in name or "full" in name:
            read = []
        unique = {id(x): x for x in read}.values()
        self.bytes[name] += sum(x.nbytes for x in [*unique, *written] if 0 not in x.stride())
        return result


def step(loss):
    kind = {"dtype": torch.bfloat16, "device": "meta"}
    hidden, weight = (torch.empty(rows, D, requires_grad=True, **kind) for rows in (N, V))
    weight.main_grad, weight.grad_added_to_main_grad = torch.empty(V, D, device="meta"), False
    teacher = TeacherTopK(*(torch.empty(N, K, dtype=t, device="meta") for t in (torch.int32, torch.float32)))
    if loss.implementation.startswith("online"):
        teacher = TeacherHead(torch.empty(N, D, **kind), torch.empty(V, D, **kind))
    arguments = {
        "objective": loss.objective,
        "labels": torch.empty(N, dtype=torch.long, device="meta"),
        "loss_mask": torch.empty(N, device="meta"),
        "vocab_size": V,
        "chunk_tokens": CHUNK,
        "backward": loss.backward,
    }

    def run():
        losses = LOSSES[loss.implementation](hidden, weight, teacher, **arguments)
        return torch.autograd.grad(losses.loss.sum(), (hidden, weight))

    return run


LOSS_CONFIGS = [
    LossConfig(implementation=implementation, kind=kind, chunk_tokens=CHUNK, backward=backward)
    for implementation, kind, backward in (
        ("fused", "truncated", "recompute"),
        ("fused", "ghost", "in_forward"),
        ("forward_chunked", "truncated", "recompute"),
        ("forward_chunked", "ghost", "recompute"),
        ("dense", "truncated", "recompute"),
        ("dense", "ghost", "recompute"),
        ("online", "truncated", "recompute"),
        ("online_dense", "truncated", "recompute"),
    )
]


@pytest.mark.parametrize("loss", LOSS_CONFIGS, ids=lambda loss: f"{loss.implementation}-{loss.kind}-{loss.backward}")
def test_bytes_and_traffic(loss):
    """2 %: work of [N] and [C, K], next to [N, V].

    The fused loss is planned with the kernels of a GPU: statistics read a logit, the gradient reads and writes one, and
    the 4 MiB block of torch's row kernels is not there.
    """
    cost = head_cost(loss, shape(), layout(), K, element=2, teacher_hidden=D)
    found = measure(step(loss), torch.device("meta")).peak
    scratch = (4 << 20) * (loss.implementation == "fused")
    assert cost.bytes <= 1.02 * found
    assert found <= 1.02 * cost.bytes + scratch
    if loss.implementation == "fused":
        assert cost.traffic == 3 * 2 * N * V
        return
    with Traffic() as traffic:
        step(loss)()
    assert traffic.bytes.total() == pytest.approx(cost.traffic, rel=0.02), traffic.bytes.most_common(9)


def bytes_of(implementation, entries=K, **changes):
    loss = LossConfig(implementation=implementation, kind="truncated", chunk_tokens=CHUNK)
    vocab = changes.pop("vocab", V)
    return head_cost(loss, shape(vocab), layout(**changes), entries, element=2).bytes


def test_every_term_moves_by_its_formula():
    """Twice the positions, twice the vocabulary, two ranks, more entries."""
    rows = 2 * D + 96  # dh in bf16, statistics
    assert bytes_of("fused") == N * rows + 2 * CHUNK * V + 144 * CHUNK * K
    assert bytes_of("fused", positions=2 * N) - bytes_of("fused") == N * rows
    assert bytes_of("fused", vocab=2 * V) - bytes_of("fused") == 2 * CHUNK * V
    assert bytes_of("fused") - bytes_of("fused", tensor=2) == CHUNK * V
    assert bytes_of("fused", entries=K + 1) - bytes_of("fused") == 144 * CHUNK
    # Dense works on the whole vocabulary on every rank; its targets' entries are nothing beside.
    assert bytes_of("dense", tensor=2) == bytes_of("dense") == bytes_of("dense", entries=K + 1)
    assert bytes_of("dense", positions=2 * N) == 2 * bytes_of("dense")
    assert bytes_of("dense", vocab=2 * V) - bytes_of("dense") == 20 * N * V
    assert bytes_of("forward_chunked") - bytes_of("forward_chunked", tensor=2) == (4 * N + 14 * CHUNK) * V / 2
    assert bytes_of("online") - bytes_of("online", tensor=2) == 2 * CHUNK * V
