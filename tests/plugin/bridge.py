"""Megatron-Bridge on a CPU: a small student, one of Bridge's own recipes around it, and its `pretrain()`.

Bridge imports Transformer Engine, which computes on GPUs only: its norm and its optimizer make way for torch's.
As a program, under torchrun: trains the run in a YAML file and prints each step's losses.
"""

import contextlib
import importlib.util
import io
import json
import sys
from dataclasses import fields
from functools import partial

import pytest
import torch

from megatron_kd import platform
from megatron_kd.config import ParallelConfig
from megatron_kd.config_io import load_config

INSTALLED = importlib.util.find_spec("megatron.bridge") is not None
needs_bridge = pytest.mark.skipif(not INSTALLED, reason="Megatron-Bridge is not installed")


def enable_on_cpu():
    """Megatron-Core and Bridge without a GPU, where Transformer Engine is installed."""
    import transformer_engine.pytorch  # noqa: F401

    sys.modules["transformer_engine.pytorch.optimizers"] = None  # Megatron-Core then takes torch's
    platform.enable_megatron_training_without_cuda()

    from megatron.bridge.training import setup
    from megatron.core.transformer import transformer_block
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    transformer_block.LayerNormImpl = WrappedTorchNorm
    setup.initialize_megatron = partial(setup.initialize_megatron, allow_no_cuda=True)


def provider(config, parallel, trained):
    """Bridge's provider of the student, made of local layers; its hook loads the weights and notes the chunks."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec
    from megatron.core.transformer import TransformerConfig

    from megatron_kd.student.architecture import architecture, transformer_config
    from megatron_kd.student.convert import load_from_hf
    from megatron_kd.student.hf_weights import HfWeights

    weights = HfWeights(config.student_init)
    arch = architecture(weights.config, parallel)
    settings = transformer_config(weights.config, parallel, dtype=torch.float32)

    def load(chunks):
        load_from_hf(chunks, weights, weights.config, arch)
        trained.extend(chunks)
        return chunks

    model = GPTModelProvider(
        **{field.name: getattr(settings, field.name) for field in fields(TransformerConfig) if field.init},
        transformer_layer_spec=local_layer_spec,
        vocab_size=arch.padded_vocab_size,
        share_embeddings_and_output_weights=arch.tied,
        position_embedding_type="rope",
        rotary_base=arch.rope.theta,
    )
    model.register_pre_wrap_hook(load)
    return model


def recipe(config, parallel, trained):
    """A recipe of Bridge's own, for this student, in fp32 and with the optimizer of `config`; it saves nothing."""
    from megatron.bridge.recipes.gpt import vanilla_gpt_pretrain_config

    recipe, settings = vanilla_gpt_pretrain_config(), config.optimizer
    recipe.model = provider(config, parallel, trained)
    recipe.mixed_precision = None
    recipe.rng.seed = config.seed
    recipe.tokenizer.vocab_size = 300
    recipe.train.train_iters, recipe.train.global_batch_size = config.train.steps, config.train.global_batch
    recipe.train.micro_batch_size = config.train.micro_batch
    recipe.optimizer.lr, recipe.optimizer.min_lr = settings.lr, settings.min_lr
    recipe.optimizer.clip_grad, recipe.optimizer.weight_decay = settings.clip_grad, settings.weight_decay
    recipe.optimizer.adam_beta1, recipe.optimizer.adam_beta2 = settings.beta1, settings.beta2
    recipe.optimizer.adam_eps = settings.eps
    recipe.optimizer.bf16, recipe.optimizer.params_dtype = False, torch.float32
    recipe.optimizer.use_distributed_optimizer = False
    recipe.scheduler.lr_warmup_iters, recipe.scheduler.lr_decay_style = settings.warmup_steps, settings.decay
    recipe.scheduler.start_weight_decay = recipe.scheduler.end_weight_decay = settings.weight_decay
    recipe.dist.distributed_backend = "gloo"
    recipe.logger.tensorboard_dir = None
    recipe.checkpoint.save = recipe.checkpoint.load = None
    return recipe


def pretrain_noted(run):
    """Bridge's `pretrain()` of a distillation recipe: the losses of each step, and of each evaluation."""
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.pretrain import pretrain

    from megatron_kd.plugin.megatron_bridge import kd_forward_step

    steps, evaluations = [], []

    class Noted(Callback):
        def on_train_step_end(self, context):
            steps.append({name: value.item() for name, value in context.loss_dict.items()})

        def on_eval_end(self, context):
            evaluations.append({name: value.item() for name, value in context.total_loss_dict.items()})

    with contextlib.redirect_stdout(io.StringIO()):
        pretrain(run, kd_forward_step, callbacks=[Noted()])
    return steps, evaluations


if __name__ == "__main__":
    enable_on_cpu()
    from megatron_kd.plugin.megatron_bridge import distillation_recipe

    file, checkpoints, last = sys.argv[1:]
    config = load_config(file)
    run = distillation_recipe(recipe(config, ParallelConfig(), []), config.cache_url, loss=config.loss)
    run.scheduler.lr_decay_iters, run.train.train_iters = config.train.steps, int(last)
    run.checkpoint.save = run.checkpoint.load = checkpoints
    losses, _ = pretrain_noted(run)
    print(json.dumps(losses))
