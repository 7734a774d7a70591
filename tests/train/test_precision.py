"""bf16 training: what is stored in which type, and that a step's gradients are summed in fp32."""

from dataclasses import replace

import torch

from tests.distributed import run_ranks
from tests.tiny import FAMILY, save_random_model
from tests.train.test_layouts import Cell, batches, manifest, run_config


def _step(rank, world, folder, precision):
    from megatron.core.utils import unwrap_model

    from megatron_kd import platform
    from megatron_kd.student.hf_weights import HfWeights
    from megatron_kd.student.model import initialize_parallel
    from megatron_kd.train.setup import build_student
    from megatron_kd.train.step import batch_shape, run_forward_backward

    platform.init_distributed()
    config = run_config(folder, Cell("llama 3, untied"))
    config = replace(config, train=replace(config.train, precision=precision))
    initialize_parallel(config.parallel, seed=1)
    student = build_student(config, HfWeights(folder), manifest())
    student.chunks[0].zero_grad_buffer()
    logged = run_forward_backward(
        student.chunks, student.handle, [batches(0, 1, 1, True)], micro_batches=4, shape=batch_shape(config)
    )
    parameters = dict(unwrap_model(student.chunks[0]).named_parameters())
    gradients = {name: parameter.main_grad.clone() for name, parameter in parameters.items()}
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    student.optimizer.step()
    return {
        "loss": (logged[0] / logged[1]).item(),
        "gradients": {name: gradient.norm().item() for name, gradient in gradients.items()},
        "parameter types": {parameter.dtype for parameter in parameters.values()},
        "gradient types": {gradient.dtype for gradient in gradients.values()},
        "master types": {p.dtype for group in student.optimizer.optimizer.param_groups for p in group["params"]},
        "moved": any(not torch.equal(before[name], parameter) for name, parameter in parameters.items()),
    }


def test_bf16_parameters_have_fp32_gradients_and_fp32_masters(tmp_path):
    """Beside fp32: the loss within 2 %, gradients' norms within 10 %; bf16 keeps 8 bits through four layers."""
    folder = str(save_random_model(tmp_path / "model", FAMILY["llama 3, untied"]))
    (exact,), (rounded,) = (run_ranks(_step, 1, folder, precision) for precision in ("fp32", "bf16"))
    assert rounded["parameter types"] == {torch.bfloat16}
    assert rounded["gradient types"] == rounded["master types"] == {torch.float32}
    assert rounded["moved"]
    assert abs(rounded["loss"] / exact["loss"] - 1) <= 0.02
    for name, norm in exact["gradients"].items():
        assert abs(rounded["gradients"][name] / norm - 1) <= 0.1, name
