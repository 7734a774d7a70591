"""The packed samples of a run on disk: made once, mapped by every rank.

    <samples_dir>/samples.json             parameters that decide every byte, and counts
    <samples_dir>/{train,held_out}/        tokens.npy [N, S + 1], segment.npy [N, S], loss_mask.npy [N, S]

The folder is written aside and renamed, so it is whole or absent. It is never overwritten: a cache made from it
would silently belong to other samples.

Collectives: none. One process prepares; the others wait for the folder (`await_samples`).
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.lib.format import open_memmap
from transformers import PreTrainedTokenizerBase

from megatron_kd.config import DataConfig, RunConfig
from megatron_kd.console import Console
from megatron_kd.data.document import SourceError
from megatron_kd.data.encoding import encode
from megatron_kd.data.packing import PackedSamples, TokenStream, pack
from megatron_kd.data.sources import iterate_documents, source_hash
from megatron_kd.data.tokenizer import tokenizer_hash, vocabulary_size

Split = Literal["train", "held_out"]

GIVEN = "samples-dir"  # the data.source of what `write_samples` was given, samples of another making
PACKING = "stream-1"  # the rule of packing.py; another rule gets another name
_PACK_TOKENS = 1 << 22  # positions packed at a time
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class SplitCounts:
    """What a split holds."""

    documents: int
    tokens: int  # of the documents, end-of-document tokens included
    samples: int
    learnt: int  # positions with loss_mask 1
    hash: str  # of the bytes of all its arrays (xxh3-128)


@dataclass(frozen=True)
class SampleSet:
    """One split of the packed samples, mapped from disk."""

    tokens: np.ndarray  # [N, S + 1] int32
    segment: np.ndarray  # [N, S] int32
    loss_mask: np.ndarray  # [N, S] uint8
    counts: SplitCounts
    parameters: dict[str, Any]  # everything that decides these bytes

    def __len__(self) -> int:
        return len(self.tokens)


def prepare(config: RunConfig, tokenizer: PreTrainedTokenizerBase, console: Console) -> Path:
    """Tokenises and packs `data.source` into the run's samples folder, unless it is there already.

    Returns:
        The folder.

    Raises:
        SourceError: the text cannot be read, or there is none.
        ValueError: the folder holds samples made otherwise; the message says what differs.
    """
    folder = config.samples_dir
    data = config.data
    if data.source == GIVEN:
        made = sample_parameters(data, tokenizer)
        _require_same(folder, {key: made[key] for key in ("tokenizer_hash", "vocab_size", "sequence_length")})
        _show(folder, console)
        return folder
    if data.document_multiple < 1 or data.sequence_length % data.document_multiple:
        raise ValueError(
            f"data.document_multiple is {data.document_multiple}; a divisor of data.sequence_length = "
            f"{data.sequence_length} is needed, as documents that run on in the next sample are cut there"
        )
    parameters = sample_parameters(data, tokenizer)
    if (folder / "samples.json").exists():
        _require_same(folder, parameters)
        console.note(f"samples are prepared already: {folder}")
    else:
        console.note(f"tokenising {data.source}")
        _write(folder, data, parameters, tokenizer)
    _show(folder, console)
    return folder


def await_samples(config: RunConfig) -> Path:
    """Waits until another process has prepared the samples; a process that fails takes the waiting ones with it."""
    while not (config.samples_dir / "samples.json").exists():
        time.sleep(_POLL_SECONDS)
    return config.samples_dir


def load_samples(folder: str | Path, split: Split) -> SampleSet:
    """Maps one split. Raises `ValueError` when the folder holds no samples."""
    folder = Path(folder)
    record = _read_record(folder)
    arrays = {name: np.load(folder / split / f"{name}.npy", mmap_mode="r") for name in PackedSamples._fields}
    return SampleSet(**arrays, counts=SplitCounts(**record["splits"][split]), parameters=record["parameters"])


def sample_parameters(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Everything that decides the bytes of the samples, as recorded in samples.json and the cache's manifest.

    Of given samples it is known where they come from and how they were packed, which whoever gives them adds.
    """
    return {
        "source": data.source,
        "source_hash": "" if data.source == GIVEN else source_hash(data.source),
        "field": data.field,
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "vocab_size": vocabulary_size(tokenizer),
        "end_of_document": tokenizer.eos_token_id,
        "chat_template": xxhash.xxh3_64_hexdigest(str(tokenizer.chat_template or "").encode()),
        "packing": PACKING,
        "sequence_length": data.sequence_length,
        "document_multiple": data.document_multiple,
        "held_out": data.held_out,
        "max_samples": data.max_samples,
    }


