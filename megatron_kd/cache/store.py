"""Where the objects of a cache live: a folder, or any fsspec URL.

An object is a few bytes under a key such as `tokens/c.3.0` (block 3 of the tokens). It is written whole and atomically:
local files under a partial name that is then renamed, remote ones by the object store itself. So an object is the old
one, the new one or absent, never a mixture. No file stays open between calls.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import fsspec

Url = str | os.PathLike[str]
PARTIAL = ".partial"  # suffix of a file that is not complete; a killed writer may leave one


class ObjectStore(Protocol):
    """What a cache needs of a place. Absent objects read as None; a range past the end reads short."""

    url: str

    def read(self, key: str) -> bytes | None:
        """The whole object."""

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes | None]:
        """Bytes [start, stop) of several objects, together where that is faster."""

    def write(self, key: str, data: bytes) -> None:
        """Create or replace one object, atomically."""

    def delete(self, key: str) -> None:
        """Remove one object; it need not exist."""

    def list(self, folder: str) -> list[str]:
        """Names of the objects directly in a folder, partial ones included; empty where there is none."""


def open_store(url: Url, storage_options: Mapping[str, Any] | None = None) -> ObjectStore:
    """The place behind `url`. A string with `://` goes to fsspec with `storage_options`, anything else is a folder."""
    text = os.fspath(url)
    if "://" in text and not text.startswith("file://"):
        return RemoteStore(text, storage_options or {})
    if storage_options:
        raise ValueError(f"storage_options were given for {text!r}, which is a local folder: they need a URL")
    return LocalStore(text.removeprefix("file://"))


class LocalStore:
    """Objects as files of a folder."""

    def __init__(self, folder: str) -> None:
        self.url = os.path.abspath(os.path.expanduser(folder))

    def read(self, key: str) -> bytes | None:
        try:
            return Path(self.url, key).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes | None]:
        found: list[bytes | None] = []
        for key, group in itertools.groupby(ranges, key=lambda item: item[0]):
            spans = [(start, stop) for _, start, stop in group]
            try:
                descriptor = os.open(f"{self.url}/{key}", os.O_RDONLY | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError):
                found += [None] * len(spans)
                continue
            try:
                found += [os.pread(descriptor, stop - start, start) for start, stop in spans]
            finally:
                os.close(descriptor)
        return found

    def write(self, key: str, data: bytes) -> None:
        path = os.path.join(self.url, key)
        partial = f"{path}.{uuid.uuid4().hex}{PARTIAL}"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            with open(partial, "wb") as file:
                file.write(data)
            os.replace(partial, path)
        except OSError:
            # The disk may be full: leave nothing behind that makes it fuller.
            Path(partial).unlink(missing_ok=True)
            raise

    def delete(self, key: str) -> None:
        Path(self.url, key).unlink(missing_ok=True)

    def list(self, folder: str) -> list[str]:
        try:
            return os.listdir(os.path.join(self.url, folder))
        except (FileNotFoundError, NotADirectoryError):
            return []


class RemoteStore:
    """Objects behind an fsspec URL."""

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        self.url = url.rstrip("/")
        # A listing kept from before would hide what other writers have done since.
        self._options = {"use_listings_cache": False, **storage_options}
        self._connect()

    def read(self, key: str) -> bytes | None:
        try:
            return self._filesystem().cat_file(self._path(key))
        except FileNotFoundError:
            return None

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes | None]:
        found = self._filesystem().cat_ranges(
            [self._path(key) for key, _, _ in ranges],
            [start for _, start, _ in ranges],
            [stop for _, _, stop in ranges],
            on_error="return",
        )
        for item in found:
            if isinstance(item, Exception) and not isinstance(item, FileNotFoundError):
                raise item
        return [None if isinstance(item, Exception) else item for item in found]

    def write(self, key: str, data: bytes) -> None:
        self._filesystem().pipe_file(self._path(key), data)

    def delete(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._filesystem().rm_file(self._path(key))

    def list(self, folder: str) -> list[str]:
        try:
            return [os.path.basename(name) for name in self._filesystem().ls(self._path(folder), detail=False)]
        except FileNotFoundError:
            return []

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _connect(self) -> None:
        self._fs, self._root = fsspec.url_to_fs(self.url, **self._options)
        self._process = os.getpid()

    def _filesystem(self) -> fsspec.AbstractFileSystem:
        # A connection does not survive fork: a child makes its own.
        if self._process != os.getpid():
            self._connect()
        return self._fs
