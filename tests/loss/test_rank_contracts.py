"""What holds between tensor-parallel ranks beyond right numbers: run as one job of two ranks.

Every check_… function runs on both ranks; a failure's traceback names it.
"""

import math

import pytest
import torch
import torch.distributed as dist

from megatron_kd.loss import KDObjective, TeacherTopK, dense_kl, forward_chunked_kl, fused_linear_kl, validate
from megatron_kd.loss.vocab_parallel import Pending, VocabShard
from megatron_kd.plan.allocator import measure
from tests.distributed import run_ranks
from tests.loss.cases import Case, dense, make, relative_error
from tests.loss.test_tensor_parallel import fused_on_rank, shard


def check_hidden_gradient_is_the_same_on_all_ranks_and_contiguous(rank, ranks):
    """Also when the incoming gradient is transposed: Megatron's reductions drop non-contiguous gradients."""
    case = Case(batch=2, layout=(2, False))
    tensors = make(case)
    leaves = shard(case, tensors, rank)
    loss = fused_on_rank(case, tensors, leaves).loss
    (d_hidden,) = torch.autograd.grad(loss.transpose(0, 1).contiguous().mul(3).sum(), leaves[0])
    assert d_hidden.is_contiguous()
    both = [torch.empty_like(d_hidden) for _ in range(ranks)]
    dist.all_gather(both, d_hidden)
    assert torch.equal(*both)


def check_gradcheck_through_the_collectives(rank, ranks):
    """Finite differences in hidden, perturbed alike on both ranks."""
    case = Case(ce_weight=0.7, temperature=2.0, layout=(2, False), positions=4, vocab=10, hidden=3, k=3, chunk=3)
    tensors = make(case)
    hidden, weight = shard(case, tensors, rank)
    weight = weight.detach()
    assert torch.autograd.gradcheck(lambda h: fused_on_rank(case, tensors, [h, weight]).loss, hidden)


def check_whole_weight_on_every_rank_is_refused(rank, ranks):
    """It would add log 2 to the loss, silently."""
    tensors = make(Case())
    whole = tensors.hidden.detach(), tensors.weight.detach(), tensors.teacher
    with pytest.raises(ValueError, match=r"24 rows on each of 2 .* vocabulary of 48, but vocab_size is 24"):
        fused_linear_kl(*whole, tp_group=dist.group.WORLD, vocab_size=24)
    with pytest.raises(ValueError, match="vocab_size is None with 2 tensor-parallel ranks"):
        fused_linear_kl(*whole, tp_group=dist.group.WORLD)
    with pytest.raises(ValueError, match=r"K = 5 entries but weight has only 4 columns"):
        fused_linear_kl(whole[0], whole[1][:2], whole[2], tp_group=dist.group.WORLD, vocab_size=4)


def check_validate_compares_ranks(rank, ranks):
    tensors = make(Case())
    hidden, weight = tensors.hidden.detach(), tensors.weight.detach()
    group = {"tp_group": dist.group.WORLD, "vocab_size": 24}
    validate(hidden, weight.chunk(2)[rank], tensors.teacher, **group)
    validate(hidden.chunk(2)[rank], weight.chunk(2)[rank], tensors.teacher, sequence_parallel=True, **group)
    with pytest.raises(ValueError, match="hidden differs between the 2 tensor-parallel ranks"):
        validate(hidden + rank, weight.chunk(2)[rank], tensors.teacher, **group)
    with pytest.raises(ValueError, match="weight is the same on all 2 tensor-parallel ranks"):
        validate(hidden, weight.chunk(2)[0], tensors.teacher, **group)


def check_every_rank_takes_part_in_every_chunk(rank, ranks):
    """One rank holds no teacher entry and everything is masked: no deadlock, and exact zeros."""
    for backward in ("recompute", "in_forward"):
        for sequence_parallel in (False, True):
            case = Case(ce_weight=0.7, layout=(2, sequence_parallel), backward=backward)
            tensors = make(case)
            tensors.teacher = TeacherTopK(tensors.teacher.ids % 12, torch.full_like(tensors.teacher.logprobs, math.nan))
            tensors.labels = tensors.labels * 0
            tensors.loss_mask = torch.zeros(case.positions)
            leaves = shard(case, tensors, rank)
            loss = fused_on_rank(case, tensors, leaves).loss
            for x in (loss, *torch.autograd.grad(loss.sum(), leaves)):
                assert x.abs().max() == 0


def check_baselines(rank, ranks):
    for function in (dense_kl, forward_chunked_kl):
        for sequence_parallel in (False, True):
            for kind in ("ghost", "truncated"):
                layout = (2, sequence_parallel)
                case = Case(kind=kind, ce_weight=0.7, temperature=2.0, layout=layout, mask=True, bias=True, batch=2)
                tensors = make(case)
                leaves = shard(case, tensors, rank)
                wanted = dense(case, tensors)
                whole = torch.autograd.grad((wanted * tensors.upstream).sum(), tensors.leaves())
                found = fused_on_rank(case, tensors, leaves, function=function).loss
                assert relative_error(found, wanted) <= 1e-10
                mine = torch.autograd.grad((found * tensors.upstream).sum(), leaves)
                for x, y in zip(mine, whole):
                    assert relative_error(x, y if x.shape == y.shape else y.chunk(2)[rank]) <= 1e-10