def write_samples(
    folder: Path, splits: Mapping[Split, tuple[int, Iterable[PackedSamples]]], parameters: Mapping[str, Any]
) -> None:
    """Writes samples made elsewhere, to be used with `data.source: samples-dir`.

    Args:
        folder: made by this call.
        splits: of each split the number of samples N, and PackedSamples that together hold N of them.
        parameters: those of `sample_parameters`, `source` and `packing` saying where the samples come from.

    Raises:
        ValueError: the folder holds other samples already.
    """
    with _whole(folder, dict(parameters)) as (result, counts):
        for split, (count, pieces) in splits.items():
            length = parameters["sequence_length"]
            learnt, digest = _store(result / split, count, length, pieces)
            segment = np.load(result / split / "segment.npy", mmap_mode="r")
            documents = int((segment[:, -1] + 1).sum())
            counts[split] = SplitCounts(documents, count * (length + 1), count, learnt, digest)


def split_documents(stream: TokenStream, held_out: float, multiple: int = 1) -> dict[Split, TokenStream]:
    """The last `held_out` of the documents apart from the rest.

    Where the fraction is less than one document, the text itself is cut, at a multiple of `multiple` tokens: the last
    `held_out` of the tokens become a document of their own.

    Raises:
        ValueError: a fraction outside [0, 1).
    """
    if not 0 <= held_out < 1:
        raise ValueError(f"data.held_out is {held_out}; a fraction of the documents is needed, 0 ≤ held_out < 1")
    documents = len(stream.starts)
    first = documents - int(documents * held_out)
    if held_out > 0 and first == documents:
        position = round(len(stream.tokens) * (1 - held_out) / multiple) * multiple
        stream = stream.cut(position)
        documents, first = len(stream.starts), int(np.searchsorted(stream.starts, position))
    return {"train": stream.documents(0, first), "held_out": stream.documents(first, documents)}


