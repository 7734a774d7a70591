"""Conversations: rendered by the template, and learnt where the assistant speaks."""

import json

import numpy as np
import pytest

from megatron_kd.data.chat import encode_conversation
from megatron_kd.data.document import SourceError
from megatron_kd.data.encoding import encode
from megatron_kd.data.packing import pack
from megatron_kd.data.sources import iterate_documents
from tests.data.texts import sentences, small_tokenizer

PLAIN = (
    "{% for message in messages %}<{{ message['role'] }}>\n{{ message['content'] }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}<{{ message['role'] }}>\n{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|endoftext|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|endoftext|>{% endif %}\n{% endfor %}"
)
# Some templates drop the reasoning of all turns but the last.
FORGETFUL = PLAIN.replace("{{ message['content'] }}", "{{ message['content'] if loop.last else '…' }}")
CONVERSATION = [
    {"role": "user", "content": "what comes next"},
    {"role": "assistant", "content": "the student"},
    {"role": "user", "content": "and how likely"},
    {"role": "assistant", "content": "each word is likely"},
]


def tokenizer_with(template):
    tokenizer = small_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["spans", "generation-marks"])
def test_only_the_assistants_words_are_learnt(template):
    tokenizer = tokenizer_with(template)
    ids, learnt = encode_conversation(CONVERSATION, tokenizer)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    assert tokenizer.decode(ids[learnt != 0]) == "the student<|endoftext|>each word is likely<|endoftext|>"


def test_a_packed_conversation_learns_from_its_prompt(tmp_path):
    """The last token of the prompt predicts the answer's first: the mask is the label's, one position earlier."""
    tokenizer = tokenizer_with(PLAIN)
    stream = encode([CONVERSATION, sentences(1)[0]], tokenizer, tmp_path)
    ids, learnt = encode_conversation(CONVERSATION, tokenizer)
    assert len(stream.starts) == 2
    assert stream.tokens[: len(ids)].tolist() == ids.tolist()  # the template closes it, nothing is added
    packed = pack(stream, len(ids), 0, 1, 0)
    assert packed.loss_mask[0, :-1].tolist() == learnt[1:].tolist()
    assert packed.loss_mask[0, -1] == 0


def test_conversations_come_from_records(tmp_path):
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"messages": CONVERSATION}) + "\n" + json.dumps({"messages": []}) + "\n")
    assert list(iterate_documents(str(file), "messages")) == [CONVERSATION]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        (FORGETFUL, "turn 2 of the conversation 'what comes next' differently"),
        ("{{ raise_exception('roles must alternate') }}", "fails on the conversation .*roles must alternate"),
    ],
    ids=["none", "forgetful", "failing"],
)
def test_templates_that_cannot_serve_are_refused(template, message):
    with pytest.raises(SourceError, match=message):
        encode_conversation(CONVERSATION, tokenizer_with(template))


def test_token_ids_are_taken_as_they_are(tmp_path):
    tokenizer = small_tokenizer()
    documents = [np.asarray([5, 6, 0], np.int32), np.asarray([7, 8], np.int32)]
    stream = encode(documents, tokenizer, tmp_path)
    assert stream.tokens.tolist() == [5, 6, 0, 7, 8, 0]
    assert stream.starts.tolist() == [0, 3]
    assert stream.learnt.all()
    with pytest.raises(SourceError, match="from 5 to 300 but the teacher's vocabulary has 300"):
        encode([np.asarray([5, 300], np.int32)], tokenizer, tmp_path)
