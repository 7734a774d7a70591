"""Precision: each bound is what the arithmetic allows, and says why."""

import math

import pytest
import torch

from megatron_kd.loss import KDObjective, TeacherTopK, fused_linear_kl, reference
from tests.loss.cases import DEVICES, NEEDS_GPU, Case, dense, fused, make, pairwise, relative_error

KINDS = ["ghost", "truncated", "renormalized"]


def double(x):
    return x.detach().double().requires_grad_()


def test_fp32_is_right_to_rounding():
    """max|Δ| ≤ 2e-6·max|reference| per tensor: logits of a few units carry a relative 2⁻²⁴ times a few."""
    for case in {
        Case(**{**vars(c), "dtype": torch.float32, "layout": (1, False), "vocab": 257, "k": 16}) for c in pairwise()
    }:
        tensors, exact = make(case), make(case)
        exact.hidden, exact.weight = double(exact.hidden), double(exact.weight)
        exact.bias = None if exact.bias is None else double(exact.bias)
        wanted, found = dense(case, exact), fused(case, tensors).loss
        assert found.dtype == torch.float32
        assert relative_error(found, wanted) <= 2e-6
        wanted_gradients = torch.autograd.grad(wanted.sum(), exact.leaves())
        for x, y in zip(torch.autograd.grad(found.sum(), tensors.leaves()), wanted_gradients):
            assert relative_error(x, y) <= 2e-6, case


@pytest.mark.parametrize("backward", ["recompute", "in_forward"])
@pytest.mark.parametrize(("kind", "ce_weight", "temperature"), [("ghost", 0.0, 1.0), ("truncated", 0.7, 2.0)])
@pytest.mark.parametrize("device", DEVICES)
def test_bf16_loses_one_rounding(backward, kind, ce_weight, temperature, device):
    """dh, and dW in fp32, are within 1.1× of the error of exact row arithmetic on the same bf16 logits.

    Exact: the rows' gradient in fp64, rounded once to bf16, multiplied without error.
    """
    case = Case(kind, ce_weight, temperature, dtype=torch.bfloat16, backward=backward, chunk=17)
    case = Case(**{**vars(case), "positions": 96, "hidden": 64, "vocab": 1031, "k": 32})
    tensors = make(case, device)
    with torch.no_grad():
        tensors.weight /= 8
    tensors.weight.main_grad = torch.zeros(tensors.weight.shape, device=device)
    found = fused(case, tensors, accumulate_main_grad=True)
    (d_hidden,) = torch.autograd.grad(found.loss.sum(), tensors.hidden, retain_graph=True)
    tensors.weight.main_grad.zero_()
    found.loss.sum().backward(inputs=[tensors.weight])

    logits = double(tensors.hidden @ tensors.weight.t())
    identity = torch.eye(case.vocab, dtype=torch.float64, device=device)
    loss = reference(logits, identity, tensors.teacher, objective=case.objective, labels=tensors.labels)
    assert relative_error(found.loss, loss) <= 1e-6  # the loss itself is exact to the logits
    (exact,) = torch.autograd.grad(loss.sum(), logits)
    rounded = exact.bfloat16().double()
    h, w = tensors.hidden.detach().double(), tensors.weight.detach().double()

    def error(x, y):
        return (x.double() - y).norm().item()

    assert error(d_hidden, exact @ w) <= 1.1 * error((rounded @ w).bfloat16(), exact @ w)
    assert error(tensors.weight.main_grad, exact.t() @ h) <= 1.1 * error(rounded.t() @ h, exact.t() @ h)


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("backward", ["recompute", "in_forward"])
def test_the_host_never_waits_for_the_device(backward):
    """CUDA's synchronisation detector raises inside forward and backward."""
    case = Case(
        ce_weight=0.7, temperature=2.0, mask=True, bias=True, padding=8, backward=backward, dtype=torch.bfloat16
    )
    tensors = make(case, "cuda")
    for mode in ("default", "error"):  # the first run compiles kernels, which may wait
        torch.cuda.set_sync_debug_mode(mode)
        try:
            torch.autograd.grad(fused(case, tensors).loss.sum(), tensors.leaves())
        finally:
            torch.cuda.set_sync_debug_mode("default")


