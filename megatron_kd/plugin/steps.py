"""What the adapters of Megatron-LM and Megatron-Bridge share: a cache that suits the run, its micro-batches, a step.

Both frameworks draw micro-batches from an iterator (to them, an `external` data loader) and call a forward step, which
returns the model's per-token loss [b, S] and a function of it, whose report they sum over ranks and micro-batches:

    kd loss, lm loss    KD and CE, the mean over positions weighted by the loss mask
    total loss          what is trained on: kd_weight·KD + ce_weight·CE, the mean over positions that count

Collectives: those of the batch loader (data/dataset.py) and of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.rerun_state_machine import get_rerun_state_machine
from torch import Tensor
from torch.nn import Module

from megatron_kd import platform
from megatron_kd.cache import TeacherCache
from megatron_kd.config import LossConfig
from megatron_kd.data.dataset import Batch, BatchLoader, Place
from megatron_kd.data.order import SampleOrder
from megatron_kd.plugin.attach import KDHandle
from megatron_kd.train.checks import check_entries, checked
from megatron_kd.train.step import forward_step

Summed = tuple[Tensor, Tensor, dict[str, Tensor]]  # Megatron's triple: loss sum, tokens, {name: [sum, count]}
LossFunction = Callable[[Tensor], Summed]


def open_cache(
    url: str, loss: LossConfig, *, sequence_length: int | None = None, tokenizer: str | None = None
) -> TeacherCache:
    """Opens a cache that can serve this loss.

    Args:
        url: a path or any fsspec URL.
        loss: what is to be computed from it.
        sequence_length: positions of a sample that the model takes; None: whatever the cache holds.
        tokenizer: the student's, a Hugging Face folder or name; None: it cannot be compared.

    Raises:
        ValueError: the cache does not suit the run; with both values.
        CacheError: no cache at the URL, or a damaged one.
    """
    cache = TeacherCache.open(url)
    manifest = cache.manifest
    if sequence_length not in (None, manifest.seq_length):
        raise ValueError(
            f"the model's sequence length is {sequence_length}; {url} holds samples of {manifest.seq_length} positions"
        )
    if tokenizer is not None:
        # Reading tokenizers needs transformers; caches and models do not.
        from megatron_kd.data.tokenizer import load_tokenizer, tokenizer_hash

        found = tokenizer_hash(load_tokenizer(tokenizer))
        if found != manifest.tokenizer_hash:
            raise ValueError(
                f"the tokenizer {tokenizer} has hash {found[:12]}…; {url} was made with "
                f"{manifest.tokenizer_hash[:12]}…: use the teacher's tokenizer"
            )
    check_entries(manifest, loss, url)
    return cache


def open_loader(
    cache: TeacherCache,
    loss: LossConfig,
    *,
    url: str,
    head: bool,
    packed: bool,
    micro_batch: int,
    consumed: int,
    seed: int,
    order: type[SampleOrder] = SampleOrder,
) -> Iterator[Batch]:
    """This rank's micro-batches from where the run has got to, read ahead; the first one's targets are checked.

    Args:
        cache: where samples are read; or what stands before it.
        loss: how many entries, at which temperature.
        url: the cache's, for messages.
        head: whether this rank, or this virtual stage of it, has the output layer.
        packed: documents as PackedSeqParams rather than a mask.
        micro_batch: samples in one forward of one rank.
        consumed: samples all ranks have taken so far.
        seed: of the order.
        order: which sequence of samples.
    """
    place, manifest = Place.of_this_rank(head=head), cache.manifest
    drawn = micro_batch * place.ranks  # a micro-batch of each rank: the global batch may grow during a run
    loader = BatchLoader(
        cache,
        order(manifest.samples, manifest.block, seed, drawn),
        loss,
        place,
        micro_batch=micro_batch,
        first_step=consumed // drawn,
        device=platform.device(),
        packed=packed,
    )
    return checked(loader, manifest, loss, url)


def distillation_step(
    handle: KDHandle, batches: Iterator[Batch], model: Module, *, check_finite: bool
) -> tuple[Tensor, LossFunction]:
    """The forward step: the model's per-token loss [b, S], and the function that sums and reports it.

    Args:
        handle: the plugin's.
        batches: micro-batches of `open_loader`.
        model: a wrapped chunk.
        check_finite: let Megatron's rerun machine stop the run at a loss that is not finite.
    """
    output, token_sum = forward_step(handle, batches, model)
    return output, partial(_sum_and_report, handle, token_sum, check_finite)


def _sum_and_report(
    handle: KDHandle, token_sum: Callable[[Tensor], Summed], check_finite: bool, output: Tensor
) -> Summed:
    total, tokens, logged = token_sum(output)
    if check_finite:
        get_rerun_state_machine().validate_result(
            result=total.detach(),
            rejection_func=_not_finite,
            message="the distillation loss of a micro-batch is not finite",
            tolerance=0.0,  # the forward pass is deterministic
            fatal=True,
        )
    sums = handle.pop_metrics()  # of this micro-batch alone, whose forward has just run
    means = {"kd loss": "kd", "lm loss": "ce"}
    report = {name: torch.stack([sums[key], sums["tokens"].to(sums[key].dtype)]) for name, key in means.items()}
    return total, tokens, {**report, "total loss": logged["loss"]}


def _not_finite(loss: Any) -> bool:
    return not bool(torch.isfinite(loss))
