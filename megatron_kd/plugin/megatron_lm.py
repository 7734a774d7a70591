"""Distillation in a Megatron-LM run: its own arguments and `pretrain()`, the targets from a teacher's cache.

    args = parse_and_validate_args(extra_args_provider=add_kd_arguments)
    kd = Distillation(args)
    model_config.pre_wrap_hooks.append(kd.pre_wrap_hook)
    pretrain(config, kd.datasets(stock_provider), ModelType.encoder_or_decoder, kd.forward_step)

are the lines that `pretrain_gpt` below adds to Megatron-LM's script of that name. The text of every micro-batch is the
cache's own, with documents kept apart as the teacher saw them; `--kd-data` chooses the order of the samples:

    cache       that of data/order.py, a function of --seed alone; no other data set is needed
    megatron    that of the stock data set the cache was made from: its n-th sample is the cache's sample n, and hashes
                of the tokens and of the loss mask are compared for each

Batches come from data/dataset.py and reach Megatron as an `external` data loader. Of the ranks that share samples one
reads the targets; stages, and virtual stages, without the output layer do without. The order is addressed by the number
of consumed samples, so it is the same under any layout and after any restart.

For megatron-core 0.19, whose wheel holds `megatron.training`. Collectives: those of the batch loader and the loss.
"""

from __future__ import annotations

from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, Literal, get_args, get_origin, get_type_hints

from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from torch import Tensor
from torch.nn import Module

from megatron_kd.cache import TeacherCache
from megatron_kd.config import LossConfig, ParallelConfig
from megatron_kd.config_io import field_comments
from megatron_kd.data.order import AscendingOrder, SampleOrder
from megatron_kd.plugin.attach import KDHandle, attach
from megatron_kd.plugin.megatron_dataset import ComparedCache, gpt_datasets
from megatron_kd.plugin.steps import LossFunction, distillation_step, open_cache, open_loader

Provider = Callable[..., tuple[Any, Any, Any]]  # Megatron-LM's train_valid_test_datasets_provider

# Arguments of Megatron-LM that bring a loss of their own, or under which targets and text would part.
_REFUSED = {
    "logits_load_dir": "that is another teacher's cache, with another loss",
    "overlap_moe_expert_parallel_comm": "its schedules build a plan where a forward step is needed",
    "hybrid_context_parallel": "samples would be cut and joined on the way",
    "reset_position_ids": "positions count from the beginning of a sample",
    "full_validation": "the validation cache is read without an end: give --eval-iters",
}