def head_of(logits):
    """Hidden rows and a weight whose product is exactly these logits."""
    return logits, torch.eye(logits.shape[1], dtype=logits.dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_does_not_cancel_near_convergence(kind):
    """Student = teacher + 0.02 noise, bf16 logits: the gradient's relative error is below 1e-3 before it is rounded
    to bf16 (fp32 arithmetic gives 1e-6), and one rounding (2⁻⁹ at most) after it. Subtracting p from a q in bf16
    loses 8 %.
    """
    g = torch.Generator().manual_seed(0)
    teacher = torch.randn(64, 2048, generator=g) * 3
    student = (teacher + 0.02 * torch.randn(64, 2048, generator=g)).bfloat16()
    logprobs, ids = torch.log_softmax(student.double() - 0.02 * torch.randn(64, 2048, generator=g), -1).topk(64)
    targets = TeacherTopK(ids, logprobs)
    exact, identity = head_of(double(student))
    (wanted,) = torch.autograd.grad(reference(exact, identity, targets, objective=KDObjective(kind)).sum(), exact)
    for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 2**-9)):
        logits, identity = head_of(student.to(dtype).requires_grad_())
        loss = fused_linear_kl(logits, identity, targets, objective=KDObjective(kind)).loss.sum()
        (found,) = torch.autograd.grad(loss, logits)
        assert ((found.double() - wanted).norm() / wanted.norm()).item() <= bound


