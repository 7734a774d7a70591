"""A recipe of Megatron-Bridge's becomes one that distils; what cannot be distilled is refused wherever it is set."""

import importlib
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from megatron_kd.config import LossConfig
from tests.data.texts import small_tokenizer
from tests.plugin.bridge import INSTALLED, needs_bridge

LENGTH = 32


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
