"""Distilling through Megatron-Bridge's own `pretrain()` is the project's own training job, number for number.

Both start from the same Hugging Face folder, read the same cache in the same order and take four steps.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_kd.cache import TeacherCache
from megatron_kd.config import ParallelConfig
from megatron_kd.loss import TeacherTopK, reference
from tests.distributed import run_ranks
from tests.plugin import bridge
from tests.plugin.bridge import needs_bridge
from tests.tiny import megatron_twin

pytestmark = needs_bridge

ROOT = Path(__file__).parents[2]
LENGTH, STEPS = 32, 4


def run_file(config):
    return Path(config.run_dir).parent / "run.yaml"


@pytest.fixture(scope="module")
def expected(config):
    """The project's own job on the same software: what it logs of each step, and its checkpoint."""
    # A process of its own, for checkpoints are written by further ones.
    job = (
        "import sys; from tests.plugin import bridge; bridge.enable_on_cpu();"
        "from megatron_kd.config_io import load_config; from megatron_kd.train.run import distill;"
        "print(distill(load_config(sys.argv[1])))"
    )
    command = [sys.executable, "-c", job, str(run_file(config))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in Path(config.run_dir, "metrics.jsonl").read_text().splitlines()]
    names = {"kd loss": "kd", "lm loss": "ce", "total loss": "loss"}
    steps = [record for record in records if record["stage"] == "distill"]
    return [{name: step[key] for name, key in names.items()} for step in steps], Path(done.stdout.split()[-1])


