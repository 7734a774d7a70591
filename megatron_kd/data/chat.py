"""Conversations → token ids through the tokenizer's chat template, with the assistant's words marked.

Only what the assistant would generate is learnt: for each of its turns the rendered text from the end of the
generation prompt to the end of the turn, its end-of-turn marker included, the white space after it not.

Templates that mark the assistant's words themselves ({% generation %}) are asked; for others each turn's span is the
difference of two renderings, so a template must extend its rendering turn by turn.

Collectives: none.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from megatron_kd.data.document import Conversation, SourceError

_LEARNT_ROLE = "assistant"


def encode_conversation(
    conversation: Conversation, tokenizer: PreTrainedTokenizerBase
) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """Ids of the rendered conversation, and 1 where a token is the assistant's.

    Raises:
        SourceError: no chat template, or one that cannot render this conversation or tell its turns apart.
    """
    if tokenizer.chat_template is None:
        raise SourceError("the data are conversations, but the teacher's tokenizer has no chat template; give it one")
    try:
        if "{% generation" in tokenizer.chat_template or "{%- generation" in tokenizer.chat_template:
            encoded = tokenizer.apply_chat_template(conversation, return_dict=True, return_assistant_tokens_mask=True)
            return np.asarray(encoded["input_ids"], np.int32), np.asarray(encoded["assistant_masks"], np.uint8)
        text, spans = _rendered(conversation, tokenizer)
    except SourceError:
        raise
    except Exception as error:  # a template is a program of its own
        raise SourceError(
            f"the chat template fails on the conversation {_first_words(conversation)}: {error}"
        ) from error
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    begins = np.asarray([begin for begin, _ in encoded["offset_mapping"]])
    learnt = np.zeros(len(begins), np.uint8)
    for begin, end in spans:
        learnt[(begins >= begin) & (begins < end)] = 1
    return np.asarray(encoded["input_ids"], np.int32), learnt


def _rendered(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[tuple[int, int]]]:
    """The whole text, and the assistant's spans in it."""

    def render(turns: int, prompt: bool) -> str:
        return tokenizer.apply_chat_template(conversation[:turns], tokenize=False, add_generation_prompt=prompt)

    text = render(len(conversation), prompt=False)
    spans = []
    for number, message in enumerate(conversation):
        if message["role"] != _LEARNT_ROLE:
            continue
        before, until = render(number, prompt=True), render(number + 1, prompt=False)
        if not (text.startswith(until) and until.startswith(before)):
            raise SourceError(
                f"the chat template renders turn {number + 1} of the conversation {_first_words(conversation)} "
                "differently when it is not the last; mark the assistant's words with {% generation %} in it"
            )
        spans.append((len(before), len(until.rstrip())))
    return text, spans


def _first_words(conversation: Conversation) -> str:
    return repr(str(conversation[0]["content"])[:40])
