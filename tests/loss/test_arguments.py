"""Every refusal, by its message; and the chunk size that is chosen when none is given."""

import subprocess
import sys

import pytest
import torch

from megatron_kd.loss import (
    KDObjective,
    TeacherTopK,
    choose_chunk_tokens,
    dense_kl,
    forward_chunked_kl,
    fused_linear_kl,
    validate,
)
from tests.loss.cases import Case, make


def arguments(**changes):
    """Positional and keyword arguments of a good call, changed."""
    tensors = make(Case(mask=True, bias=True, batch=2, stored_tail=True))
    given = {
        "hidden": tensors.hidden.detach().nan_to_num(0),
        "weight": tensors.weight.detach(),
        "ids": tensors.teacher.ids,
        "logprobs": tensors.teacher.logprobs,
        "tail": tensors.teacher.tail_logprob,
        "objective": KDObjective(ce_weight=0.5),
        "labels": tensors.labels,
        "loss_mask": tensors.loss_mask,
        "bias": tensors.bias.detach(),
        "vocab_size": 24,
    } | changes
    teacher = TeacherTopK(given.pop("ids"), given.pop("logprobs"), given.pop("tail"))
    return (given.pop("hidden"), given.pop("weight"), teacher), given


def like(name, **changes):
    """The good argument's tensor, re-made."""
    positional, keywords = arguments()
    named = dict(zip(("hidden", "weight"), positional)) | keywords
    named |= {"ids": positional[2].ids, "logprobs": positional[2].logprobs, "tail": positional[2].tail_logprob}
    return named[name]


REFUSED = {
    r"hidden is \[24\] and weight \[24, 6\]": lambda: {"hidden": torch.zeros(24)},
    r"hidden's last dimension is 5 but weight's is 6": lambda: {"hidden": like("hidden")[..., :5]},
    r"hidden.dtype is torch.float32 but weight.dtype is torch.float64": lambda: {"hidden": like("hidden").float()},
    r"hidden.dtype is torch.int64; need a floating type": lambda: {
        "hidden": like("hidden").long(),
        "weight": like("weight").long(),
        "bias": None,
    },
    r"bias's shape is \[23\] but weight's rows is \[24\]": lambda: {"bias": like("bias")[1:]},
    r"bias.dtype is torch.float32": lambda: {"bias": like("bias").float()},
    r"backward is 'reuse'; known modes are recompute, in_forward": lambda: {"backward": "reuse"},
    r"kernels is 'cuda'; known kernels are": lambda: {"kernels": "cuda"},
    r"vocab_size is 25 but weight has 24 columns on 1 rank": lambda: {"vocab_size": 25},
    r"vocab_size is 0 but": lambda: {"vocab_size": 0},
    r"teacher.ids.dtype is torch.float32; need an integer type": lambda: {"ids": like("ids").float()},
    r"teacher.logprobs.dtype is torch.int64; need a floating type": lambda: {"logprobs": like("ids")},
    r"teacher.logprobs's shape is \[12, 2, 4\] but teacher.ids's is \[12, 2, 5\]": lambda: {
        "logprobs": like("logprobs")[..., :4]
    },
    r"teacher.ids is \[11, 2, 5\]; need \[12, 2, K\]": lambda: {
        "ids": like("ids")[1:],
        "logprobs": like("logprobs")[1:],
    },
    r"teacher.ids has K = 25 entries but weight has only 24 columns": lambda: {
        "ids": like("ids").repeat(1, 1, 5),
        "logprobs": like("logprobs").repeat(1, 1, 5),
    },
    r"teacher.tail_logprob is \[11, 2\]; need \[12, 2\], one value per position": lambda: {"tail": like("tail")[1:]},
    r"teacher.tail_logprob.dtype is torch.int64": lambda: {"tail": like("labels")},
    r"ce_weight is 0.5 but labels is None": lambda: {"labels": None},
    r"labels is \[12\]; need \[12, 2\]": lambda: {"labels": like("labels")[:, 0]},
    r"labels.dtype is torch.float64; need an integer type": lambda: {"labels": like("tail")},
    r"loss_mask is \[12, 1\]; need \[12, 2\]": lambda: {"loss_mask": like("loss_mask")[:, :1]},
    r"chunk_tokens is 0; need at least 1": lambda: {"chunk_tokens": 0},
    r"accumulate_main_grad is True but weight has no main_grad": lambda: {
        "accumulate_main_grad": True,
        "weight": like("weight").requires_grad_(),
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message):
    """The same on every entry point, before any work."""
    for function in (fused_linear_kl, dense_kl, forward_chunked_kl, validate):
        positional, keywords = arguments(**REFUSED[message]())
        with pytest.raises(ValueError, match=message):
            function(*positional, **keywords)


def test_objective_refusals():
    with pytest.raises(ValueError, match="kind is 'reverse'; known kinds are ghost, truncated, renormalized"):
        KDObjective("reverse")
    for temperature in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"temperature is {temperature}; it must be a finite number above 0"):
            KDObjective(temperature=temperature)
    with pytest.raises(ValueError, match="ce_weight is nan; it must be finite"):
        KDObjective(ce_weight=float("nan"))


