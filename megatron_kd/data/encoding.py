"""Documents → token ids, laid end to end in files, so that a corpus larger than memory is no matter.

    text            tokenised alone, without the tokenizer's own begin or end markers, closed by the
                    end-of-document token; all of it is learnt
    a conversation  through the chat template, which closes it itself; the assistant's words are learnt
    token ids       as they are, closed by the end-of-document token unless they end with it; all of them are learnt

Collectives: none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from megatron_kd.data.chat import encode_conversation
from megatron_kd.data.document import Document, SourceError
from megatron_kd.data.packing import TokenStream
from megatron_kd.data.tokenizer import vocabulary_size

_BATCH_CHARACTERS = 1 << 20  # the tokenizer works on a batch in parallel; a batch is all that is in memory

Encoded = tuple[NDArray[np.int32], NDArray[np.uint8]]  # ids, and 1 where a token is learnt


def encode(
    documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase, folder: Path, multiple: int = 1
) -> TokenStream:
    """Encodes the documents into files under `folder`, and maps them.

    Args:
        documents: what to encode.
        tokenizer: turns text into ids.
        folder: for the files.
        multiple: each document is filled up to a multiple of so many tokens, with end-of-document tokens that are not
            learnt.

    Returns:
        The stream; it is empty when there is no document.

    Raises:
        SourceError: a conversation the chat template cannot render, token ids beyond the vocabulary.
    """
    starts, position = [], 0
    files = folder / "stream.int32", folder / "learnt.uint8"
    with files[0].open("wb") as tokens_output, files[1].open("wb") as learnt_output:
        for ids, learnt in _encoded(documents, tokenizer):
            filling = np.full(-len(ids) % multiple, tokenizer.eos_token_id, np.int32)
            ids, learnt = np.append(ids, filling), np.append(learnt, np.zeros(len(filling), np.uint8))
            starts.append(position)
            position += len(ids)
            tokens_output.write(ids.tobytes())
            learnt_output.write(learnt.tobytes())
    if not position:
        return TokenStream(np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.uint8))
    tokens = np.memmap(files[0], dtype=np.int32, mode="r")
    return TokenStream(tokens, np.asarray(starts, np.int64), np.memmap(files[1], dtype=np.uint8, mode="r"))


def _encoded(documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase) -> Iterator[Encoded]:
    end, size = tokenizer.eos_token_id, vocabulary_size(tokenizer)
    for kind, group in groupby(documents, key=type):
        if kind is str:
            for batch in _batches(group):
                encoded = tokenizer(batch, add_special_tokens=False, return_attention_mask=False, verbose=False)
                for ids in encoded["input_ids"]:
                    yield _all_learnt(np.asarray([*ids, end], np.int32))
        elif kind is list:
            for conversation in group:
                yield encode_conversation(conversation, tokenizer)
        else:
            for ids in group:
                if ids.min() < 0 or ids.max() >= size:
                    raise SourceError(
                        f"data.source holds token ids from {ids.min()} to {ids.max()} but the teacher's vocabulary has "
                        f"{size}; they were made with another tokenizer"
                    )
                yield _all_learnt(ids if ids[-1] == end else np.append(ids, np.int32(end)))


def _all_learnt(ids: NDArray[np.int32]) -> Encoded:
    return ids, np.ones(len(ids), np.uint8)


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
