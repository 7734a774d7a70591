"""Distilling through Megatron-Bridge's own `pretrain()` is the project's own training job, number for number.

Both start from the same Hugging Face folder, read the same cache in the same order and take four steps. Bridge imports
Transformer Engine, which computes on GPUs only: on a CPU its norm and its optimizer make way for torch's.
"""

import contextlib
import importlib.util
import io
import json
import os
import subprocess
import sys
from dataclasses import fields
from functools import partial, reduce
from pathlib import Path

import pytest
import torch
import yaml

from megatron_kd.cache import TeacherCache
from megatron_kd.config import LossConfig, ParallelConfig
from megatron_kd.config_io import load_config
from megatron_kd.loss import TeacherTopK, reference
from tests.distributed import run_ranks
from tests.teacher.models import save_llama, write_run
from tests.tiny import megatron_twin

INSTALLED = importlib.util.find_spec("megatron.bridge") is not None
needs_bridge = pytest.mark.skipif(not INSTALLED, reason="Megatron-Bridge is not installed")

ROOT = Path(__file__).parents[2]
LENGTH, STEPS = 32, 4
LOSS = LossConfig(ce_weight=0.1, chunk_tokens=20)


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


def without_transformer_engines_kernels():
    """Megatron-Core and Bridge on the CPU, where Transformer Engine is installed."""
    import transformer_engine.pytorch  # noqa: F401

    from megatron_kd import platform

    sys.modules["transformer_engine.pytorch.optimizers"] = None  # Megatron-Core then takes torch's
    platform.enable_megatron_training_without_cuda()

    from megatron.core.transformer import transformer_block
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    transformer_block.LayerNormImpl = WrappedTorchNorm

    from megatron.bridge.training import initialize, setup

    setup.initialize_megatron = partial(setup.initialize_megatron, allow_no_cuda=True)
    initialize.compile_helpers = lambda: None  # they come built with the package, without a Makefile