def at(name, index, value):
    x = like(name).clone()
    x[index] = value
    return {name: x}


ALIVE = (0, 0)  # a position that is not masked; checked below

INVALID = {
    r"teacher.ids holds 24 but the student's vocabulary has 24 columns on 1 rank": lambda: at("ids", (*ALIVE, 2), 24),
    r"teacher.ids holds -2; need vocabulary ids, or −1": lambda: at("ids", (*ALIVE, 2), -2),
    r"teacher.ids must be unique in a row: position 0, found": lambda: at("ids", ALIVE, 3),
    r"teacher.logprobs is not a number: position 0": lambda: at("logprobs", (*ALIVE, 1), float("nan")),
    r"must sum to at most 1 .* at temperature 1.0: position 0": lambda: at("logprobs", (*ALIVE, 1), 0.5),
    r"teacher.tail_logprob is not a number: position 0": lambda: at("tail", ALIVE, float("nan")),
    r"labels must lie in 0 … 23; .*: position 0, found -100 \(1 of 24 positions\)": lambda: at("labels", ALIVE, -100),
    r"hidden is not finite: position 0": lambda: at("hidden", (*ALIVE, 1), float("inf")),
    r"loss_mask is not finite: position 0": lambda: at("loss_mask", ALIVE, float("nan")),
}


@pytest.mark.parametrize("message", INVALID)
def test_validate(message):
    assert like("loss_mask")[ALIVE] != 0
    positional, keywords = arguments(**INVALID[message]())
    with pytest.raises(ValueError, match=message):
        validate(*positional, **keywords)


def test_validate_accepts_good_input_and_garbage_where_masked():
    tensors = make(Case(mask=True, batch=2, stored_tail=True))
    assert tensors.hidden.isnan().any()
    mask = {"loss_mask": tensors.loss_mask, "labels": tensors.labels}
    validate(tensors.hidden, tensors.weight, tensors.teacher, vocab_size=24, **mask)


def test_unknown_argument():
    positional, keywords = arguments()
    for function in (fused_linear_kl, dense_kl, forward_chunked_kl, validate):
        with pytest.raises(TypeError, match="chunk_size"):
            function(*positional, **keywords, chunk_size=3)


@pytest.mark.parametrize(
    ("positions", "rows", "size", "wanted"),
    [
        (4096, 65_536, 4, 2048),  # 512 MiB exactly
        (32_768, 65_536, 2, 4096),
        (32_768, 201_088, 2, 1280),  # 1334 would fit; whole tiles
        (5000, 65_536, 2, 2560),  # two even chunks rather than 4096 + 904
        (100, 65_536, 2, 100),
        (4096, 10_000_000, 4, 13),  # less than a tile fits
        (0, 65_536, 2, 1),
    ],
)
def test_chosen_chunk(positions, rows, size, wanted):
    chosen = choose_chunk_tokens(positions, rows, size)
    assert chosen == wanted
    assert chosen * rows * size <= 512 << 20


def test_no_positions():
    """An empty microbatch has an empty loss and zero gradients."""
    tensors = make(Case())
    hidden = tensors.hidden.detach()[:0].requires_grad_()
    teacher = TeacherTopK(tensors.teacher.ids[:0], tensors.teacher.logprobs[:0])
    for backward in ("recompute", "in_forward"):
        loss = fused_linear_kl(hidden, tensors.weight, teacher, backward=backward).loss
        d_hidden, d_weight = torch.autograd.grad(loss.sum(), (hidden, tensors.weight))
        assert loss.shape == (0,)
        assert d_hidden.shape == (0, 6)
        assert d_weight.abs().max() == 0


def test_the_loss_needs_torch_only():
    """No Megatron, no cache: a machine with torch alone can run and check it."""
    check = "import sys, megatron_kd.loss; print({name.split('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout
    assert "megatron_kd" in loaded
    for name in ("megatron", "zarr", "transformers", "triton"):
        assert f"'{name}'" not in loaded