@pytest.mark.parametrize("offset", [0.0, 50.0, -50.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_student_equals_teacher(offset, dtype):
    """ghost is a KL: 0 there, to fp32 rounding of the logits' normaliser: |loss| ≤ 1e-6·(1 + max|z|)."""
    g = torch.Generator().manual_seed(0)
    logits = (torch.randn(32, 4096, generator=g) * 4 + offset).to(dtype)
    log_p = torch.log_softmax(logits.double(), -1)
    logprobs, ids = log_p.topk(64)
    tail = log_p.scatter(1, ids, -math.inf).logsumexp(1)
    for stored in (tail, None):
        loss = fused_linear_kl(*head_of(logits), TeacherTopK(ids, logprobs, stored)).loss
        assert loss.abs().max().item() <= 1e-6 * (1 + logits.abs().max().item())


@pytest.mark.parametrize("kind", KINDS)
def test_whole_vocabulary_is_the_full_kl(kind):
    """K = V: no tail; every kind equals KL(teacher‖student). Bound: fp64 rounding."""
    g = torch.Generator().manual_seed(0)
    teacher, student = (torch.randn(16, 50, generator=g, dtype=torch.float64) for _ in range(2))
    logprobs, ids = torch.log_softmax(teacher, -1).sort(descending=True)
    loss = fused_linear_kl(*head_of(student), TeacherTopK(ids, logprobs), objective=KDObjective(kind)).loss
    wanted = torch.nn.functional.kl_div(
        torch.log_softmax(student, -1), torch.log_softmax(teacher, -1), reduction="none", log_target=True
    ).sum(1)
    assert relative_error(loss, wanted) <= 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_mass_slightly_above_one(kind):
    """fp16 log-probabilities of real rows sum to up to 1.0014: loss and gradient still belong together."""
    case = Case(kind=kind, positions=6, hidden=4, vocab=11)
    tensors = make(case)
    logprobs = tensors.teacher.logprobs
    lift = 0.0014 - logprobs.masked_fill(tensors.teacher.ids < 0, -math.inf).logsumexp(1, keepdim=True)
    tensors.teacher = tensors.teacher._replace(logprobs=logprobs + lift)

    def loss(hidden, weight):
        return fused_linear_kl(hidden, weight, tensors.teacher, objective=KDObjective(kind), chunk_tokens=4).loss

    assert torch.autograd.gradcheck(loss, tensors.leaves())


def test_a_sure_student_keeps_its_tail_gradient():
    """Student mass in the tail e⁻²⁰⁰: 1 − Σq would be 0 and the ghost gradient lost; it is T, spread as the tail is.

    In fp32, where e⁻²⁰⁰ is not even representable.
    """
    logits = torch.tensor([[200.0, 0.0, -1.0]], requires_grad=True)
    logprob = torch.tensor([[math.log(0.7)]])
    out = fused_linear_kl(*head_of(logits), TeacherTopK(torch.tensor([[0]]), logprob))
    (gradient,) = torch.autograd.grad(out.loss.sum(), logits)
    share = 1 / (1 + math.exp(-1))
    assert gradient[0].tolist() == pytest.approx([0.3, -0.3 * share, -0.3 * (1 - share)], rel=1e-6)
    wanted = 0.7 * math.log(0.7) + 0.3 * (math.log(0.3) + 200 - math.log1p(math.exp(-1)))
    assert out.loss.item() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("scaled", [True, False])
def test_temperature(scaled):
    """τ² keeps the gradient of small logits about constant; without it, it falls as 1/τ². The reported loss's
    gradient is checked against autograd elsewhere; here its size. Bound 20 %: the small-logit limit is approximate.
    """
    g = torch.Generator().manual_seed(0)
    teacher, student = (0.3 * torch.randn(8, 40, generator=g, dtype=torch.float64) for _ in range(2))
    norms = []
    for tau in (1.0, 2.0, 4.0):
        logprobs, ids = torch.log_softmax(teacher / tau, -1).sort(descending=True)
        logits = student.clone().requires_grad_()
        objective = KDObjective("truncated", tau, scaled)
        loss = fused_linear_kl(*head_of(logits), TeacherTopK(ids, logprobs), objective=objective).loss
        norms.append(torch.autograd.grad(loss.sum(), logits)[0].norm().item())
    for tau, norm in zip((1.0, 2.0, 4.0), norms):
        assert norm == pytest.approx(norms[0] * (1 if scaled else tau**-2), rel=0.2)


@pytest.mark.parametrize("vocab", [1, 7, 129, 257, 129920])
@pytest.mark.parametrize("chunk", [1, 3, 0, -1])
def test_odd_sizes(vocab, chunk):
    """Any V and C: right to rounding of doubles."""
    case = Case(vocab=vocab, k=min(5, vocab), chunk=chunk, positions=5, hidden=2, stored_tail=vocab > 5)
    tensors = make(case)
    wanted, found = dense(case, tensors), fused(case, tensors).loss
    # K = V gives a loss near 0 for V = 1, hence the absolute part.
    assert (found - wanted).abs().max() <= 1e-11 * (1 + wanted.abs().max())
    for x, y in zip(*(torch.autograd.grad(loss.sum(), tensors.leaves()) for loss in (found, wanted))):
        assert (x - y).abs().max() <= 1e-11 * (1 + y.abs().max())


def test_independent_of_microbatches_and_padding_rows():
    """Two halves and the whole, and rows of padding appended: the same losses (fp64 rounding)."""
    case = Case(ce_weight=0.7)
    tensors = make(case)
    whole = fused(case, tensors).loss
    halves = []
    for part in (slice(0, 12), slice(12, 24)):
        teacher = TeacherTopK(tensors.teacher.ids[part], tensors.teacher.logprobs[part])
        halves.append(
            fused_linear_kl(
                tensors.hidden[part], tensors.weight, teacher, objective=case.objective, labels=tensors.labels[part]
            ).loss
        )
    assert relative_error(torch.cat(halves), whole) <= 1e-12

    def lengthen(x, filler):
        return torch.cat([x.detach(), torch.full((5, *x.shape[1:]), filler, dtype=x.dtype)])

    longer = fused_linear_kl(
        lengthen(tensors.hidden, math.inf),
        tensors.weight,
        TeacherTopK(lengthen(tensors.teacher.ids, 3), lengthen(tensors.teacher.logprobs, math.nan)),
        objective=case.objective,
        labels=lengthen(tensors.labels, -100),
        loss_mask=(torch.arange(29) < 24).long(),
    ).loss
    assert relative_error(longer[:24], whole) <= 1e-12
    assert longer[24:].tolist() == [0.0] * 5


def test_padding_columns_take_no_part():
    """11 real columns and 5 of padding with huge weights: no probability there, and a gradient of exactly 0."""
    case = Case(vocab=11, padding=5, kind="truncated", ce_weight=0.5)
    tensors = make(case)
    _, d_weight = torch.autograd.grad(fused(case, tensors).loss.sum(), tensors.leaves())
    assert d_weight[11:].abs().max() == 0
    with torch.no_grad():
        tensors.weight[11:] = math.nan
    d_hidden, d_weight = torch.autograd.grad(fused(case, tensors).loss.sum(), tensors.leaves())
    assert d_hidden.isfinite().all()
    assert d_weight[11:].abs().max() == 0


def test_fully_masked():
    """Loss and gradients exactly 0, NaN in every input notwithstanding."""
    for backward in ("recompute", "in_forward"):
        case = Case(ce_weight=0.7, bias=True, backward=backward)
        tensors = make(case)
        tensors.hidden = torch.full_like(tensors.hidden, math.nan).requires_grad_()
        nan = torch.full_like(tensors.teacher.logprobs, math.nan)
        tensors.teacher = TeacherTopK(tensors.teacher.ids, nan, nan[:, 0])
        tensors.loss_mask = torch.zeros(case.positions)
        out = fused(case, tensors)
        for field in out:
            assert field.abs().max() == 0
        for gradient in torch.autograd.grad(out.loss.sum(), tensors.leaves()):
            assert gradient.abs().max() == 0


def test_reported_parts_add_up():
    """loss = kd_weight·kd + ce_weight·ce, all with the mask's weights; tail and support are masses."""
    case = Case(ce_weight=0.7, temperature=2.0, mask=True, batch=2, stored_tail=True)
    tensors = make(case)
    out = fused(case, tensors)
    assert relative_error(0.9 * out.kd + 0.7 * out.ce, out.loss.detach()) <= 1e-12
    weights, alive = tensors.loss_mask, tensors.loss_mask != 0
    stored = tensors.teacher.tail_logprob.exp()
    assert relative_error(out.tail[alive], (weights * stored)[alive]) <= 1e-12
    log_q = torch.log_softmax(tensors.hidden.detach() @ tensors.weight.detach().t() / 2, -1)
    ids = tensors.teacher.ids.clamp(0, case.vocab - 1)
    on_support = (log_q.gather(-1, ids).exp() * (tensors.teacher.ids >= 0)).sum(-1)
    assert relative_error(out.support[alive], (weights * on_support)[alive]) <= 1e-12
    assert not any(x.requires_grad for x in out[1:])


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64, torch.int16])
@pytest.mark.parametrize("logprob_dtype", [torch.float16, torch.float32, torch.float64])
def test_target_types_are_taken_as_they_are(ids_dtype, logprob_dtype):
    case = Case()
    tensors = make(case)
    tensors.teacher = TeacherTopK(tensors.teacher.ids.to(ids_dtype), tensors.teacher.logprobs.to(logprob_dtype))
    assert relative_error(fused(case, tensors).loss, dense(case, tensors)) <= 1e-10


