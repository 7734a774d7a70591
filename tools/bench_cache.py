"""Size and reading speed of the teacher cache, beside plain alternatives, on the targets of an existing cache.

    python tools/bench_cache.py runs/quickstart/teacher.zarr [--positions 4096] [--samples 64] [--rounds 5] [--csv FILE]

The targets are read once, joined into samples of the length asked for, repeated until there are enough of them, and
written again in every format, into a temporary folder. Then all formats are read in turn, round after round, so that a
change of the machine's speed meets them alike; the table shows medians. What is read: token ids as integers and
log-probs as float32, [samples, positions, K].

    shuffled   batches of 8 samples in random order, as a trainer reads
    random     one sample at a time
    sequence   batches of 8 samples in order

Formats:

    lossless, fast, compact   this project's, with one thread and with as many as there are cores
    zarr                      int32 ids and float16 log-probs as zarr writes them by itself, one sample a chunk
    zarr + zarrs              the same, read with the zarrs codec pipeline, where that is installed
    safetensors               int32 ids and float16 log-probs, raw, mapped into memory
    Megatron-LM               its tar of zstd-compressed torch files, 8 samples an iteration, read by its own functions
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import io
import os
import platform
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import zarr

from megatron_kd.cache import PRESETS, CacheWriter, TeacherCache, rank_table, stats

_BATCH = 8
Read = Callable[[list[int]], object]


@dataclass(frozen=True)
class Format:
    """One way to keep targets: what it costs, and how samples are read back."""

    name: str
    bytes: int
    write_seconds: float
    read: Read


def main() -> None:
    """Run the comparison and print it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cache", help="an existing cache, whose targets are used")
    parser.add_argument("--positions", type=int, help="in a sample, a multiple of the cache's (default: those)")
    parser.add_argument("--samples", type=int, default=64, help="how many samples (default 64)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each reading is timed (default 5)")
    parser.add_argument("--csv", type=Path, help="where to write the table")
    arguments = parser.parse_args()

    source = TeacherCache.open(arguments.cache)
    targets = _targets(source, arguments.samples, arguments.positions or source.manifest.seq_length)
    samples, positions, k = targets["ids"].shape
    tokens = samples * positions
    versions = ", ".join(f"{name} {_version(name)}" for name in ("zarr", "numcodecs", "numpy", "megatron-core"))
    print(f"machine   {platform.machine()}, {os.cpu_count()} cores, Python {sys.version.split()[0]}")
    print(f"versions  {versions}")
    print(f"targets   {samples} samples × {positions} positions × {k} entries of {source.manifest.vocab_size} ids")

    with tempfile.TemporaryDirectory() as folder:
        formats = list(_formats(Path(folder), source, targets))
        speeds = _time(formats, samples, positions, arguments.rounds)
    rows = [
        {
            "format": f.name,
            "bytes_a_token": round(f.bytes / tokens, 1),
            "bytes_an_entry": round(f.bytes / tokens / k, 3),
            "written_tokens_a_second": round(tokens / f.write_seconds),
            **{order: round(speeds[f.name, order]) for order in ("shuffled", "random", "sequence")},
        }
        for f in formats
    ]
    print("\n" + _table(rows))
    if arguments.csv:
        with arguments.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


def _targets(source: TeacherCache, samples: int, positions: int) -> dict[str, np.ndarray]:
    """What a writer takes. Normalisers are not read back: ones of the same size stand for them."""
    joined, rest = divmod(positions, source.manifest.seq_length)
    if rest or not 1 <= joined <= source.manifest.samples:
        raise SystemExit(f"--positions {positions}: the cache has {source.manifest.samples} samples of "
                         f"{source.manifest.seq_length} positions to join")  # fmt: skip
    whole = source.manifest.samples // joined
    batch = source.read(np.arange(samples * joined) % (whole * joined))
    targets = {
        name: array.reshape(samples, positions, *array.shape[2:])
        for name, array in vars(batch).items()
        if name != "tokens"
    }
    text = batch.tokens[:, :-1].reshape(samples, positions)
    targets["tokens"] = np.concatenate([text, batch.tokens[joined - 1 :: joined, -1:]], axis=1)
    # A sample's last label is now the first token of the one joined to it, whose probability is not known.
    is_label = targets["ids"] == targets["tokens"][:, 1:, None]
    entry = np.where(is_label, targets["logprobs"], -np.inf).max(axis=-1)
    targets["label_logprob"] = np.where(is_label.any(axis=-1), entry, targets["logprobs"][..., -1])
    shape = (samples, positions, len(source.manifest.temperatures))
    targets["logz"] = np.random.default_rng(0).normal(20, 5, shape).astype(np.float32)
    return targets


def _formats(folder: Path, source: TeacherCache, targets: dict[str, np.ndarray]) -> Iterator[Format]:
    for preset in PRESETS:
        path, seconds = folder / preset, _timed(lambda p=preset: _write_ours(folder / p, source, targets, p))
        # The tables, one to two bytes for each of their ids, are the same for a cache of any length: left out.
        size = sum(stats(path).bytes_by_array.values())
        for threads in sorted({1, os.cpu_count() or 1}):
            cache = TeacherCache.open(path, threads=threads)
            yield Format(f"{preset}, {threads} thread{'s' * (threads > 1)}", size, seconds, cache.read)
    yield from _zarr(folder / "zarr", targets)
    yield from _safetensors(folder / "raw.safetensors", targets)
    yield from _megatron(folder / "cp0_dp0__0.tar", targets)


