"""Where the objects of a cache live: a folder, or any fsspec URL.

An object is a few bytes under a key such as `tokens/c.3.0` (block 3 of the tokens). It is written whole and atomically:
local files under a partial name that is then renamed, remote ones by the object store itself. So an object is the old
one, the new one or absent, never a mixture. No file stays open between calls.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import fsspec

Url = str | os.PathLike[str]
_S3_PATIENCE = {"connect_timeout": 5, "retries": {"max_attempts": 2, "mode": "standard"}}
PARTIAL = ".partial"  # suffix of a file that is not complete; a killed writer may leave one


class ObjectStore(Protocol):
    """What a cache needs of a place. Absent objects read as None; a range past the end reads short."""

    url: str

    def read(self, key: str) -> bytes | None:
        """The whole object."""

    def read_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Several whole objects, together where that is faster."""

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes | None]:
        """Bytes [start, stop) of several objects, together where that is faster."""

    def write(self, key: str, data: bytes) -> None:
        """Create or replace one object, atomically."""

    def write_many(self, objects: Mapping[str, bytes]) -> None:
        """Write several objects, in no order that one may rely on."""

    def delete(self, key: str) -> None:
        """Remove one object; it need not exist."""

    def sizes(self, folder: str) -> dict[str, int]:
        """Names and lengths of the objects directly in a folder, partial ones included; empty where there is none."""


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

    def read_many(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self.read(key) for key in keys]

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

    def write_many(self, objects: Mapping[str, bytes]) -> None:
        for key, data in objects.items():
            self.write(key, data)

    def delete(self, key: str) -> None:
        Path(self.url, key).unlink(missing_ok=True)

    def sizes(self, folder: str) -> dict[str, int]:
        try:
            with os.scandir(os.path.join(self.url, folder)) as entries:
                return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        except (FileNotFoundError, NotADirectoryError):
            return {}


class RemoteStore:
    """Objects behind an fsspec URL."""

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        self.url = url.rstrip("/")
        # A listing kept from before would hide what other writers have done since.
        self._options = {"use_listings_cache": False, **storage_options}
        if url.startswith(("s3://", "s3a://")):
            # s3fs itself tries five times: a server that is gone is reported within seconds, not minutes.
            self._options.setdefault("config_kwargs", _S3_PATIENCE)
        self._connect()

    def read(self, key: str) -> bytes | None:
        with self._connection() as fs:
            try:
                return fs.cat_file(self._path(key))
            except FileNotFoundError:
                return None

    def read_many(self, keys: Sequence[str]) -> list[bytes | None]:
        if len(keys) < 2:
            return [self.read(key) for key in keys]
        paths = [self._path(key) for key in keys]
        with self._connection() as fs:
            found = fs.cat(paths, on_error="return")
            return [self._found(found[path]) for path in paths]

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes | None]:
        paths, starts, stops = [self._path(key) for key, _, _ in ranges], [r[1] for r in ranges], [r[2] for r in ranges]
        with self._connection() as fs:
            return [self._found(item) for item in fs.cat_ranges(paths, starts, stops, on_error="return")]

    def write(self, key: str, data: bytes) -> None:
        self.write_many({key: data})

    def write_many(self, objects: Mapping[str, bytes]) -> None:
        with self._connection() as fs:
            fs.pipe({self._path(key): data for key, data in objects.items()})

    def delete(self, key: str) -> None:
        with self._connection() as fs, contextlib.suppress(FileNotFoundError):
            fs.rm_file(self._path(key))

    def sizes(self, folder: str) -> dict[str, int]:
        with self._connection() as fs:
            try:
                found = fs.ls(self._path(folder), detail=True)
            except FileNotFoundError:
                return {}
        return {os.path.basename(item["name"]): item["size"] for item in found if item["type"] == "file"}

    @staticmethod
    def _found(item: bytes | Exception) -> bytes | None:
        if isinstance(item, FileNotFoundError):
            return None
        if isinstance(item, Exception):
            raise item
        return item

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _connect(self) -> None:
        self._fs, self._root = fsspec.url_to_fs(self.url, **self._options)
        self._process = os.getpid()

    @contextmanager
    def _connection(self) -> Iterator[fsspec.AbstractFileSystem]:
        """The file system; whatever goes wrong with it becomes an `OSError` that names the place."""
        # A connection does not survive fork: a child makes its own.
        if self._process != os.getpid():
            self._connect()
        try:
            yield self._fs
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{self.url}: {error}") from error


class HeldStore:
    """Another store, of whose objects those read in ranges are fetched whole and held in memory, up to some bytes.

    Far away, one whole block is cheaper than a dozen ranges for every sample of it.

    Args:
        store: where the objects are.
        limit: bytes to hold; the objects used least recently go first.
    """

    def __init__(self, store: ObjectStore, limit: int) -> None:
        self.url = store.url
        self._store, self._limit = store, limit
        self._held: OrderedDict[str, bytes] = OrderedDict()
        self._start()

    def read(self, key: str) -> bytes | None:
        return self._store.read(key)

    def read_many(self, keys: Sequence[str]) -> list[bytes | None]:
        return self._store.read_many(keys)

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes | None]:
        if self._process != os.getpid():  # a fork may have copied the lock while it was taken
            self._start()
        wanted = dict.fromkeys(key for key, _, _ in ranges)
        # Whoever comes while an object is being fetched waits for it rather than fetch it again.
        with self._lock:
            absent = [key for key in wanted if key not in self._held]
            for key, data in zip(absent, self._store.read_many(absent)):
                if data is not None:
                    self._held[key] = data
            found = {key: self._held[key] for key in wanted if key in self._held}
            for key in found:
                self._held.move_to_end(key)
            while sum(map(len, self._held.values())) > self._limit:
                self._held.popitem(last=False)
        return [found[key][start:stop] if key in found else None for key, start, stop in ranges]

    def write(self, key: str, data: bytes) -> None:
        self._store.write(key, data)

    def write_many(self, objects: Mapping[str, bytes]) -> None:
        self._store.write_many(objects)

    def delete(self, key: str) -> None:
        self._store.delete(key)

    def sizes(self, folder: str) -> dict[str, int]:
        return self._store.sizes(folder)

    def _start(self) -> None:
        self._lock, self._process = threading.Lock(), os.getpid()

    def __reduce__(self) -> tuple[type[HeldStore], tuple[ObjectStore, int]]:
        return HeldStore, (self._store, self._limit)
