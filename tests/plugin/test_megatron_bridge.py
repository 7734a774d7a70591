"""Distilling through Megatron-Bridge's own `pretrain()` is the project's own training job, number for number.

Both start from the same Hugging Face folder, read the same cache in the same order and take four steps.
"""

import importlib.util
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from megatron_kd.cache import TeacherCache
from megatron_kd.config import LossConfig, ParallelConfig
from megatron_kd.config_io import load_config
from megatron_kd.loss import TeacherTopK, reference
from tests.data.texts import small_tokenizer
from tests.distributed import run_ranks
from tests.plugin import bridge
from tests.teacher.models import save_llama, write_run
from tests.tiny import megatron_twin

INSTALLED = importlib.util.find_spec("megatron.bridge") is not None
needs_bridge = pytest.mark.skipif(not INSTALLED, reason="Megatron-Bridge is not installed")

ROOT = Path(__file__).parents[2]
LENGTH, STEPS = 32, 4


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A run whose teacher is cached, and whose student is another model."""
    from megatron_kd.teacher.run import cache_teacher

    folder = tmp_path_factory.mktemp("bridge")
    save_llama(folder / "student", num_hidden_layers=4, seed=1)
    file = write_run(
        folder, 30, micro_batch=2, data={"sequence_length": LENGTH, "held_out": 0.2}, cache={"k": 16, "block": 4}
    )
    settings = yaml.safe_load(file.read_text())
    settings |= {
        "student": {"init": str(folder / "student")},
        "loss": {"ce_weight": 0.1, "chunk_tokens": 20},
        "optimizer": {"lr": 1e-2, "warmup_steps": 2},
        "train": {"steps": STEPS, "global_batch": 4, "micro_batch": 2, "precision": "fp32"},
    }
    file.write_text(yaml.safe_dump(settings))
    config = load_config(file)
    cache_teacher(config)
    return config


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


@needs_bridge
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


@needs_bridge
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


@needs_bridge
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


@needs_bridge
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_providers_hook_makes_the_loss_its_definition(config, tensor):
    """1e-5 of the largest: fp32 sums in another order, over four layers backward."""
    for loss, gradient in run_ranks(hooked_model, tensor, config):
        assert loss <= 1e-5
        assert gradient <= 1e-5


def settings(**changes):
    """A recipe's configuration, some of whose settings are others."""
    from megatron.bridge.recipes.gpt import vanilla_gpt_pretrain_config

    return changed(vanilla_gpt_pretrain_config(), ddp__average_in_collective=True, **changes)


def changed(recipe, **changes):
    """Sets `section__name` of a recipe's configuration; returns it."""
    for path, value in changes.items():
        section, name = path.split("__")
        setattr(getattr(recipe, section), name, value)
    return recipe


@needs_bridge
def test_a_recipe_becomes_one_that_distils_and_can_be_saved_with_its_checkpoints(config):
    from megatron.bridge.training.config import ConfigContainer

    from megatron_kd.plugin.megatron_bridge import TeacherCacheConfig, distillation_recipe

    run = distillation_recipe(settings(rng__seed=5), config.cache_url, loss=config.loss)
    data = TeacherCacheConfig(url=config.cache_url, loss=config.loss, seq_length=LENGTH, random_seed=5)
    assert run.dataset == data
    assert run.model.seq_length == LENGTH
    assert run.model.calculate_per_token_loss
    assert not run.ddp.average_in_collective
    assert run.validation.eval_iters == 0
    assert ConfigContainer.from_dict(run.to_dict()).dataset == data


@needs_bridge
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__overlap_moe_expert_parallel_comm": True}, "model.overlap_moe_expert_parallel_comm"),
        ({"model__cuda_graph_impl": "full_iteration"}, "CUDA graph of the full iteration"),
        ({"dist__use_decentralized_pg": True}, "dist.use_decentralized_pg"),
        ({"dist__eval_context_parallel_size": 2}, "dist.eval_context_parallel_size"),
    ],
)
def test_what_cannot_be_distilled_is_refused_by_name(config, changes, message):
    from megatron_kd.plugin.megatron_bridge import distillation_recipe

    with pytest.raises(ValueError, match=message):
        distillation_recipe(settings(**changes), config.cache_url)


@needs_bridge
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__seq_length": 64}, "model.seq_length 64 .* samples of 32 positions"),
        ({"model__hybrid_layer_pattern": "M-*-"}, "model.hybrid_layer_pattern M-"),
        ({"model__pipeline_model_parallel_size": 2}, "train.micro_batch_size > 1 in a pipeline"),
    ],
)
def test_what_is_changed_after_the_recipe_is_refused_as_well(config, changes, message):
    from megatron.bridge.data.base import DatasetBuildContext

    from megatron_kd.plugin import KDHandle
    from megatron_kd.plugin.megatron_bridge import distillation_recipe

    run = changed(distillation_recipe(settings(), config.cache_url), dataset__packed=True, **changes)
    train, valid, test = run.dataset.build_datasets(DatasetBuildContext(4, 0, 0))
    assert valid is test is None
    with pytest.raises(RuntimeError, match=r"give pretrain\(\) kd_forward_step"):
        next(train)
    with pytest.raises(ValueError, match=message):
        run.dataset.start(SimpleNamespace(cfg=run, train_state=None), KDHandle([]))


@needs_bridge
def test_a_cache_that_does_not_suit_is_refused_with_both_values(config, tmp_path):
    from megatron.bridge.data.base import DatasetBuildContext

    from megatron_kd.plugin.megatron_bridge import TeacherCacheConfig, distillation_recipe

    with pytest.raises(ValueError, match=r"loss\.k = 17; .* holds 16 entries"):
        distillation_recipe(settings(), config.cache_url, loss=LossConfig(k=17))
    small_tokenizer(280).save_pretrained(tmp_path)
    for folder, outcome in (
        (config.student_init, nullcontext()),
        (tmp_path, pytest.raises(ValueError, match=f"{tmp_path} has hash .* was made with")),
    ):
        tokenizer = SimpleNamespace(library="huggingface", path=folder)  # as Bridge hands it over
        with outcome:
            data = TeacherCacheConfig(url=config.cache_url, seq_length=LENGTH)
            data.build_datasets(DatasetBuildContext(4, 0, 0, tokenizer=tokenizer))


@needs_bridge
def test_a_head_that_cannot_take_the_loss_is_refused():
    from megatron_kd.plugin.megatron_bridge import handle_of, kd_pre_wrap_hook

    small = SimpleNamespace(post_process=True, output_layer=SimpleNamespace(output_size=256))
    with pytest.raises(ValueError, match=r"256 vocabulary rows, .* vocabulary is 300"):
        kd_pre_wrap_hook(LossConfig(), vocab_size=300)([small])
    model = torch.nn.Module()
    with pytest.raises(ValueError, match="has no distillation loss"):
        handle_of(model)
    model.kd_handle, model.post_process, model.output_layer = object(), True, torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="output_layer has become a Linear"):
        handle_of(model)


@pytest.mark.skipif(INSTALLED, reason="Megatron-Bridge is installed")
def test_without_bridge_the_error_says_what_to_install():
    with pytest.raises(ImportError, match="pip install 'megatron-bridge"):
        importlib.import_module("megatron_kd.plugin.megatron_bridge")
