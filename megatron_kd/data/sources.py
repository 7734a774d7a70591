"""Documents: what a run distils on, in an order that never changes.

    data.source                        documents
    python-docs                        one a topic of Python's own language reference, by topic name
    FILE.jsonl, FILE.parquet           one a record: its `data.field`
    FOLDER of `Dataset.save_to_disk`   one a record: its `data.field`
    PREFIX of .bin and .idx            one a document of a Megatron data set, which holds token ids already
    any other FILE                     one: its text
    any other FOLDER                   those of every file below it, by relative path

A field holds text, or a conversation: a list of {"role", "content"} messages, of which the assistant's are learnt.

Nothing is held in memory but what is being read. A source also has a fingerprint, the hash of the bytes it reads, so
that a corpus that changed under a cache is noticed. Collectives: none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash

from megatron_kd.data.document import Document, SourceError, is_empty
from megatron_kd.data.megatron_indexed import read_ids_file, read_indexed
from megatron_kd.data.readers import read_arrow, read_jsonl, read_parquet, read_text

PYTHON_DOCS = "python-docs"

_READERS: dict[str, Callable[[Path, str], Iterator[Document]]] = {
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".idx": read_indexed,
    ".bin": read_ids_file,
}
_CHUNK_BYTES = 1 << 24


def iterate_documents(source: str, field: str = "text") -> Iterator[Document]:
    """The documents of `source`, in order; empty ones are skipped.

    Args:
        source: `data.source` of the configuration.
        field: the key of the text or the conversation, where a document is a record.

    Raises:
        SourceError: nothing there, a line that is not JSON, a record without the field.
    """
    if source == PYTHON_DOCS:
        documents = _python_docs()
    else:
        files = source_files(source)
        documents = (document for file in files for document in _READERS.get(file.suffix, read_text)(file, field))
    return (document for document in documents if not is_empty(document))


def source_hash(source: str) -> str:
    """A hash of the very bytes `iterate_documents` reads, and of their order (xxh3-128, hexadecimal)."""
    digest = xxhash.xxh3_128()
    if source == PYTHON_DOCS:
        for document in _python_docs():
            digest.update(document.encode())
        return digest.hexdigest()
    for file in source_files(source):
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def source_files(source: str) -> list[Path]:
    """The files of a source, in the order they are read. Names that begin with a dot are left out of folders."""
    path = Path(source)
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    pair = [file for file in (Path(f"{prefix}.bin"), Path(f"{prefix}.idx")) if file.is_file()]
    if pair and not path.is_dir():
        return pair
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise SourceError(
            f"data.source {source}: no such file or folder; needed are a text, .jsonl or .parquet file, a folder of "
            "them, a data set saved by Hugging Face's datasets, or the prefix of Megatron's .bin and .idx"
        )
    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        raise SourceError(f"data.source {source}: a data set of splits {splits}; give one of them: {path / splits[0]}")
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        return [path / file["filename"] for file in state["_data_files"]]
    found = [file for file in path.rglob("*") if file.is_file() and not _hidden(file.relative_to(path))]
    if not found:
        raise SourceError(f"data.source {source}: the folder holds no file")
    return sorted(found, key=lambda file: file.relative_to(path).parts)


def _python_docs() -> Iterator[str]:
    from pydoc_data.topics import topics

    return (topics[name] for name in sorted(topics))


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
