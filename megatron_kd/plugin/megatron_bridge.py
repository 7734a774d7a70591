"""Distillation in a Megatron-Bridge run: any recipe, trained on the targets of a teacher's cache.

    config = distillation_recipe(llama32_1b_sft_config(), "teacher.zarr", loss=LossConfig(ce_weight=0.1))
    pretrain(config, kd_forward_step)

`distillation_recipe` gives the recipe the cache as its data set and registers a pre-wrap hook, which attaches the loss
to the model before DDP wraps it; `kd_forward_step` finds both. Everything else stays the recipe's: model, layout,
optimizer, precision, checkpoints. The text of every micro-batch is the cache's own, with documents kept apart as the
teacher saw them; the same samples meet in a step under any layout and after any restart.

For Megatron-Bridge 0.6. Collectives: those of the batch loader (data/dataset.py) and of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.nn import Module

from megatron_kd import platform
from megatron_kd.cache import TeacherCache
from megatron_kd.config import LossConfig
from megatron_kd.data.dataset import Batch
from megatron_kd.plugin.attach import KDHandle, attach
from megatron_kd.plugin.steps import LossFunction, distillation_step, open_cache, open_loader

try:
    from megatron.bridge.data.base import DatasetBuildContext, DatasetProvider
    from megatron.bridge.training.config import ConfigContainer
    from megatron.bridge.training.state import GlobalState
    from megatron.bridge.utils.cuda_graph import is_full_iteration_cuda_graph
    from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix
except ImportError as error:
    raise ImportError(
        "megatron_kd.plugin.megatron_bridge needs Megatron-Bridge 0.6 and the Transformer Engine it imports: "
        f"pip install 'megatron-bridge>=0.6,<0.7' 'transformer-engine[pytorch]' ({error})"
    ) from error

_STATE_SPACE_LAYERS = {"M", "G"}  # in Megatron-Core's patterns: Mamba, gated delta net

PreWrapHook = Callable[[list[Module]], list[Module]]

# The configuration saved with a checkpoint names TeacherCacheConfig; Bridge reads only classes it was told of.
register_allowed_target_prefix("megatron_kd.")


def distillation_recipe(
    config: ConfigContainer,
    cache_url: str,
    *,
    loss: LossConfig | None = None,
    valid_cache_url: str | None = None,
) -> ConfigContainer:
    """Turns a recipe's configuration into one that distils from a cache; to be trained with `kd_forward_step`.

    Args:
        config: what a recipe returned, and whatever was changed in it; it is changed in place, and returned.
        cache_url: the teacher's cache: a path or any fsspec URL.
        loss: what to minimise; None: the defaults.
        valid_cache_url: the teacher's cache of held-out samples, to evaluate on; None: no evaluation.

    Raises:
        ValueError: a setting, or a cache, that cannot be used, with the reason.
        CacheError: no cache at the URL, or a damaged one.
    """
    loss = loss or LossConfig()
    manifest = open_cache(cache_url, loss).manifest
    config.dataset = TeacherCacheConfig(
        url=cache_url,
        valid_url=valid_cache_url,
        loss=loss,
        seq_length=manifest.seq_length,
        random_seed=config.rng.seed,
    )
    config.model.seq_length = manifest.seq_length
    # A step's loss is a mean over the tokens of the global batch, which no average within a collective can be.
    config.model.calculate_per_token_loss = True
    config.ddp.average_in_collective = False
    if valid_cache_url is None:
        config.validation.eval_iters = 0
    _refuse_unsupported(config)
    hook = kd_pre_wrap_hook(loss, manifest.vocab_size)
    if hasattr(config.model, "register_pre_wrap_hook"):
        config.model.register_pre_wrap_hook(hook)
    else:  # a configuration with a builder, rather than a provider
        config.model.pre_wrap_hooks.append(hook)
    return config


def kd_pre_wrap_hook(loss: LossConfig, vocab_size: int) -> PreWrapHook:
    """A hook for `provider.register_pre_wrap_hook` that attaches the loss; `handle_of(model)` then finds its handle.

    Args:
        loss: objective and chunking.
        vocab_size: the teacher's true vocabulary; columns at or past it are padding.

    Raises:
        ValueError: from the hook: a model to which the loss cannot be attached, with the reason.
    """

    def hook(chunks: list[Module]) -> list[Module]:
        for chunk in chunks:
            if getattr(chunk, "post_process", False) and chunk.output_layer.output_size < vocab_size:
                raise ValueError(
                    f"the model has {chunk.output_layer.output_size} vocabulary rows, padding included; the teacher's "
                    f"vocabulary is {vocab_size}: use its tokenizer, or set model.vocab_size to as many rows"
                )
        handle = attach(chunks, loss, vocab_size=vocab_size)
        for chunk in chunks:
            chunk.kd_handle = handle
        return chunks

    return hook


def handle_of(model: Module) -> KDHandle:
    """What `attach` returned for this chunk, wrapped or not.

    Raises:
        ValueError: nothing is attached, or something has since been put over its output layer.
    """
    chunk = unwrap_model(model)
    handle = getattr(chunk, "kd_handle", None)
    if handle is None:
        raise ValueError("the model has no distillation loss: register kd_pre_wrap_hook, or use distillation_recipe")
    if chunk.post_process and "forward" not in vars(chunk.output_layer):
        raise ValueError(
            f"output_layer has become a {type(chunk.output_layer).__name__} since the loss was attached: leave the "
            "output layer out of what adapters wrap"
        )
    return handle


def kd_forward_step(
    state: GlobalState, data_iterator: Iterator[Batch], model: Module, return_schedule_plan: bool = False
) -> tuple[Tensor, LossFunction]:
    """Bridge's forward step: the model's per-token loss [b, S], and the function that sums and reports it.

    Args:
        state: the run's; its data set is a `TeacherCacheConfig`.
        data_iterator: over that data set.
        model: a wrapped chunk.
        return_schedule_plan: refused.
    """
    if return_schedule_plan:
        raise ValueError("return_schedule_plan is set: this forward step runs the model, it makes no plan of doing so")
    handle = handle_of(model)
    state.cfg.dataset.start(state, handle)
    check_finite = state.cfg.rerun_state_machine.check_for_nan_in_loss
    return distillation_step(handle, data_iterator, model, check_finite=check_finite)


@dataclass(kw_only=True)
class TeacherCacheConfig(DatasetProvider):
    """A teacher's cache as a data set of Bridge's: its batches hold text and targets."""

    url: str  # the cache to train on: a path or any fsspec URL
    valid_url: str | None = None  # a cache of held-out samples to evaluate on; None: none
    loss: LossConfig = field(default_factory=LossConfig)  # how many entries are read, at which temperature
    seq_length: int  # positions of a sample
    random_seed: int = 1234  # of the order of the samples
    packed: bool = field(default_factory=platform.has_transformer_engine)  # documents as PackedSeqParams, not a mask
    dataloader_type: Literal["external"] = "external"  # batches come ready made

    def build_datasets(self, context: DatasetBuildContext) -> tuple[Any, Any, Any]:
        """Opens the caches: streams to train and to evaluate on, the latter None without `valid_url`; no test set.

        Raises:
            ValueError: a cache that does not suit the run; with both values.
        """
        tokenizer = context.tokenizer
        folder = str(tokenizer.path) if getattr(tokenizer, "library", None) == "huggingface" else None
        self._streams = tuple(
            None
            if url is None
            else CacheStream(open_cache(url, self.loss, sequence_length=self.seq_length, tokenizer=folder))
            for url in (self.url, self.valid_url)
        )
        return *self._streams, None

    def start(self, state: GlobalState, handle: KDHandle) -> None:
        """Begins reading where the run has got to. Only the first call does anything."""
        train, valid = self._streams
        if train.loader is not None:
            return
        config, done = state.cfg, state.train_state
        _refuse_unsupported(config)
        begins = ((train, self.url, config.train.micro_batch_size, done.consumed_train_samples),)
        if valid is not None:
            begins += ((valid, self.valid_url, config.validation.eval_micro_batch_size, done.consumed_valid_samples),)
        for stream, url, micro_batch, consumed in begins:
            stream.loader = open_loader(
                stream.cache,
                self.loss,
                url=url,
                head=handle.has_head,
                packed=self.packed,
                micro_batch=micro_batch,
                consumed=consumed,
                seed=self.random_seed,
            )


class CacheStream:
    """The micro-batches of a cache. Bridge builds it before it can say where the run has got to; `start` can."""

    def __init__(self, cache: TeacherCache) -> None:
        self.cache = cache
        self.loader: Iterator[Batch] | None = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self.loader is None:
            raise RuntimeError(
                "the teacher's cache is read before any step was run: give pretrain() kd_forward_step as its forward "
                "step, and skip no iteration at the very start of a run"
            )
        return next(self.loader)


def _refuse_unsupported(config: ConfigContainer) -> None:
    model, data = config.model, config.dataset
    pattern = getattr(model, "hybrid_layer_pattern", None) or ""
    refused = {
        "model.overlap_moe_expert_parallel_comm": (
            model.overlap_moe_expert_parallel_comm,
            "the forward step makes no schedule plans",
        ),
        "a CUDA graph of the full iteration": (
            is_full_iteration_cuda_graph(model),
            "it would replay the targets it was captured with",
        ),
        f"model.hybrid_layer_pattern {pattern}": (
            data.packed and not _STATE_SPACE_LAYERS.isdisjoint(pattern),
            "its state-space layers would carry one document's state into the next",
        ),
        "train.micro_batch_size > 1 in a pipeline": (
            data.packed and model.pipeline_model_parallel_size > 1 and config.train.micro_batch_size > 1,
            "samples are laid end to end, which the pipeline does not expect: give 1",
        ),
        "dist.use_decentralized_pg": (
            config.dist.use_decentralized_pg,
            "ranks find one another in Megatron-Core's own groups",
        ),
        "dist.eval_context_parallel_size": (
            config.dist.eval_context_parallel_size is not None,
            "samples are cut for the layout of training",
        ),
        f"model.seq_length {model.seq_length}": (
            model.seq_length != data.seq_length,
            f"the cache holds samples of {data.seq_length} positions",
        ),
    }
    for setting, (found, reason) in refused.items():
        if found:
            raise ValueError(f"{setting} cannot be used with distillation: {reason}")