@pytest.fixture(scope="module")
def expected(config):
    """The project's own job on the same software: what it logs of each step, and its checkpoint."""
    # A process of its own, for checkpoints are written by further ones.
    job = (
        "import sys, tests.plugin.test_megatron_bridge as this; this.without_transformer_engines_kernels();"
        "from megatron_kd.config_io import load_config; from megatron_kd.train.run import distill;"
        "print(distill(load_config(sys.argv[1])))"
    )
    command = [sys.executable, "-c", job, str(Path(config.run_dir).parent / "run.yaml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in Path(config.run_dir, "metrics.jsonl").read_text().splitlines()]
    names = {"kd loss": "kd", "lm loss": "ce", "total loss": "loss"}
    steps = [record for record in records if record["stage"] == "distill"]
    return [{name: step[key] for name, key in names.items()} for step in steps], Path(done.stdout.split()[-1])


def provider(hf, parallel):
    """Bridge's provider of a model, made of local layers."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec
    from megatron.core.transformer import TransformerConfig

    from megatron_kd.student.architecture import architecture, transformer_config

    arch, settings = architecture(hf, parallel), transformer_config(hf, parallel, dtype=torch.float32)
    return GPTModelProvider(
        **{field.name: getattr(settings, field.name) for field in fields(TransformerConfig) if field.init},
        transformer_layer_spec=local_layer_spec,
        vocab_size=arch.padded_vocab_size,
        share_embeddings_and_output_weights=arch.tied,
        position_embedding_type="rope",
        rotary_base=arch.rope_theta,
    )


def from_folder(folder, parallel, trained):
    """A pre-wrap hook that loads a Hugging Face folder's weights, and notes the chunks it is given."""
    from megatron_kd.student.architecture import architecture
    from megatron_kd.student.convert import load_from_hf
    from megatron_kd.student.hf_weights import HfWeights

    def hook(chunks):
        weights = HfWeights(folder)
        load_from_hf(chunks, weights, weights.config, architecture(weights.config, parallel))
        trained.extend(chunks)
        return chunks

    return hook


def recipe(config, parallel, trained, save=None):
    """A recipe of Bridge's own, small, in fp32, with the optimizer of `config`."""
    from megatron.bridge.recipes.gpt import vanilla_gpt_pretrain_config

    from megatron_kd.student.hf_weights import HfWeights

    recipe, settings = vanilla_gpt_pretrain_config(), config.optimizer
    recipe.model = provider(HfWeights(config.student_init).config, parallel)
    recipe.model.register_pre_wrap_hook(from_folder(config.student_init, parallel, trained))
    recipe.mixed_precision = None
    recipe.rng.seed = config.seed
    recipe.tokenizer.vocab_size = 300
    recipe.train.train_iters, recipe.train.global_batch_size = STEPS, config.train.global_batch
    recipe.train.micro_batch_size = config.train.micro_batch
    recipe.optimizer.lr, recipe.optimizer.min_lr, recipe.optimizer.clip_grad = settings.lr, settings.min_lr, 1.0
    recipe.optimizer.adam_beta1, recipe.optimizer.adam_beta2 = settings.beta1, settings.beta2
    recipe.optimizer.adam_eps, recipe.optimizer.weight_decay = settings.eps, settings.weight_decay
    recipe.optimizer.bf16, recipe.optimizer.params_dtype = False, torch.float32
    recipe.optimizer.use_distributed_optimizer = False
    recipe.scheduler.lr_warmup_iters, recipe.scheduler.lr_decay_style = settings.warmup_steps, settings.decay
    recipe.scheduler.start_weight_decay = recipe.scheduler.end_weight_decay = settings.weight_decay
    recipe.dist.distributed_backend = "gloo"
    recipe.logger.tensorboard_dir = None
    recipe.checkpoint.save = recipe.checkpoint.load = save
    return recipe


def train_in_bridge(rank, world_size, config, parallel, checkpoint):
    """What Bridge hands its callbacks of each step, and the largest difference of a trained weight."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    without_transformer_engines_kernels()

    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.pretrain import pretrain

    from megatron_kd.plugin.megatron_bridge import distillation_recipe, kd_forward_step
    from megatron_kd.student.checkpoint import load_weights
    from megatron_kd.student.hf_weights import HfWeights
    from megatron_kd.student.model import initialize_parallel

    class Noted(Callback):
        def __init__(self):
            self.losses = []

        def on_train_step_end(self, context):
            self.losses.append({name: value.item() for name, value in context.loss_dict.items()})

    trained, noted = [], Noted()
    with contextlib.redirect_stdout(io.StringIO()):
        run = distillation_recipe(recipe(config, parallel, trained), config.cache_url, loss=LOSS)
        pretrain(run, kd_forward_step, callbacks=[noted])
    initialize_parallel(parallel, config.seed)  # pretrain() has taken its groups down
    weights = HfWeights(config.student_init)
    twins, _ = megatron_twin(weights.config, weights, LENGTH, parallel)
    load_weights(checkpoint, twins)
    return noted.losses, max(
        (mine - theirs).abs().max().item()
        for chunk, twin in zip(trained, twins)
        for mine, theirs in zip(chunk.parameters(), twin.parameters())
    )


LAYOUTS = [
    ParallelConfig(),
    ParallelConfig(tensor=2),
    pytest.param(ParallelConfig(pipeline=2), marks=pytest.mark.full),
]


@needs_bridge
@pytest.mark.parametrize("parallel", LAYOUTS, ids=lambda p: f"TP{p.tensor}-PP{p.pipeline}")
def test_pretrain_is_the_projects_own_job(config, expected, parallel):
    """1e-5: four Adam steps of at most 1e-2, from gradients summed in another order."""
    losses, checkpoint = expected
    ranks = run_ranks(train_in_bridge, parallel.tensor * parallel.pipeline, config, parallel, checkpoint)
    found, _ = ranks[-1]
    assert len(found) == STEPS
    for step, (mine, theirs) in enumerate(zip(found, losses)):
        assert mine == pytest.approx(theirs, rel=1e-5), step
    assert max(worst for _, worst in ranks) <= 1e-5


def hooked_model(rank, world_size, config):
    """Largest differences, of a loss and of a gradient, from the loss's definition on the stock model's logits."""
    without_transformer_engines_kernels()

    import numpy as np
    from megatron.bridge.training.config import DistributedDataParallelConfig
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    from megatron_kd import platform
    from megatron_kd.data.dataset import make_batch, targets_of, with_targets
    from megatron_kd.plugin.megatron_bridge import handle_of, kd_pre_wrap_hook
    from megatron_kd.student.hf_weights import HfWeights
    from megatron_kd.student.model import initialize_parallel

    parallel, cache = ParallelConfig(tensor=world_size), TeacherCache.open(config.cache_url)
    initialize_parallel(parallel, seed=1)
    builder = provider(HfWeights(config.student_init).config, parallel)
    builder.register_pre_wrap_hook(from_folder(config.student_init, parallel, []))
    builder.register_pre_wrap_hook(kd_pre_wrap_hook(LOSS, cache.manifest.vocab_size))
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
        objective=LOSS.objective,
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


def settings(config, **changes):
    """A recipe's configuration, some of whose settings, by dotted name, are others."""
    from megatron.bridge.recipes.gpt import vanilla_gpt_pretrain_config

    recipe = vanilla_gpt_pretrain_config()
    recipe.ddp.average_in_collective = True
    for name, value in changes.items():
        *path, last = name.split("__")
        setattr(reduce(getattr, path, recipe), last, value)
    return recipe


@needs_bridge
def test_a_recipe_becomes_one_that_distils_and_can_be_saved_with_its_checkpoints(config):
    from megatron.bridge.training.config import ConfigContainer

    from megatron_kd.plugin.megatron_bridge import TeacherCacheConfig, distillation_recipe

    run = distillation_recipe(settings(config, rng__seed=5), config.cache_url, loss=LOSS)
    data = TeacherCacheConfig(url=config.cache_url, loss=LOSS, seq_length=LENGTH, random_seed=5)
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
        distillation_recipe(settings(config, **changes), config.cache_url)


@needs_bridge
def test_a_cache_that_does_not_suit_is_refused_with_both_values(config):
    from megatron_kd.plugin.megatron_bridge import distillation_recipe

    with pytest.raises(ValueError, match=r"loss\.k = 17; .* holds 16 entries"):
        distillation_recipe(settings(config), config.cache_url, loss=LossConfig(k=17))


@needs_bridge
def test_a_cache_is_not_read_before_its_place_is_known(config):
    from megatron.bridge.data.base import DatasetBuildContext

    from megatron_kd.plugin.megatron_bridge import TeacherCacheConfig

    data = TeacherCacheConfig(url=config.cache_url, seq_length=LENGTH)
    train, valid, test = data.build_datasets(DatasetBuildContext(4, 0, 0))
    assert valid is test is None
    with pytest.raises(RuntimeError, match="give pretrain\\(\\) kd_forward_step"):
        next(train)


@pytest.mark.skipif(INSTALLED, reason="Megatron-Bridge is installed")
def test_without_bridge_the_error_says_what_to_install():
    with pytest.raises(ImportError, match="pip install 'megatron-bridge"):
        importlib.import_module("megatron_kd.plugin.megatron_bridge")
