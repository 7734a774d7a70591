"""The Triton kernels against the torch ones, and the torch ones against their definition.

Without a GPU the Triton kernels run in Triton's interpreter, in a process of its own, as it must be asked for before
triton is imported. The interpreter cuts fp32 to bf16 where a GPU rounds: there one bf16 result may be a whole unit
in the last place off (2⁻⁷ of its size), not half.
"""

import math
import multiprocessing

import pytest
import torch

from megatron_kd.loss.kernels import select
from tests.loss.cases import NEEDS_GPU, Case, fused, make, relative_error

SHAPES = [  # rows, columns, entries, distance of rows
    (3, 1, 1, 1),
    (5, 7, 3, 9),
    (4, 129, 5, 136),
    (2, 9001, 130, 9008),
    (3, 4, 4, 4),
    (2, 0, 2, 8),
    (3, 5, 0, 5),
]
# Relative rounding of each type's arithmetic and result, and its smallest step.
TYPES = {torch.float64: 2**-50, torch.float32: 2**-21, torch.float16: 2**-10, torch.bfloat16: 2**-8}
SMALLEST = {torch.float64: 1e-320, torch.float32: 1e-44, torch.float16: 2**-24, torch.bfloat16: 1e-40}


def inputs(dtype, rows, columns, entries, distance, device):
    """A strided chunk, its entries (some absent, one row without any), and coefficients of a gradient."""
    g = torch.Generator().manual_seed(rows + columns)
    buffer = (torch.randn(rows, distance, generator=g) * 4).to(dtype)
    order = torch.stack([torch.randperm(max(columns, entries), generator=g)[:entries] for _ in range(rows)])
    order = order.masked_fill(order >= columns, -1)
    if rows > 2:
        order[1] = -1
    values = torch.randn(rows, entries, generator=g, dtype=torch.float64)
    shift = buffer[:, :columns].double().amax(1) if columns else torch.zeros(rows, dtype=torch.float64)
    coefficients = torch.randn(2, rows, generator=g, dtype=torch.float64)
    return [x.to(device) for x in (buffer, order, values, shift, *coefficients)]


def differences(device, ulp):
    """Worst differences between Triton and torch, in units of what each type allows; buffers beyond V untouched."""
    torch_kernels, triton_kernels = select("torch", device), select("triton", device)
    worst = {}
    for dtype in TYPES:
        for rows, columns, entries, distance in SHAPES:
            for tau, plain in ((1.0, False), (2.0, True), (0.5, True)):
                buffer, order, values, shift, a, b = inputs(dtype, rows, columns, entries, distance, device)
                found, wanted = buffer.clone(), buffer.clone()
                sums = triton_kernels.row_statistics(found[:, :columns], order, 1 / tau, plain)
                exact = torch_kernels.row_statistics(wanted[:, :columns], order, 1 / tau, plain)
                assert torch.equal(found, wanted)
                assert torch.equal(sums.maximum, exact.maximum)
                assert (sums.plain is None) == (not plain)
                sum_error = 0.0
                for x, y in zip(sums[1:], exact[1:]):
                    if x is not None:
                        sum_error = max(sum_error, ((x - y).abs() / y.clamp(min=1e-30)).max().item())
                found, wanted, size = buffer.clone(), buffer.clone(), buffer.double()
                arguments = (order, values, shift, a, b if plain else None, 1 / tau)
                triton_kernels.logit_gradient_(found[:, :columns], *arguments)
                torch_kernels.logit_gradient_(wanted[:, :columns], *arguments)
                # The two terms may cancel; what is rounded is their size.
                absolute = (order, values.abs(), shift, a.abs(), b.abs() if plain else None, 1 / tau)
                torch_kernels.logit_gradient_(size[:, :columns], *absolute)
                assert torch.equal(found[:, columns:], buffer[:, columns:])
                allowed = size[:, :columns] * TYPES[dtype] * (ulp if dtype == torch.bfloat16 else 1) + SMALLEST[dtype]
                error = (found.double() - wanted.double())[:, :columns].abs() / allowed
                worst[str(dtype), rows, columns, tau] = (
                    sum_error / (TYPES[dtype] if dtype == torch.float64 else 2**-21),
                    error.nan_to_num(nan=math.inf).max().item() if columns else 0.0,
                )
    return worst


def whole_loss(device):
    """Relative difference of loss and gradients between the two kernels, fp32, all features on."""
    case = Case("ghost", 0.7, 2.0, mask=True, bias=True, padding=8, dtype=torch.float32, vocab=300, k=20)
    results = []
    for name in ("torch", "triton"):
        tensors = make(case, device)
        loss = fused(case, tensors, kernels=name).loss
        results.append([loss, *torch.autograd.grad((loss * tensors.upstream).sum(), tensors.leaves())])
    return max(relative_error(x, y) for x, y in zip(*results))


