"""Documents → token ids, laid end to end in a file, so that a corpus larger than memory is no matter.

Every document is tokenised alone, without the tokenizer's own begin or end markers, and closed by one
end-of-document token.

Collectives: none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from megatron_kd.data.packing import TokenStream

_BATCH_CHARACTERS = 1 << 20  # the tokenizer works on a batch in parallel; a batch is all that is in memory


def encode(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, folder: Path) -> TokenStream:
    """Tokenises the documents into files under `folder`, and maps them.

    Returns:
        The stream; it is empty when there is no document.
    """
    starts, position = [], 0
    file = folder / "stream.int32"
    with file.open("wb") as output:
        for ids in _token_ids(documents, tokenizer):
            starts.append(position)
            position += len(ids)
            output.write(ids.tobytes())
    tokens = np.memmap(file, dtype=np.int32, mode="r") if position else np.empty(0, np.int32)
    return TokenStream(tokens, np.asarray(starts, dtype=np.int64))


def _token_ids(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[NDArray[np.int32]]:
    for batch in _batches(documents):
        encoded = tokenizer(batch, add_special_tokens=False, return_attention_mask=False, verbose=False)
        for ids in encoded["input_ids"]:
            yield np.asarray([*ids, tokenizer.eos_token_id], dtype=np.int32)


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
