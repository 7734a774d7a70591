"""What is compared before a step is trained: the cache with the configuration and the student, targets with labels.

A wrong cache does not crash, it ruins. So: the manifest is compared field by field, and on the first batch each label
that is among the teacher's entries must have there the very log-probability that was stored for the label itself; a
shift by one position, other text or another teacher breaks that equality almost everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_kd.cache import Manifest
from megatron_kd.config import LossConfig, RunConfig
from megatron_kd.data.dataset import Batch
from megatron_kd.data.tokenizer import load_tokenizer, tokenizer_hash
from megatron_kd.student.hf_weights import HfWeights

# Entries are rounded on the way to the cache, the label's own log-probability is not: by 1/64 at most in float16, and
# by 1 part in 128 in the coarsest preset.
_ROUNDING, _RELATIVE_ROUNDING = 1.0 / 64, 1.0 / 100


def check_cache(manifest: Manifest, config: RunConfig, weights: HfWeights, url: str) -> None:
    """Compares the cache at `url` with the configuration and the student's vocabulary.

    Raises:
        ValueError: the first disagreement, with both values.
    """
    tokenizer = tokenizer_hash(load_tokenizer(weights.folder))
    if manifest.tokenizer_hash != tokenizer:
        raise ValueError(
            f"{url} was made with tokenizer {manifest.tokenizer_hash[:12]}…, the student {weights.folder} has "
            f"{tokenizer[:12]}…: cache the teacher again with this tokenizer, or use a student that shares it"
        )
    if manifest.vocab_size > weights.config.vocab_size:
        raise ValueError(
            f"{url} holds a vocabulary of {manifest.vocab_size}, the student {weights.folder} one of "
            f"{weights.config.vocab_size}: use a student with the teacher's vocabulary"
        )
    if manifest.seq_length != config.data.sequence_length:
        raise ValueError(
            f"{url} holds samples of {manifest.seq_length} positions; data.sequence_length asks for "
            f"{config.data.sequence_length}"
        )
    check_entries(manifest, config.loss, url)


def check_entries(manifest: Manifest, loss: LossConfig, url: str) -> None:
    """Compares the entries of the cache at `url` with what the loss wants of them.

    Raises:
        ValueError: the first disagreement, with both values.
    """
    if loss.k is not None and not 1 <= loss.k <= manifest.k:
        raise ValueError(f"loss.k = {loss.k}; {url} holds {manifest.k} entries a position")
    if loss.temperature not in manifest.temperatures:
        served = ", ".join(f"{temperature:g}" for temperature in manifest.temperatures)
        raise ValueError(
            f"loss.temperature = {loss.temperature:g}; {url} serves {served}: "
            "cache the teacher again with cache.temperatures"
        )
    if manifest.entries == "sampled" and loss.kind != "renormalized":
        raise ValueError(f"loss.kind = {loss.kind!r}; {url} holds sampled entries, which need 'renormalized'")


def checked(batches: Iterator[Batch], manifest: Manifest, loss: LossConfig, url: str) -> Iterator[Batch]:
    """The batches; the first one is looked at before anything is trained on it."""
    first = next(batches)
    check_first_batch(first, manifest, loss, url)
    yield first
    yield from batches


def check_first_batch(batch: Batch, manifest: Manifest, loss: LossConfig, url: str) -> None:
    """Looks at the values of the first micro-batch, which costs a device synchronisation and is done once.

    A label among the entries must have the log-probability stored for it; one that is not can be no more probable
    than the least of them. Sampled entries carry frequencies, of which neither can be said.

    Raises:
        ValueError: targets that do not belong to the labels, with the numbers.
    """
    if batch.teacher is None or batch.label_logprob is None:  # another pipeline stage has the targets
        return
    if loss.temperature != 1.0 or manifest.entries == "sampled":  # the label's is stored at temperature 1 only
        return
    ids, logprobs, _ = batch.teacher
    is_label = ids == batch.labels[..., None]
    least = logprobs.masked_fill(ids < 0, torch.inf).amin(-1)
    entry = torch.where(is_label, logprobs, -torch.inf).amax(-1)
    slack = _ROUNDING + _RELATIVE_ROUNDING * batch.label_logprob.abs()
    differs = torch.where(
        is_label.any(-1),
        (entry - batch.label_logprob).abs() > slack,
        batch.label_logprob > least + slack,
    )
    counted = batch.loss_mask != 0
    wrong, checked = int((differs & counted).sum()), int(counted.sum())
    if wrong:
        raise ValueError(
            f"{wrong} of {checked} labels of samples {batch.samples} do not have the log-probability that was stored "
            f"for them among the teacher's entries: the targets in {url} are shifted, or belong to other "
            "text or another teacher"
        )
