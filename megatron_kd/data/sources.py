"""Documents: the texts a run distils on, in an order that never changes.

    source                      documents
    python-docs                 one a topic of Python's own language reference, by topic name
    FILE.txt (any other text)   one
    FILE.jsonl                  one a line: the string under `field`
    FOLDER                      those of every file below it, by relative path

Nothing is held in memory but the document being read. A source also has a fingerprint, the hash of the bytes it
reads, so that a corpus that changed under a cache is noticed.

Collectives: none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import xxhash

PYTHON_DOCS = "python-docs"

_CHUNK_BYTES = 1 << 24


class SourceError(ValueError):
    """The text cannot be read; the message says which file and line, what was found and what is needed."""


def iterate_documents(source: str, field: str = "text") -> Iterator[str]:
    """The documents of `source`, in order; empty ones are skipped.

    Args:
        source: `data.source` of the configuration.
        field: the key that holds the text, where a document is a record.

    Raises:
        SourceError: nothing there, a line that is not JSON, a record without the field.
    """
    if source == PYTHON_DOCS:
        documents = _python_docs()
    else:
        files = _files(Path(source))
        documents = (document for file in files for document in _READERS.get(file.suffix, _read_text)(file, field))
    return (document for document in documents if document.strip())


def source_hash(source: str) -> str:
    """A hash of the very bytes `iterate_documents` reads, and of their order (xxh3-128, hexadecimal)."""
    digest = xxhash.xxh3_128()
    if source == PYTHON_DOCS:
        for document in _python_docs():
            digest.update(document.encode())
        return digest.hexdigest()
    for file in _files(Path(source)):
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def _python_docs() -> Iterator[str]:
    from pydoc_data.topics import topics

    return (topics[name] for name in sorted(topics))


def _files(path: Path) -> list[Path]:
    """The file itself, or every file below a folder by relative path; names that begin with a dot are left out."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise SourceError(f"data.source {path}: no such file or folder; give a text file, a folder of them, a .jsonl")
    found = [file for file in path.rglob("*") if file.is_file() and not _hidden(file.relative_to(path))]
    if not found:
        raise SourceError(f"data.source {path}: the folder holds no file")
    return sorted(found, key=lambda file: file.relative_to(path).parts)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _read_text(file: Path, field: str) -> Iterator[str]:
    try:
        yield file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(f"{file}: not UTF-8 text (byte {error.start}); convert it or take it out") from None


def _read_jsonl(file: Path, field: str) -> Iterator[str]:
    with file.open("rb") as lines:  # bytes: a line is what ends in a newline, whatever separators its strings hold
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise SourceError(f"{file}, line {number}: not JSON: {error}") from None
            if not isinstance(record, dict) or not isinstance(record.get(field), str):
                found = sorted(record) if isinstance(record, dict) else type(record).__name__
                raise SourceError(f"{file}, line {number}: no text under {field!r}, found {found}; set data.field")
            yield record[field]


_READERS = {".jsonl": _read_jsonl, ".ndjson": _read_jsonl}
