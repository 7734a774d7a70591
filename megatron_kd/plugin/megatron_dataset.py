"""Megatron-LM's data sets, and caches made from them.

Collectives: those of Megatron's data set builder, whose first rank makes an index that the others load.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, get_train_valid_test_num_samples
from megatron.training.utils import get_blend_and_blend_per_split
from torch import Tensor

from megatron_kd.cache import CacheBatch, Manifest, TeacherCache, TokenBatch
from megatron_kd.config import DataConfig
from megatron_kd.data.packing import PackedSamples
from megatron_kd.data.samples import GIVEN, Split, sample_parameters, write_samples
from megatron_kd.data.tokenizer import load_tokenizer

_Text = TypeVar("_Text", TokenBatch, CacheBatch)


def gpt_datasets(sizes: Sequence[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """The stock data sets of `--data-path` and its kin, on every rank: Megatron-LM's `pretrain_gpt.py` has its own.

    Args:
        sizes: samples for training, validation and test.
        vp_stage: of no consequence; Megatron-LM passes it under interleaving.
    """
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=False,  # the cache says which positions attend to which
        inter_document_masking=args.dataloader_inter_document_masking,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()


def write_gpt_samples(folder: Path) -> None:
    """Writes the stock data sets' samples, in their order, for a teacher to cache with `data.source: samples-dir`.

    Validation samples become the split `held_out`. Documents are kept apart where `--reset-attention-mask` or
    `--dataloader-inter-document-masking` say so; otherwise a sample is one document, to teacher and student.

    Raises:
        ValueError: a tokenizer other than a Hugging Face folder's, by which the teacher's is recognised.
    """
    args = get_args()
    if args.tokenizer_type != "HuggingFaceTokenizer":
        raise ValueError(f"--tokenizer-type is {args.tokenizer_type}; the teacher's is needed: HuggingFaceTokenizer")
    tokenizer = load_tokenizer(args.tokenizer_model)
    data = DataConfig(source=GIVEN, sequence_length=args.seq_length)
    parameters = {
        **sample_parameters(data, tokenizer),
        "source": " ".join(args.data_path or args.train_data_path or ()),
        "packing": f"megatron-gpt seed={args.seed}",
        "held_out": args.split,
    }
    ends_document = tokenizer.eos_token_id if args.reset_attention_mask else None
    sizes = get_train_valid_test_num_samples()
    train, valid, _ = gpt_datasets(sizes)
    splits: dict[Split, tuple[int, Iterator[PackedSamples]]] = {
        "train": (sizes[0], _packed(train, sizes[0], ends_document)),
        "held_out": (sizes[1], _packed(valid, sizes[1], ends_document)),
    }
    write_samples(folder, splits, parameters)


def _packed(dataset: Any, count: int, ends_document: int | None) -> Iterator[PackedSamples]:
    """The first samples of a GPTDataset, each as arrays of one row."""
    place = np.arange(dataset.config.sequence_length)
    for number in range(count):
        item = dataset[number]
        tokens = _tokens(item)
        if "cu_seqlens" in item:
            segment = np.searchsorted(item["cu_seqlens"][1:].numpy(), place, "right")
        elif ends_document is not None:
            segment = np.append(0, np.cumsum(tokens[:-2] == ends_document))
        else:
            segment = np.zeros_like(place)
        rows = (tokens.astype(np.int32), segment.astype(np.int32), item["loss_mask"].numpy().astype(np.uint8))
        yield PackedSamples(*(row[None] for row in rows))


class ComparedCache:
    """A cache beside the Megatron data set it was made from, whose samples are compared as they are read."""

    def __init__(self, cache: TeacherCache, dataset: Any, url: str) -> None:
        """Args: dataset: gives tokens, labels and loss_mask [S] by number; None on ranks where it is not built."""
        self._cache, self._dataset, self._url = cache, dataset, url

    @property
    def manifest(self) -> Manifest:
        """The cache's."""
        return self._cache.manifest

    def read(self, samples: np.ndarray, k: int | None = None, temperature: float = 1.0) -> CacheBatch:
        """As `TeacherCache.read`. Raises `ValueError` where a sample is not the data set's."""
        return self._compared(samples, self._cache.read(samples, k=k, temperature=temperature))

    def read_tokens(self, samples: np.ndarray) -> TokenBatch:
        """As `TeacherCache.read_tokens`. Raises `ValueError` where a sample is not the data set's."""
        return self._compared(samples, self._cache.read_tokens(samples))

    def _compared(self, samples: np.ndarray, text: _Text) -> _Text:
        for row, sample in enumerate(samples if self._dataset is not None else ()):
            item = self._dataset[int(sample)]
            stock = {
                "tokens": _tokens(item),
                "loss mask": item["loss_mask"].numpy(),
            }
            for (name, mine), theirs in zip(stock.items(), (text.tokens[row], text.loss_mask[row])):
                found, wanted = _hash(mine), _hash(theirs)
                if found != wanted:
                    raise ValueError(
                        f"sample {sample}: its {name} hash to {found} in the data set, to {wanted} in {self._url}: "
                        "the cache was made from other data, or from the same with another --seed, --split or number "
                        "of training samples"
                    )
        return text


def _tokens(item: dict[str, Tensor]) -> np.ndarray:
    """[S + 1]: the inputs, and the last position's label."""
    return np.append(item["tokens"].numpy(), item["labels"][-1].item())


def _hash(values: np.ndarray) -> str:
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(values, dtype="<i4").data)
