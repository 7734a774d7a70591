"""The reported divergences are their definitions, for any chunk."""

import math

import pytest
import torch

from megatron_kd.evaluate.divergence import Divergence, update


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_means_equal_the_dense_definitions(chunk):
    """fp32 log-softmax over 90 columns against fp64: 1e-5 relative."""
    random = torch.Generator().manual_seed(0)
    n, v, padding = 40, 90, 6
    hidden = [torch.randn(n, d, generator=random) for d in (16, 8)]
    heads = [torch.randn(v + padding, d, generator=random) for d in (16, 8)]
    labels = torch.randint(0, v, (n,), generator=random)
    mask = (torch.rand(n, generator=random) > 0.3).float()
    divergences = [Divergence(), Divergence()]
    for half in (slice(0, 15), slice(15, n)):
        update(divergences, [h[half] for h in hidden], heads, labels[half], mask[half], vocab_size=v, chunk=chunk)
    log_p, log_q = ((h.double() @ w[:v].double().T).log_softmax(-1)[mask > 0] for h, w in zip(hidden, heads))
    kept = labels[mask > 0]
    teacher, student = (divergence.result() for divergence in divergences)
    assert teacher["kl"] == 0
    assert teacher["top1_agreement"] == 1
    assert student["kl"] == pytest.approx((log_p.exp() * (log_p - log_q)).sum(-1).mean().item(), rel=1e-5)
    cross_entropy = -log_q.gather(1, kept[:, None]).mean().item()
    assert student["cross_entropy"] == pytest.approx(cross_entropy, rel=1e-5)
    assert student["perplexity"] == pytest.approx(math.exp(cross_entropy), rel=1e-4)
    assert student["top1_agreement"] == pytest.approx((log_p.argmax(1) == log_q.argmax(1)).double().mean().item())


def test_nothing_to_evaluate_is_an_error():
    with pytest.raises(ValueError, match="no held-out position"):
        Divergence().result()