def _write_ours(path: Path, source: TeacherCache, targets: dict[str, np.ndarray], preset: str) -> None:
    n, positions = targets["loss_mask"].shape
    block = min(source.manifest.block, n)
    manifest = replace(source.manifest, samples=n, seq_length=positions, block=block, codecs=preset)
    first = manifest.rows(0)
    table = rank_table(targets["tokens"][first], targets["ids"][first], manifest.vocab_size)
    writer = CacheWriter.create(path, manifest, table)
    for index in range(manifest.blocks):
        writer.write_block(index, {name: array[manifest.rows(index)] for name, array in targets.items()})


def _zarr(path: Path, targets: dict[str, np.ndarray]) -> Iterator[Format]:
    def write() -> None:
        group = zarr.create_group(path)
        for name, array in (("ids", targets["ids"]), ("logprobs", targets["logprobs"].astype(np.float16))):
            group.create_array(name, shape=array.shape, dtype=array.dtype, chunks=(1, *array.shape[1:]))[:] = array

    def reader() -> Read:
        group = zarr.open_group(path, mode="r")
        ids, logprobs = group["ids"], group["logprobs"]
        return lambda samples: (ids.oindex[samples], logprobs.oindex[samples].astype(np.float32))

    seconds = _timed(write)
    yield Format("zarr", _size(path), seconds, reader())
    try:
        import zarrs  # noqa: F401
    except ImportError:
        return
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        yield Format("zarr + zarrs", _size(path), seconds, reader())


def _safetensors(path: Path, targets: dict[str, np.ndarray]) -> Iterator[Format]:
    try:
        from safetensors import safe_open
        from safetensors.numpy import save_file
    except ImportError:
        return
    arrays = {"ids": targets["ids"], "logprobs": targets["logprobs"].astype(np.float16)}
    seconds = _timed(lambda: save_file(arrays, path))
    file = safe_open(path, "numpy")
    ids, logprobs = file.get_slice("ids"), file.get_slice("logprobs")

    def read(samples: list[int]) -> object:
        return (
            np.concatenate([ids[n : n + 1] for n in samples]),
            np.concatenate([logprobs[n : n + 1] for n in samples]).astype(np.float32),
        )

    yield Format("safetensors", _size(path), seconds, read)


def _megatron(path: Path, targets: dict[str, np.ndarray]) -> Iterator[Format]:
    try:
        import torch
        import zstandard
        from megatron.training.distillation import utils_logits
    except ImportError:
        return
    if targets["ids"].max() >= 1 << 17:
        return  # its indices have 17 bits

    def write() -> None:
        with tarfile.open(path, "w") as tar:
            for iteration, start in enumerate(range(0, len(targets["ids"]), _BATCH)):
                rows = slice(start, start + _BATCH)
                # One microbatch an iteration, [positions, samples, K] as its saver has it.
                low, high = utils_logits.pack_indices(torch.from_numpy(targets["ids"][rows]).transpose(0, 1).long())
                values = torch.from_numpy(targets["logprobs"][rows]).transpose(0, 1).half()
                buffer = io.BytesIO()
                torch.save({"values": [values.contiguous()], "indices_low": [low], "bit_17": [high]}, buffer)
                data = zstandard.ZstdCompressor(level=3).compress(buffer.getvalue())
                member = tarfile.TarInfo(f"{iteration}{utils_logits.LOGPROBS_TAR_MEMBER_SUFFIX}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))

    def decode(data: bytes) -> object:
        values, indices = utils_logits.decode_logprobs_payload(data)
        return values[0].float(), indices[0]

    def read(samples: list[int]) -> object:
        if samples == list(range(samples[0], samples[0] + _BATCH)) and samples[0] % _BATCH == 0:
            # In order: its loader streams through the tar, iteration after iteration.
            if samples[0] == 0:
                read.stream = utils_logits.iter_logprobs_tar_entries(str(path))  # type: ignore[attr-defined]
            return decode(next(read.stream).data)  # type: ignore[attr-defined]
        return [decode_at(n // _BATCH) for n in samples]

    def decode_at(iteration: int) -> object:
        values, indices = utils_logits.load_log_probs_from_tar(str(path), iteration)
        return values[0].float(), indices[0]

    seconds = _timed(write)
    yield Format("Megatron-LM", _size(path), seconds, read)


def _time(formats: list[Format], n: int, positions: int, rounds: int) -> dict[tuple[str, str], float]:
    """(format, order) → tokens a second, the median over rounds."""
    rng = np.random.default_rng(0)
    shuffled = rng.permutation(n).tolist()
    orders = {
        "shuffled": [shuffled[i : i + _BATCH] for i in range(0, n - _BATCH + 1, _BATCH)],
        "random": [[int(i)] for i in rng.integers(0, n, min(n, 32))],
        "sequence": [list(range(i, i + _BATCH)) for i in range(0, n - _BATCH + 1, _BATCH)],
    }
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for order, batches in orders.items():
            tokens = sum(map(len, batches)) * positions
            for f in formats:
                seconds = _timed(lambda b=batches, f=f: [f.read(samples) for samples in b])
                found.setdefault((f.name, order), []).append(tokens / seconds)
    return {key: statistics.median(values) for key, values in found.items()}


def _table(rows: list[dict[str, object]]) -> str:
    shown = [list(rows[0])] + [
        [f"{v:,}" if isinstance(v, int | float) else str(v) for v in row.values()] for row in rows
    ]
    widths = [max(len(line[column]) for line in shown) for column in range(len(shown[0]))]
    shown.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths)) + " |" for line in shown)


def _timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _size(path: Path) -> int:
    return sum(p.stat().st_size for p in ([path] if path.is_file() else path.rglob("*")) if p.is_file())


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    main()
