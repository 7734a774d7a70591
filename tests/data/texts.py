"""A small tokenizer and texts to go with it, made on the spot."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"
_WORDS = (
    "the",
    "teacher",
    "shows",
    "its",
    "student",
    "what",
    "comes",
    "next",
    "and",
    "how",
    "likely",
    "each",
    "word",
    "is",
)


def sentences(count: int) -> list[str]:
    """`count` different documents of 20 to 90 words."""
    return [
        " ".join(
            _WORDS[(7 * document + step * (document + 1)) % len(_WORDS)] for step in range(20 + 13 * document % 71)
        )
        for document in range(count)
    ]


def small_tokenizer(vocab_size: int = 300) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on `sentences`; id 0 ends a document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences(30), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def write_jsonl(path: Path, count: int) -> Path:
    """`count` documents as JSONL under the field `text`."""
    import json

    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences(count)), encoding="utf-8")
    return path