def check_main_grad(rank, ranks):
    """Each rank's main_grad is its shard of the whole gradient, in both modes, twice accumulated."""
    for backward in ("recompute", "in_forward"):
        case = Case(layout=(2, True), backward=backward)
        tensors = make(case)
        wanted = torch.autograd.grad(dense(case, tensors).sum(), tensors.weight)[0].chunk(2)[rank]
        leaves = shard(case, tensors, rank)
        leaves[1].main_grad, leaves[1].grad_added_to_main_grad = torch.zeros_like(leaves[1]), False
        for _ in range(2):
            fused_on_rank(case, tensors, leaves).loss.sum().backward()
        assert relative_error(leaves[1].main_grad, 2 * wanted) <= 1e-10


def check_no_whole_hidden_under_sequence_parallelism(rank, ranks):
    """N·D is the largest of all sizes here: the only allocation near it is the slice's gradient, half of it."""
    n, d, v, k = 8192, 64, 64, 4
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, d, generator=g).chunk(2)[rank].clone().requires_grad_()
    weight = torch.randn(v, d, generator=g).chunk(2)[rank].clone().requires_grad_()
    ids = torch.randint(0, v // k, (n, k), generator=g) + torch.arange(k) * (v // k)
    teacher = TeacherTopK(ids, torch.full((n, k), -2.0))
    for backward in ("recompute", "in_forward"):
        group = {"tp_group": dist.group.WORLD, "sequence_parallel": True, "vocab_size": v}

        def step(backward=backward, group=group):
            loss = fused_linear_kl(hidden, weight, teacher, chunk_tokens=256, backward=backward, **group).loss
            return torch.autograd.grad(loss.sum(), (hidden, weight))

        step()
        largest = measure(step, torch.device("cpu")).largest
        assert largest[0] == 4 * n * d // 2
        assert largest[1] <= n * d  # a quarter of the whole: chunks, [N] statistics


def trace(rank, sequence_parallel, backward):
    """Names of GEMMs, of collectives when issued, and of waits, in order, for four chunks."""
    events = []
    d, columns = 3, 5
    original = {name: getattr(torch, name) for name in ("mm", "addmm")}
    gather_statistics, reduce_rows = VocabShard.gather_statistics, VocabShard.reduce_rows

    class Traced(Pending):
        def wait(self):
            if self.name:
                events.append(f"wait {self.name}")
            return Pending.wait(self)

    def traced(pending, name):
        events.append(f"issue {name}")
        pending = Traced(*pending)
        pending.name = name
        return pending

    def mm(x, y, **rest):
        events.append("project" if y.shape[1] == columns else "dh")
        return original["mm"](x, y, **rest)

    def addmm(*arguments, **rest):
        events.append("dW")
        return original["addmm"](*arguments, **rest)

    torch.mm, torch.addmm = mm, addmm
    VocabShard.gather_statistics = lambda self, x: traced(gather_statistics(self, x), "statistics")
    VocabShard.reduce_rows = lambda self, x, out: traced(reduce_rows(self, x, out), "reduce")
    try:
        g = torch.Generator().manual_seed(0)
        hidden = torch.randn(8 // (2 if sequence_parallel else 1), d, generator=g, requires_grad=True)
        weight = torch.randn(columns, d, generator=g, requires_grad=True)
        teacher = TeacherTopK(torch.tensor([[0, 7]]).expand(8, 2), torch.full((8, 2), -1.0))
        loss = fused_linear_kl(
            hidden,
            weight,
            teacher,
            objective=KDObjective("truncated"),
            vocab_size=10,
            chunk_tokens=2 if backward == "recompute" else 4,  # in_forward: two slots of half the rows
            backward=backward,
            tp_group=dist.group.WORLD,
            sequence_parallel=sequence_parallel,
        ).loss.sum()
        events.append("backward")
        torch.autograd.grad(loss, (hidden, weight))
    finally:
        torch.mm, torch.addmm = original["mm"], original["addmm"]
        VocabShard.gather_statistics, VocabShard.reduce_rows = gather_statistics, reduce_rows
    return events


def check_overlap(rank, ranks):
    """Chunk i's statistics travel while chunk i + 1 is projected; dh's reduction while dW is formed."""
    for sequence_parallel in (False, True):
        for backward in ("recompute", "in_forward"):
            events = trace(rank, sequence_parallel, backward)

            def nth(name, index, events=events):
                return [i for i, event in enumerate(events) if event == name][index]

            for chunk in range(3):
                issued, waited = nth("issue statistics", chunk), nth("wait statistics", chunk)
                assert issued < nth("project", chunk + 1) < waited, events
            for chunk in range(4):
                issued, waited = nth("issue reduce", chunk), nth("wait reduce", chunk)
                assert nth("dh", chunk) < issued < nth("dW", chunk) < waited, events


CHECKS = [value for key, value in list(globals().items()) if key.startswith("check_")]


def all_checks(rank, ranks):
    for check in CHECKS:
        check(rank, ranks)


def test_contracts_of_two_ranks():
    run_ranks(all_checks, 2, timeout=600)
