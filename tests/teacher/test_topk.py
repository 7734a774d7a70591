"""Targets against fp64 log-softmax of dense logits and a stable sort."""

import numpy as np
import pytest
import torch

from megatron_kd.plan.allocator import measure
from megatron_kd.teacher.engine import Head
from megatron_kd.teacher.topk import targets_of_logits, topk_targets
from megatron_kd.teacher.vocabulary import VocabularyShard


def reference(logits, labels, k, temperatures=(1.0,)):
    """(ids, logprobs, tail, logz, label) of dense logits, in fp64 with NumPy."""
    z = logits.double().numpy()
    order = np.argsort(-z, axis=1, kind="stable")[:, :k]  # stable: ties by lowest id
    logz = np.stack([np.logaddexp.reduce(z / t, axis=1) for t in temperatures], axis=1)
    rest = z.copy()
    np.put_along_axis(rest, order, -np.inf, axis=1)
    entries = np.take_along_axis(z, order, axis=1)
    label = np.take_along_axis(z, labels.numpy()[:, None], axis=1)[:, 0]
    one = logz[:, 0]
    return order, entries - one[:, None], np.logaddexp.reduce(rest, axis=1) - one, logz, label - one


def require_equal(targets, expected, rounding):
    """Ids exactly; the rest to one fp32 rounding of its own size, and `rounding` for the fp32 sum over the tail."""
    ids, *numbers = expected
    assert targets.ids.dtype == torch.int32
    assert np.array_equal(targets.ids.numpy(), ids)
    for found, wanted in zip(targets[1:], numbers):
        assert found.dtype == torch.float32
        np.testing.assert_allclose(found.numpy(), wanted, rtol=2e-7, atol=rounding)


