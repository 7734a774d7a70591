"""The teacher's tokenizer: loading, the hash that identifies it, the true size of its vocabulary.

Teacher, cache and student are compared by this hash: two folders with the same vocabulary, merges, normalisation and
special tokens hash alike, whatever wrote them.

Collectives: none.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder.

    Raises:
        ValueError: the folder holds none, or one without an end-of-document token.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}: no tokenizer that transformers can load: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{folder}: the tokenizer names no eos_token; documents end with it: set it in the folder")
    return tokenizer


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 over the canonical JSON of what turns text into ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        model: dict[str, Any] = json.loads(backend.to_str())
        for state in ("truncation", "padding"):  # settings of the last call, not of the tokenizer
            model.pop(state, None)
    else:
        model = {"class": type(tokenizer).__name__, "vocab": tokenizer.get_vocab()}
    identity = {"model": model, "end_of_document": tokenizer.eos_token_id}
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the highest id: embedding rows beyond it are padding and take no part in the softmax."""
    return max(tokenizer.get_vocab().values()) + 1