def interpreted():
    return differences(torch.device("cpu"), ulp=2), whole_loss("cpu")


def test_triton_agrees_with_torch_in_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with multiprocessing.get_context("spawn").Pool(1) as process:
        worst, whole = process.apply_async(interpreted).get(timeout=600)
    assert {key: value for key, value in worst.items() if not max(value) <= 1} == {}
    assert whole <= 1e-6


@pytest.mark.gpu
@NEEDS_GPU
def test_triton_agrees_with_torch_on_the_gpu():
    worst = differences(torch.device("cuda"), ulp=1)
    assert {key: value for key, value in worst.items() if not max(value) <= 1} == {}
    assert whole_loss("cuda") <= 1e-6


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_rows_beyond_32_bit_offsets(name):
    """16,384 × 151,936: the last row starts at element 2.49e9, past 2³¹. Every row holds the same numbers."""
    rows, columns = 16_384, 151_936
    kernels = select(name, torch.device("cuda"))
    line = torch.randn(columns, device="cuda").bfloat16()
    chunk = line.expand(rows, columns).contiguous()
    support = torch.tensor([[0, columns - 1]], device="cuda").expand(rows, 2)
    sums = kernels.row_statistics(chunk, support, 1.0, False)
    assert sums.maximum.unique().numel() == 1
    assert sums.total.unique().numel() == 1
    ones = torch.ones(rows, device="cuda")
    kernels.logit_gradient_(chunk, support, torch.full((rows, 2), 7.0, device="cuda"), 0 * ones, ones, None, 1.0)
    assert torch.equal(chunk[0], chunk[-1])
    assert chunk[-1, 0] == 7
    assert chunk[-1, 1].item() == pytest.approx(line[1].float().exp().item(), rel=2**-8)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tau", [1.0, 2.0])
def test_torch_kernels_follow_their_definition(dtype, tau):
    """Rows longer than one cache block and many rows in one, against whole-tensor fp64. Bounds: the type's rounding."""
    for rows, columns in ((3, 300_000), (700, 500)):
        buffer, order, values, shift, a, b = inputs(dtype, rows, columns, 7, columns, "cpu")
        kernels = select("torch", torch.device("cpu"))
        z = buffer.double()
        for row in range(rows):
            z[row, order[row][order[row] >= 0]] = -math.inf
        chunk = buffer.clone()
        sums = kernels.row_statistics(chunk, order, 1 / tau, True)
        assert torch.equal(chunk.double(), z)
        assert torch.equal(sums.maximum.double(), z.amax(1))
        away = z - z.amax(1, keepdim=True)
        for found, wanted in ((sums.total, (away / tau).exp().sum(1)), (sums.plain, away.exp().sum(1))):
            assert ((found.double() - wanted).abs() / wanted).max() <= max(TYPES[dtype], 1e-6) * 1e-1 + 1e-6

        chunk = buffer.clone()
        kernels.logit_gradient_(chunk, order, values, shift, a, b, 1 / tau)
        away = buffer.double() - shift[:, None]
        wanted = a[:, None] * (away / tau).exp() + b[:, None] * away.exp()
        for row in range(rows):
            wanted[row, order[row][order[row] >= 0]] = values[row][order[row] >= 0]
        scale = wanted.abs().amax(1, keepdim=True)
        assert ((chunk.double() - wanted).abs() / scale).max() <= TYPES[dtype]


@pytest.mark.parametrize("kernel", ["_statistics", "_gradient"])
def test_triton_kernels_compile_for_hopper(kernel, monkeypatch, tmp_path):
    """Without a GPU they cannot run, but they compile; the offset of a row is a 64-bit product."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from megatron_kd.loss.kernels import triton_rows

    if not isinstance(getattr(triton_rows, kernel), triton.JITFunction):
        pytest.skip("triton was imported for its interpreter")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    pointers = {"support": "*i64", "entries": "*i64", "logits": "*bf16", "values": "*bf16"}
    numbers = dict.fromkeys(("row_stride", "columns", "k", "e"), "i32")
    constants = {"INVERSE_TEMPERATURE": 0.5, "PLAIN": True, "WIDE": False, "BLOCK": 8192, "ENTRY_BLOCK": 128}
    function = getattr(triton_rows, kernel)
    known = pointers | numbers | dict.fromkeys(constants, "constexpr")
    signature = {name: known.get(name, "*fp32") for name in function.arg_names}
    source = triton.compiler.ASTSource(fn=function, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert "mul.lo.s64" in compiled.asm["ptx"]


def test_unknown_kernels():
    with pytest.raises(ValueError, match="kernels is 'cuda'; known kernels are auto, torch, triton"):
        select("cuda", torch.device("cpu"))