def train_in_bridge(rank, world_size, config, parallel, checkpoint):
    """What Bridge hands its callbacks of each step, and the largest difference of a trained weight."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    bridge.enable_on_cpu()

    from megatron_kd.plugin.megatron_bridge import distillation_recipe
    from megatron_kd.student.checkpoint import load_weights
    from megatron_kd.student.hf_weights import HfWeights
    from megatron_kd.student.model import initialize_parallel

    trained = []
    recipe = bridge.recipe(config, parallel, trained)
    losses, _ = bridge.pretrain_noted(distillation_recipe(recipe, config.cache_url, loss=config.loss))
    initialize_parallel(parallel, config.seed)  # pretrain() has taken its groups down
    weights = HfWeights(config.student_init)
    twins, _ = megatron_twin(weights.config, weights, LENGTH, parallel)
    load_weights(checkpoint, twins)
    return losses, max(
        (mine - theirs).abs().max().item()
        for chunk, twin in zip(trained, twins)
        for mine, theirs in zip(chunk.parameters(), twin.parameters())
    )


LAYOUTS = [
    (1, ParallelConfig()),
    (2, ParallelConfig(tensor=2)),
    pytest.param((2, ParallelConfig()), marks=pytest.mark.full),
    pytest.param((2, ParallelConfig(pipeline=2)), marks=pytest.mark.full),
    pytest.param((2, ParallelConfig(pipeline=2, virtual_pipeline=2)), marks=pytest.mark.full),
]


@pytest.mark.parametrize(
    "layout", LAYOUTS, ids=lambda x: f"{x[0]}ranks-TP{x[1].tensor}-PP{x[1].pipeline}-VPP{x[1].virtual_pipeline}"
)
def test_pretrain_is_the_projects_own_job(config, expected, layout):
    """1e-5: four Adam steps of at most 1e-2, from gradients summed in another order."""
    losses, checkpoint = expected
    world_size, parallel = layout
    ranks = run_ranks(train_in_bridge, world_size, config, parallel, checkpoint)
    _same(ranks[-1][0], losses)
    assert max(worst for _, worst in ranks) <= 1e-5


def _same(found, expected):
    assert len(found) == len(expected)
    for step, (mine, theirs) in enumerate(zip(found, expected)):
        assert mine == pytest.approx(theirs, rel=1e-5), step


@pytest.mark.full
def test_a_run_goes_on_where_it_stopped_with_other_ranks(config, expected, tmp_path):
    """Two steps on one rank, saved by Bridge; the others on two replicas. Bound: as above."""
    losses, _ = expected
    found = []
    for ranks, last in ((1, 2), (2, STEPS)):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [
            "-m",
            "tests.plugin.bridge",
            str(Path(config.run_dir).parent / "run.yaml"),
            str(tmp_path),
            str(last),
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr
        found += json.loads(done.stdout.splitlines()[-1])
    _same(found, losses)


def evaluate_in_bridge(rank, world_size, config):
    """Two steps that change nothing, and what an evaluation on the same samples finds after each."""
    bridge.enable_on_cpu()

    from megatron_kd.plugin.megatron_bridge import distillation_recipe

    run = distillation_recipe(
        bridge.recipe(config, ParallelConfig(), []),
        config.cache_url,
        loss=config.loss,
        valid_cache_url=config.cache_url,
    )
    run.train.train_iters, run.optimizer.lr = 2, 0.0
    run.validation.eval_iters, run.validation.eval_interval = 1, 1
    return bridge.pretrain_noted(run)


@pytest.mark.full
def test_an_evaluation_finds_what_training_on_the_same_samples_does(config):
    ((steps, evaluations),) = run_ranks(evaluate_in_bridge, 1, config)
    assert len(evaluations) == 3  # the last when training has ended
    _same(evaluations[:2], steps)


def hooked_model(rank, world_size, config):
    """Largest differences, of a loss and of a gradient, from the loss's definition on the stock model's logits."""
    bridge.enable_on_cpu()

    import numpy as np
    from megatron.bridge.training.config import DistributedDataParallelConfig
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    from megatron_kd import platform
    from megatron_kd.data.dataset import make_batch, targets_of, with_targets
    from megatron_kd.plugin.megatron_bridge import handle_of, kd_pre_wrap_hook
    from megatron_kd.student.model import initialize_parallel

    parallel, cache = ParallelConfig(tensor=world_size), TeacherCache.open(config.cache_url)
    initialize_parallel(parallel, seed=1)
    builder = bridge.provider(config, parallel, [])
    builder.register_pre_wrap_hook(kd_pre_wrap_hook(config.loss, cache.manifest.vocab_size))
    builder.finalize()
    (model,) = builder.provide_distributed_model(ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True))

    samples = np.array([3, 40])
    read = cache.read(samples)
    batch = make_batch(samples, read, platform.device(), packed=False)
    batch = with_targets(batch, targets_of(read, platform.device()))
    inputs = (batch.tokens, batch.position_ids, batch.attention.mask)
    handle_of(model).set_targets(model, batch.teacher, labels=batch.labels, loss_mask=batch.loss_mask)
    losses = model(*inputs, labels=batch.labels)
    losses.sum().backward()
    gradients = [parameter.main_grad.clone() for parameter in model.parameters()]

    model.zero_grad_buffer()
    vocab_size = cache.manifest.vocab_size
    logits = gather_from_tensor_model_parallel_region(model(*inputs))[..., :vocab_size].flatten(0, 1)
    defined = reference(
        logits,
        torch.eye(vocab_size),
        TeacherTopK(*(x.flatten(0, 1) for x in batch.teacher)),
        objective=config.loss.objective,
        labels=batch.labels.flatten(),
        loss_mask=batch.loss_mask.flatten(),
    )
    defined.sum().backward()
    difference = (losses.flatten() - defined).abs().max() / defined.abs().max()
    return difference.item(), max(
        ((mine - parameter.main_grad).abs().max() / parameter.main_grad.abs().max()).item()
        for mine, parameter in zip(gradients, model.parameters())
    )


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_providers_hook_makes_the_loss_its_definition(config, tensor):
    """1e-5 of the largest: fp32 sums in another order, over four layers backward."""
    for loss, gradient in run_ranks(hooked_model, tensor, config):
        assert loss <= 1e-5
        assert gradient <= 1e-5
