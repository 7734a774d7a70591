"""What a cache holds: the manifest and the stored arrays of format 1.

The manifest says which teacher, which tokens and which encoding; it is written as the attributes of the Zarr group.
The arrays are addressed by sample: sample n, position t holds the teacher's distribution for the token at t + 1.

Shapes: N samples, S positions, K entries, V vocabulary, T temperatures, B samples in a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, Literal

FORMAT = 1
COMMIT = "commit"
TABLES = ("id_by_rank", "context_start", "context_ids")  # fixed before the first block
CONTEXT_LIMIT = 4096  # longest list of likely ids kept for one input token (ranks.py)
# The arrays of a block, in the order in which the commit word hashes them, and their axes beside the sample.
BLOCK_ARRAYS = {
    "tokens": 1,
    "topk_rank": 3,
    "topk_logprob_step": 3,
    "tail_logprob": 1,
    "logz": 2,
    "label_logprob": 1,
    "loss_mask": 1,
    "segment": 1,
}


class CacheError(RuntimeError):
    """The cache is missing, unfinished, damaged or not the one asked for; the message names block and array."""


def library_versions() -> dict[str, str]:
    """Versions of the libraries that turn arrays into bytes; the launcher adds those that compute the targets."""
    return {name: version(name) for name in ("numcodecs", "numpy", "zarr")}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything the stored numbers depend on. Equal manifests on equal hardware give equal bytes.

    `created` stands apart: it takes no part in `identity()`.
    """

    teacher: str  # the teacher's name or path
    teacher_revision: str  # its revision, or a hash of its weights
    teacher_dtype: str  # what it computed in, e.g. "bfloat16"
    tokenizer_hash: str  # a hash of the tokenizer's files or vocabulary
    vocab_size: int  # true vocabulary, without padding; every id lies below it
    dataset: str  # where the text came from
    dataset_hash: str  # a hash of it
    packing: str  # how documents became samples, e.g. "concatenate"
    samples: int  # N
    seq_length: int  # S
    k: int = 100  # K: stored entries per position
    block: int = 64  # B: samples written, committed and resumed as one
    entries: Literal["topk", "sampled"] = "topk"
    draws: int = 0  # draws per position where entries are sampled
    temperatures: tuple[float, ...] = (1.0,)  # those whose normaliser is stored; 1 first
    codecs: str = "lossless"  # name of a preset of codecs.py
    seed: int = 0  # of the packing and of the draws
    device: str = "cpu"  # kind of device that computed the teacher
    tp: int = 1  # the teacher's tensor-parallel size
    pp: int = 1  # its pipeline-parallel size
    ep: int = 1  # its expert-parallel size
    micro_batch: int = 1  # samples the teacher saw at once
    versions: Mapping[str, str] = field(default_factory=library_versions)
    created: str = field(default_factory=_now)
    format: int = FORMAT

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperatures", tuple(float(t) for t in self.temperatures))
        object.__setattr__(self, "versions", dict(sorted(self.versions.items())))
        if self.format != FORMAT:
            raise CacheError(
                f"the cache has format {self.format!r} but this version reads format {FORMAT}: use a matching version"
            )
        for name in ("vocab_size", "seq_length", "k", "block", "tp", "pp", "ep", "micro_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"manifest.{name} is {getattr(self, name)}; it must be at least 1")
        if self.samples < 0:
            raise ValueError(f"manifest.samples is {self.samples}; it must be at least 0")
        if self.k > self.vocab_size:
            raise ValueError(
                f"manifest.k is {self.k} but the vocabulary has {self.vocab_size} ids: lower k to at most that"
            )
        if not self.temperatures or self.temperatures[0] != 1.0 or min(self.temperatures) <= 0:
            raise ValueError(f"manifest.temperatures is {self.temperatures}; it must be positive and start with 1.0")
        if len(set(self.temperatures)) != len(self.temperatures):
            raise ValueError(f"manifest.temperatures holds a value twice: {self.temperatures}")
        if self.entries not in ("topk", "sampled"):
            raise ValueError(f"manifest.entries is {self.entries!r}; it must be 'topk' or 'sampled'")
        if (self.entries == "sampled") != (self.draws > 0):
            raise ValueError(
                f"manifest.draws is {self.draws} with entries={self.entries!r}: it is at least 1 for 'sampled', else 0"
            )

    @property
    def blocks(self) -> int:
        """⌈N/B⌉."""
        return -(-self.samples // self.block)

    def rows(self, index: int) -> slice:
        """The samples of block `index`; the last block may be shorter."""
        if not 0 <= index < self.blocks:
            raise IndexError(f"block {index} does not exist: the cache has {self.blocks} blocks")
        return slice(index * self.block, min((index + 1) * self.block, self.samples))

    def identity(self) -> dict[str, Any]:
        """All fields but `created`, as JSON values."""
        values = asdict(self)
        del values["created"]
        return values | {"temperatures": list(self.temperatures)}

    def difference(self, other: Manifest) -> str | None:
        """The first field in which two manifests differ, with both values; None where they agree."""
        mine, theirs = self.identity(), other.identity()
        for name, value in mine.items():
            if value != theirs[name]:
                return f"{name}: {value!r} here, {theirs[name]!r} there"
        return None

    def attributes(self) -> dict[str, Any]:
        """As written to the Zarr group."""
        return self.identity() | {"created": self.created}

    @classmethod
    def from_attributes(cls, attributes: Mapping[str, Any]) -> Manifest:
        """The inverse of `attributes`; other keys are left alone."""
        attributes = {"ep": 1, **attributes}  # which the first caches of this format do not name
        names = [f.name for f in fields(cls)]
        absent = [name for name in names if name not in attributes]
        if absent:
            raise CacheError(f"the cache's manifest lacks {', '.join(absent)}: its metadata is damaged")
        return cls(**{name: attributes[name] for name in names})

    def with_samples(self, samples: int, block: int) -> Manifest:
        """The same kind of cache with another number of samples and block length."""
        return replace(self, samples=samples, block=block)


@dataclass(frozen=True)
class ArraySpec:
    """One stored array whose first axis is the sample."""

    name: str
    dtype: str  # little-endian NumPy
    shape: tuple[int, ...]  # of one sample
    inner: tuple[int, ...]  # of one inner chunk of a sample: what is compressed at a time
    fill: int | float  # no whole row of it is ever stored


def block_arrays(manifest: Manifest) -> tuple[ArraySpec, ...]:
    """BLOCK_ARRAYS with their types and shapes."""
    s, k, t = manifest.seq_length, manifest.k, len(manifest.temperatures)
    planes, part, nan = rank_bytes(manifest.vocab_size), entry_chunk(k), float("nan")
    layout: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], int | float]] = {
        "tokens": ("<i4", (s + 1,), (s + 1,), -1),
        "topk_rank": ("|u1", (planes, s, k), (1, s, part), 255),
        "topk_logprob_step": ("|u1", (2, s, k), (1, s, part), 255),
        "tail_logprob": ("<f2", (s,), (s,), nan),
        "logz": ("<f4", (s, t), (s, t), nan),
        "label_logprob": ("<f4", (s,), (s,), nan),
        "loss_mask": ("|u1", (s,), (s,), 255),
        "segment": ("<i4", (s,), (s,), -1),
    }
    return tuple(ArraySpec(name, *layout[name]) for name in BLOCK_ARRAYS)


def rank_bytes(vocab_size: int) -> int:
    """Bytes that hold every rank, context list included, and the mark of an absent entry (all bits set)."""
    return 2 if vocab_size + CONTEXT_LIMIT < 0xFFFF else 3


def entry_chunk(k: int) -> int:
    """Entries compressed together: early and late entries differ, so each part gets its own Huffman code.

    The largest divisor of k up to 50, where there is one of at least 16; parts shorter than that cost more than they
    save.
    """
    return max((d for d in range(16, 51) if k % d == 0), default=k)
