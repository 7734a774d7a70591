"""What a document can be: text, a conversation, or token ids.

Collectives: none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Conversation = list[dict[str, Any]]  # messages: {"role": …, "content": …}
Document = str | Conversation | NDArray[np.int32]


class SourceError(ValueError):
    """The text cannot be read; the message says which file and record, what was found and what is needed."""


def document_of_record(record: Any, field: str, where: str) -> str | Conversation:
    """The document under `field` of a record.

    Args:
        record: from a line of JSON or a row of a table.
        field: `data.field`.
        where: file and record, for the message.

    Raises:
        SourceError: no such field, or neither text nor messages under it.
    """
    if not isinstance(record, dict) or field not in record:
        found = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise SourceError(f"{where}: no field {field!r}, found {found}; set data.field")
    value = record[field]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, dict) and {"role", "content"} <= set(item) for item in value):
        return value
    raise SourceError(
        f"{where}: {field!r} holds {_shortened(value)}; needed is text, or a list of messages with role and content"
    )


def is_empty(document: Document) -> bool:
    """Whether there is nothing in it: no character but white space, no message, no token."""
    return not document.strip() if isinstance(document, str) else len(document) == 0


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
