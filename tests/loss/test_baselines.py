"""The baselines give the reference's numbers, on one rank; test_tensor_parallel.py has the others."""

from dataclasses import replace

import pytest
import torch

from megatron_kd.loss import dense_kl, forward_chunked_kl
from tests.loss.cases import dense, fused, make, name, pairwise, relative_error


@pytest.mark.parametrize("baseline", [dense_kl, forward_chunked_kl])
def test_equals_reference(baseline):
    """Bound 1e-10 relative in double precision; every field of KDLoss equals the fused one's."""
    for case in (replace(case, layout=(1, False)) for case in pairwise()):
        tensors = make(case)
        wanted = dense(case, tensors)
        found = fused(case, tensors, function=baseline)
        assert relative_error(found.loss, wanted) <= 1e-10, name(case)
        for x, y in zip(found, fused(case, tensors)):
            assert relative_error(x, y) <= 1e-10, name(case)
        gradients = (
            torch.autograd.grad((loss * tensors.upstream).sum(), tensors.leaves()) for loss in (found.loss, wanted)
        )
        for x, y in zip(*gradients):
            assert relative_error(x, y) <= 1e-10, name(case)