def test_autocast_does_not_reach_inside():
    """Under autocast the inputs' own type decides."""
    case = Case(dtype=torch.float32)
    tensors = make(case)
    plain = torch.autograd.grad(fused(case, tensors).loss.sum(), tensors.leaves())
    with torch.autocast("cpu", torch.bfloat16):
        cast = torch.autograd.grad(fused(case, tensors).loss.sum(), tensors.leaves())
    assert all(torch.equal(x, y) for x, y in zip(plain, cast))


@pytest.mark.parametrize("backward", ["recompute", "in_forward"])
def test_strided_inputs(backward):
    """Transposed hidden, weight and targets: the same numbers, and contiguous gradients."""
    case = Case(ce_weight=0.7, batch=2, backward=backward)
    plain, strided = make(case), make(case)

    def restride(x):
        return x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_(x.requires_grad)

    strided.hidden, strided.weight, strided.labels = map(restride, (plain.hidden, plain.weight, plain.labels))
    strided.teacher = TeacherTopK(*map(restride, plain.teacher[:2]))
    assert not strided.hidden.is_contiguous()
    wanted = torch.autograd.grad(fused(case, plain).loss.sum(), plain.leaves())
    for x, y in zip(torch.autograd.grad(fused(case, strided).loss.sum(), strided.leaves()), wanted):
        assert x.is_contiguous()
        assert relative_error(x, y) <= 1e-12