def _write(folder: Path, data: DataConfig, parameters: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    with _whole(folder, parameters) as (result, counts):
        documents = iterate_documents(data.source, data.field)
        stream = encode(documents, tokenizer, result.parent, data.document_multiple)
        if len(stream.tokens) < 2:
            raise SourceError(f"data.source {data.source}: no text in it; at least one document is needed")
        for split, part in split_documents(stream, data.held_out, data.document_multiple).items():
            most = data.max_samples if split == "train" else None
            chosen = choose_samples(part.sample_count(data.sequence_length), most)
            counts[split] = _write_split(result / split, part, chosen, parameters)


@contextmanager
def _whole(folder: Path, parameters: dict[str, Any]) -> Iterator[tuple[Path, dict[Split, SplitCounts]]]:
    """A folder to fill, and counts to note, which become `folder` when both are complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        result, counts = Path(temporary) / "result", {}
        yield result, counts
        splits = {split: dataclasses.asdict(found) for split, found in counts.items()}
        record = {"parameters": parameters, "splits": splits}
        (result / "samples.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        try:
            result.rename(folder)
        except OSError:  # another process was faster: its samples are these, or are refused
            if not (folder / "samples.json").exists():
                raise
            _require_same(folder, parameters)


def choose_samples(count: int, most: int | None) -> np.ndarray:
    """Numbers of the samples to keep, ascending: all of them, or `most` of them spread evenly over the text."""
    if most is None or most >= count:
        return np.arange(count)
    return np.arange(most) * count // most


def _write_split(folder: Path, stream: TokenStream, chosen: np.ndarray, parameters: dict[str, Any]) -> SplitCounts:
    length = parameters["sequence_length"]
    documents: set[int] = set()

    def pieces() -> Iterator[PackedSamples]:
        for run in _runs(chosen, max(_PACK_TOKENS // length, 1)):
            first, last = int(run[0]), int(run[-1]) + 1
            yield pack(stream, length, first, last, padding_id=parameters["end_of_document"])
            end = min(last * length, len(stream.tokens) - 1)
            touched = np.searchsorted(stream.starts, [first * length, end], "right")
            documents.update(range(touched[0] - 1, touched[1]))

    learnt, digest = _store(folder, len(chosen), length, pieces())
    # A sample's last label is a token of its own where the sample that begins with it was not chosen.
    inputs = np.minimum(length, len(stream.tokens) - chosen * length)
    labels = ((chosen + 1) * length < len(stream.tokens)) & ~np.isin(chosen + 1, chosen)
    tokens = int(inputs.sum() + labels.sum())
    return SplitCounts(documents=len(documents), tokens=tokens, samples=len(chosen), learnt=learnt, hash=digest)


def _store(folder: Path, count: int, length: int, pieces: Iterable[PackedSamples]) -> tuple[int, str]:
    """Writes the arrays of `count` samples, piece by piece; returns the learnt positions and the bytes' hash."""
    folder.mkdir(parents=True)
    shapes = PackedSamples((count, length + 1), (count, length), (count, length))
    dtypes = PackedSamples(np.int32, np.int32, np.uint8)
    arrays = [
        open_memmap(folder / f"{name}.npy", mode="w+", dtype=dtype, shape=shape)
        for name, dtype, shape in zip(PackedSamples._fields, dtypes, shapes)
    ]
    learnt, digest, written = 0, xxhash.xxh3_128(), 0
    for piece in pieces:
        for array, values in zip(arrays, piece):
            array[written : written + len(values)] = values
            digest.update(values.data)
        written += len(piece.tokens)
        learnt += int(piece.loss_mask.sum())
    for array in arrays:
        array.flush()
    return learnt, digest.hexdigest()


def _runs(chosen: np.ndarray, longest: int) -> Iterator[np.ndarray]:
    """Consecutive numbers together, at most `longest` of them."""
    for run in np.split(chosen, np.flatnonzero(np.diff(chosen) != 1) + 1):
        for start in range(0, len(run), longest):
            yield run[start : start + longest]


def _read_record(folder: Path) -> dict[str, Any]:
    file = folder / "samples.json"
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no prepared samples; `megatron-kd prepare --config F` makes them") from None


def _require_same(folder: Path, parameters: dict[str, Any]) -> None:
    found = _read_record(folder)["parameters"]
    # Text that was moved is the same text: its hash counts, not its path.
    different = [key for key in parameters if key != "source" and found.get(key) != parameters[key]]
    if different:
        listed = "; ".join(f"{key}: {found.get(key)!r} there, {parameters[key]!r} asked for" for key in different)
        raise ValueError(
            f"{folder} holds samples made otherwise ({listed}); "
            "give another data.samples_dir or run_dir, or delete the folder and the caches made from it"
        )


def _show(folder: Path, console: Console) -> None:
    record = _read_record(folder)
    for split, counts in record["splits"].items():
        explanation = f"of {record['parameters']['sequence_length']} positions, {counts['learnt']:,} of them learnt"
        console.quantity(f"{split} documents", f"{counts['documents']:,}", f"{counts['tokens']:,} tokens")
        console.quantity(f"{split} samples", f"{counts['samples']:,}", explanation)