def add_kd_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Adds the group `--kd-*`, every field of `LossConfig` among it: an `extra_args_provider` of Megatron-LM."""
    group = parser.add_argument_group("knowledge distillation")
    group.add_argument("--kd-cache", required=True, metavar="URL", help="the teacher's cache: a path or any fsspec URL")
    group.add_argument(
        "--kd-valid-cache", metavar="URL", help="the teacher's cache of held-out samples, to evaluate on"
    )
    group.add_argument(
        "--kd-data",
        choices=("cache", "megatron"),
        default="cache",
        help="order of the samples: the cache's own, or that of the data set from which the cache was made",
    )
    group.add_argument(
        "--kd-student-init",
        metavar="FOLDER",
        help="start from the weights of this Hugging Face folder of the same model",
    )
    comments = field_comments(LossConfig)
    for field in fields(LossConfig):
        group.add_argument(
            f"--{_argument(field.name).replace('_', '-')}",
            default=field.default,
            help=comments[field.name],
            **_parsed_as(get_type_hints(LossConfig)[field.name]),
        )
    return parser


def pretrain_gpt() -> None:
    """Megatron-LM's `pretrain_gpt.py` with distillation: reads the command line, trains, saves.

    Raises:
        ValueError, CacheError: as `Distillation`.
    """
    args = parse_and_validate_args(extra_args_provider=add_kd_arguments)
    kd = Distillation(args)
    model = gpt_config_from_args(args)
    model.pre_wrap_hooks.append(kd.pre_wrap_hook)
    config = pretrain_cfg_container_from_args(args, model)
    pretrain(config, kd.datasets(gpt_datasets), ModelType.encoder_or_decoder, kd.forward_step)


class Distillation:
    """What a run of Megatron-LM needs in order to distil: a hook, a data provider, a forward step."""

    def __init__(self, args: Namespace) -> None:
        """Opens the caches and compares them with the arguments; makes the data loader `external`, which is this one.

        Args:
            args: Megatron-LM's, parsed and validated.

        Raises:
            ValueError: an argument, or a cache, that cannot be used, with both values.
            CacheError: no cache at the URL, or a damaged one.
        """
        _refuse_unsupported(args)
        self._args = args
        self.loss = LossConfig(**{field.name: getattr(args, _argument(field.name)) for field in fields(LossConfig)})
        self._cache = self._open(args.kd_cache)
        self._valid = self._open(args.kd_valid_cache) if args.kd_valid_cache else None
        self._handle = KDHandle([])
        args.dataloader_type = "external"

    def pre_wrap_hook(self, chunks: list[Module]) -> list[Module]:
        """Makes the loss the output layer of this rank's model, which DDP has yet to wrap; returns the list."""
        if self._args.kd_student_init:
            self._load_student(chunks)
        self._handle = attach(chunks, self.loss, vocab_size=self._cache.manifest.vocab_size)
        return chunks

    def datasets(self, stock: Provider | None = None) -> Provider:
        """A provider of data sets for `pretrain()`.

        Args:
            stock: the run's own provider; called, and its training set compared, where `--kd-data` is `megatron`.
        """

        def provider(sizes: Sequence[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
            args = self._args
            cache: TeacherCache | ComparedCache = self._cache
            order: type[SampleOrder] = SampleOrder
            if args.kd_data == "megatron":
                if stock is None:
                    raise ValueError("--kd-data is megatron, which needs the stock data set; datasets() was given none")
                cache, order = ComparedCache(cache, stock(sizes, vp_stage=vp_stage)[0], args.kd_cache), AscendingOrder
            loader = partial(
                open_loader,
                loss=self.loss,
                head=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
                packed=_takes_packed(args),
                seed=args.seed,
            )
            micro_batch, consumed = args.micro_batch_size, args.consumed_train_samples
            train = loader(cache, url=args.kd_cache, order=order, micro_batch=micro_batch, consumed=consumed)
            valid = None
            if self._valid is not None:
                micro_batch, consumed = args.eval_micro_batch_size, args.consumed_valid_samples
                valid = loader(self._valid, url=args.kd_valid_cache, micro_batch=micro_batch, consumed=consumed)
            return train, valid, None

        provider.is_distributed = True  # type: ignore[attr-defined]  # it is to be called on every rank
        return provider

    def forward_step(self, batches: Iterator[Any], model: Module) -> tuple[Tensor, LossFunction]:
        """Megatron's forward step: the model's per-token loss [b, S], and the function that sums and reports it."""
        return distillation_step(self._handle, batches, model, check_finite=self._args.check_for_nan_in_loss_and_grad)

    def _open(self, url: str) -> TeacherCache:
        args = self._args
        # Tokenizers of other types cannot be told by the hash of the cache.
        tokenizer = args.tokenizer_model if args.tokenizer_type == "HuggingFaceTokenizer" else None
        cache = open_cache(url, self.loss, sequence_length=args.seq_length, tokenizer=tokenizer)
        if cache.manifest.vocab_size > args.padded_vocab_size:
            raise ValueError(
                f"the model has {args.padded_vocab_size} vocabulary rows, padding included; {url} was made for "
                f"{cache.manifest.vocab_size}: use the teacher's tokenizer"
            )
        return cache

    def _load_student(self, chunks: list[Module]) -> None:
        # The one part that needs transformers.
        from megatron_kd.student.architecture import architecture
        from megatron_kd.student.convert import load_from_hf
        from megatron_kd.student.hf_weights import HfWeights

        weights = HfWeights(self._args.kd_student_init)
        arch = architecture(weights.config, ParallelConfig(tensor=self._args.tensor_model_parallel_size))
        # Megatron-LM has its own rule for the number of padded rows.
        arch = replace(arch, padded_vocab_size=self._args.padded_vocab_size)
        load_from_hf(chunks, weights, weights.config, arch)


def _argument(field: str) -> str:
    """`kd_weight` → `kd_weight`, `k` → `kd_k`."""
    return f"kd_{field.removeprefix('kd_')}"


def _parsed_as(kind: Any) -> dict[str, Any]:
    """How argparse reads a field of this type."""
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if kind is bool:
        return {"action": BooleanOptionalAction}
    return {"type": float if kind is float else int}


def _refuse_unsupported(args: Namespace) -> None:
    for name, reason in _REFUSED.items():
        if getattr(args, name, None):
            raise ValueError(f"--{name.replace('_', '-')} cannot be used with distillation: {reason}")
    if args.eval_iters and not args.kd_valid_cache:
        raise ValueError(
            f"--eval-iters is {args.eval_iters}; evaluation needs --kd-valid-cache, a cache of held-out samples: give "
            "one, or --eval-iters 0"
        )
    if args.kd_student_init and args.init_model_with_meta_device:
        raise ValueError(
            "--kd-student-init fills the model's weights; --init-model-with-meta-device leaves none to fill"
        )
    if _takes_packed(args) and args.pipeline_model_parallel_size > 1 and args.micro_batch_size > 1:
        raise ValueError(
            f"--micro-batch-size is {args.micro_batch_size} in {args.pipeline_model_parallel_size} pipeline stages: "
            "samples are laid end to end, which Megatron-LM's pipeline does not expect; give --micro-batch-size 1"
        )


def _takes_packed(args: Namespace) -> bool:
    """Whether the model's attention takes packed sequences rather than a mask."""
    return args.transformer_impl == "transformer_engine"