def padded(logits, rounded_to=128):
    """Logits in the buffer's form: whole blocks of columns, −inf in those that are padding."""
    width = -(-logits.shape[1] // rounded_to) * rounded_to
    buffer = torch.full((len(logits), width), -torch.inf)
    buffer[:, : logits.shape[1]] = logits
    return buffer


def targets_of(logits, labels, k, temperatures=(1.0,)):
    shard = VocabularyShard(0, logits.shape[1], logits.shape[1], None)
    return targets_of_logits(padded(logits), labels, shard, k=k, temperatures=temperatures)


@pytest.mark.parametrize("vocab_size", [1, 2, 7, 129, 257, 4099])
@pytest.mark.parametrize("scale", [0.0, 0.5, 8.0])
def test_targets_equal_dense_softmax(vocab_size, scale):
    """The tail sums positive fp32 terms, each with an exp error of 1 ulp: 5e-7 relative, so absolute in its log."""
    torch.manual_seed(vocab_size)
    logits = torch.randn(37, vocab_size) * scale + 50 * scale
    labels = torch.randint(vocab_size, (37,))
    for k in sorted({1, min(3, vocab_size), min(100, vocab_size), vocab_size}):
        temperatures = (1.0, 0.5, 2.0, 4.0)
        expected = reference(logits, labels, k, temperatures)
        require_equal(targets_of(logits, labels, k, temperatures), expected, rounding=5e-7)


@pytest.mark.parametrize("k", [1, 5, 32, 33, 64, 100])
def test_ties_go_to_the_lowest_id(k):
    """bf16 rounding makes rows tie at the K-th entry; a few values only make them tie everywhere."""
    torch.manual_seed(k)
    for logits in (torch.randn(64, 3000).bfloat16().float(), torch.randint(-2, 3, (64, 3000)).float() * 0.5):
        kth = logits.topk(k).values[:, -1:]
        assert ((logits >= kth).sum(1) > k).any()
        labels = torch.randint(3000, (64,))
        require_equal(targets_of(logits, labels, k), reference(logits, labels, k), rounding=5e-7)


def test_zero_and_minus_zero_tie():
    logits = torch.tensor([[-0.0, 0.0, -1.0, -0.0, 0.0]])
    assert targets_of(logits, torch.tensor([0]), 3).ids.tolist() == [[0, 1, 3]]


def test_the_tail_of_a_sure_teacher_does_not_cancel():
    """The entries hold all but e⁻⁶⁰ of the mass: 1 − Σp is 0 even in fp64, the tail is exact to fp32 rounding."""
    torch.manual_seed(0)
    logits = torch.randn(8, 1000)
    logits[:, 10:20] += 60
    labels = torch.randint(1000, (8,))
    targets = targets_of(logits, labels, 10)
    assert (1 - targets.logprobs.double().exp().sum(1)).abs().max() < 1e-6
    expected = reference(logits, labels, 10)
    require_equal(targets, expected, rounding=5e-7)
    assert (targets.tail_logprob < -50).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_projection_in_chunks_of_any_size(dtype):
    """Padding rows of the head carry huge weights and take no part; the logits are those of the head's dtype."""
    torch.manual_seed(1)
    count, size, vocab_size = 50, 24, 300
    hidden = torch.randn(count, size).to(dtype)
    weight = torch.randn(320, size).to(dtype)
    weight[vocab_size:] = 100
    bias = torch.randn(320).to(dtype)
    bias[vocab_size:] = 1000
    labels = torch.randint(vocab_size, (count,))
    logits = ((hidden @ weight.T).float() + bias.float())[:, :vocab_size]
    expected = reference(logits, labels, 20)
    for chunk in (1, 7, count, count + 1):
        targets = topk_targets(hidden, Head(weight, bias), labels, k=20, vocab_size=vocab_size, chunk_tokens=chunk)
        # fp32 GEMMs of different shapes sum the 24 products in different orders.
        require_equal(targets, expected, rounding=2e-5 if dtype == torch.float32 else 5e-7)


@pytest.mark.parametrize(
    ("vocab_size", "chunk"), [(20_000, 64), pytest.param(201_088, 256, marks=pytest.mark.full)], ids=["small", "large"]
)
def test_peak_memory_is_one_chunk_whatever_the_number_of_positions(vocab_size, chunk):
    """The chunk; then its scratch (4 MiB at most) or 48 bytes a candidate, whichever is more; and the results twice,
    while they are joined. So 32,768 positions of 201,088 columns at K = 100, 512 at a time, need half a GiB.
    """
    k = 100
    head, results = Head(torch.randn(vocab_size, 16)), 2 * (8 * k + 12)
    peaks = []
    for count in (2 * chunk, 4 * chunk):
        hidden, labels = torch.randn(count, 16), torch.zeros(count, dtype=torch.long)

        def targets(hidden=hidden, labels=labels):
            return topk_targets(hidden, head, labels, k=k, vocab_size=vocab_size, chunk_tokens=chunk)

        peaks.append(measure(targets, torch.device("cpu")).peak - count * results)
    assert peaks[1] <= peaks[0] + (1 << 16)
    logits, candidates = chunk * vocab_size * 4, chunk * 32 * k
    assert peaks[1] <= logits + max(min(logits, 4 << 20), 48 * candidates) + (1 << 20)


def test_bad_arguments_are_named():
    hidden, head, labels = torch.zeros(2, 4), Head(torch.zeros(10, 4)), torch.zeros(2, dtype=torch.long)
    with pytest.raises(ValueError, match="k is 11 but the vocabulary has 10 entries"):
        topk_targets(hidden, head, labels, k=11, vocab_size=10)
    with pytest.raises(ValueError, match=r"10 rows on each of 1 rank.* 11 ids"):
        topk_targets(hidden, head, labels, k=1, vocab_size=11)
    with pytest.raises(ValueError, match="first must be 1"):
        topk_targets(hidden, head, labels, k=1, vocab_size=10, temperatures=(2.0,))
    with pytest.raises(ValueError, match="chunk_tokens is 0"):
        topk_targets(hidden, head, labels, k=1, vocab_size=10, chunk_tokens=0)
