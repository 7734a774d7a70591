"""Files of text or of records → documents.

A reader takes a file and the name of the field, and yields the file's documents. Collectives: none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_kd.data.document import Document, SourceError, document_of_record


def read_text(file: Path, field: str) -> Iterator[Document]:
    """The whole file as one document; there is no field."""
    try:
        yield file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(f"{file}: not UTF-8 text (byte {error.start}); convert it or take it out") from None


def read_jsonl(file: Path, field: str) -> Iterator[Document]:
    """One document a line; empty lines are skipped."""
    with file.open("rb") as lines:  # bytes: a line is what ends in a newline, whatever separators its strings hold
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            try:
                record = json.loads(line)
            except ValueError as error:
                raise SourceError(f"{where}: not JSON: {error}") from None
            yield document_of_record(record, field, where)


def read_parquet(file: Path, field: str) -> Iterator[Document]:
    """One document a row."""
    arrow = _pyarrow(file)
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(file)
        columns = [field] if field in table.schema_arrow.names else []
        yield from _rows(table.iter_batches(columns=columns or None), file, field)
    except arrow.ArrowException as error:
        raise SourceError(f"{file}: not a Parquet file: {error}") from error


def read_arrow(file: Path, field: str) -> Iterator[Document]:
    """One document a row of an Arrow stream, as Hugging Face's datasets stores them."""
    arrow = _pyarrow(file)
    try:
        with arrow.memory_map(str(file)) as stream:
            yield from _rows(arrow.ipc.open_stream(stream), file, field)
    except arrow.ArrowException as error:
        raise SourceError(f"{file}: not an Arrow stream: {error}") from error


def _rows(batches: Any, file: Path, field: str) -> Iterator[Document]:
    number = 0
    for batch in batches:
        names = batch.schema.names
        if field not in names:
            raise SourceError(f"{file}: no field {field!r}, found {sorted(names)}; set data.field")
        for value in batch.column(field):
            number += 1
            yield document_of_record({field: value.as_py()}, field, f"{file}, row {number}")


def _pyarrow(file: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError:
        raise SourceError(f"{file}: reading it needs pyarrow, which is not installed; `pip install pyarrow`") from None
    return pyarrow
