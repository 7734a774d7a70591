"""From the teacher's numbers to the stored ones, and back.

    teacher (ids, logprobs)             stored (topk_rank, topk_logprob_step)
    entries sorted by falling log-prob, ties by lowest id, absent ones last
    rank = position of the id in the frequency table id_by_rank; absent = the type's largest value
    m_k  = bits of float16(−logprob_k), which grow with k because the entries fall
    step = m_0, m_1 − m_0, m_2 − m_1, …    small numbers, so they compress

Reading back takes two lines of NumPy:

    ids      = id_by_rank[topk_rank]
    logprobs = −np.cumsum(topk_logprob_step, axis=-1, dtype=np.uint16).view(np.float16)

Shapes: n samples, S positions, K entries, T temperatures.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import xxhash

from megatron_kd.cache.schema import ArraySpec, Manifest, absent_rank, block_arrays, rank_dtype

# What a writer passes for one block, in the teacher's own terms.
TARGET_NAMES = ("tokens", "ids", "logprobs", "tail_logprob", "logz", "label_logprob", "loss_mask", "segment")
# A teacher's float32 softmax sums to 1 within far less; float16 rounding is not in it yet.
_MASS_SLACK = 1e-2
_LOGPROB_SLACK = 1e-3
# The label's log-prob may come from another reduction than the entries'; a shifted or foreign row is off by nats.
_LABEL_SLACK = 1e-2


def frequency_table(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """Vocabulary ids by falling frequency in `ids`, ties by lowest id: int32 [vocab_size].

    Args:
        ids: integers of any shape, token ids or top-K entries of the first block; negative ones are ignored.
        vocab_size: V; every id lies below it.
    """
    flat = np.asarray(ids).reshape(-1)
    flat = flat[flat >= 0]
    if flat.size and flat.max() >= vocab_size:
        raise ValueError(f"ids hold {flat.max()} but vocab_size is {vocab_size}: every id must lie below it")
    return np.argsort(-np.bincount(flat, minlength=vocab_size), kind="stable").astype(np.int32)


def invert_table(id_by_rank: np.ndarray, vocab_size: int) -> np.ndarray:
    """rank_by_id of a table; raises unless the table is a permutation of the vocabulary."""
    if id_by_rank.shape != (vocab_size,) or not np.array_equal(np.sort(id_by_rank), np.arange(vocab_size)):
        raise ValueError(
            f"id_by_rank of shape {id_by_rank.shape} is not a permutation of the {vocab_size} ids: "
            "make it with frequency_table"
        )
    ranks = np.empty(vocab_size, rank_dtype(vocab_size))
    ranks[id_by_rank] = np.arange(vocab_size, dtype=ranks.dtype)
    return ranks


def encode_block(
    manifest: Manifest, rank_by_id: np.ndarray, index: int, targets: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The stored arrays of block `index`, checked: what cannot be a teacher's output raises `ValueError`.

    Args:
        targets: TARGET_NAMES → array. tokens [n, S+1]; ids [n, S, K], −1 = absent; logprobs [n, S, K], natural log of
            the teacher's own probability at temperature 1; tail_logprob, label_logprob, loss_mask, segment [n, S];
            logz [n, S, T].
    """
    rows = manifest.rows(index)
    arrays = _take(manifest, index, rows.stop - rows.start, targets)
    ids, magnitude = sort_entries(arrays["ids"], arrays["logprobs"])
    present = ids >= 0
    ranks = np.where(present, rank_by_id[ids], np.asarray(absent_rank(manifest.vocab_size), rank_by_id.dtype))
    stored = {
        "tokens": arrays["tokens"],
        "topk_rank": ranks,
        "topk_logprob_step": np.diff(magnitude, axis=-1, prepend=np.uint16(0)),
        "tail_logprob": _half(np.minimum(arrays["tail_logprob"], 0)),
        "logz": arrays["logz"],
        "label_logprob": arrays["label_logprob"],
        "loss_mask": arrays["loss_mask"],
        "segment": arrays["segment"],
    }
    return {spec.name: np.ascontiguousarray(stored[spec.name], spec.dtype) for spec in block_arrays(manifest)}


def sort_entries(ids: np.ndarray, logprobs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Entries by falling float16 log-prob, ties by lowest id, absent ones last.

    Returns:
        ids int32, and the bits of float16(−logprob) as uint16, both in the shape given.
    """
    present = ids >= 0
    magnitude = _half(np.where(present, -np.minimum(logprobs, 0), np.inf)).view(np.uint16) & 0x7FFF
    # One integer sorts by both: magnitude above, id below. An absent id becomes the largest 32-bit number.
    key = (magnitude.astype(np.int64) << 32) | ids.astype(np.uint32)
    key.sort(axis=-1)
    return (key & 0xFFFFFFFF).astype(np.uint32).view(np.int32), (key >> 32).astype(np.uint16)


class EntryDecoder:
    """Stored entries → ids int32 (−1 = absent) and log-probs float32, by table lookup.

    Args:
        id_by_rank: int32 [V].
    """

    def __init__(self, id_by_rank: np.ndarray) -> None:
        # Ranks beyond the vocabulary, the mark of an absent entry among them, are clipped onto the −1 at the end.
        self._id_by_rank = np.append(id_by_rank.astype(np.int32), np.int32(-1))
        # A lookup in 65,536 numbers is three times faster than NumPy's conversion of float16.
        self._logprob = -np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)

    def __call__(self, topk_rank: np.ndarray, step: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[…, K] of each → ids, logprobs of the same shape."""
        ids = np.take(self._id_by_rank, topk_rank, mode="clip")
        magnitude = np.cumsum(np.ascontiguousarray(step), axis=-1, dtype=np.uint16)
        return ids, np.take(self._logprob, magnitude, mode="clip")


def commit_word(index: int, stored: Mapping[str, np.ndarray], specs: tuple[ArraySpec, ...]) -> int:
    """xxh64 over the decoded bytes of a block's arrays in the order of `block_arrays`, seeded with the block's number.

    Never 0, which means "not there". The seed makes a block that was copied to another place a wrong one.
    """
    digest = xxhash.xxh64(seed=index)
    for spec in specs:
        digest.update(np.ascontiguousarray(stored[spec.name], spec.dtype).data)
    return digest.intdigest() or 1


def label_agrees(tokens: np.ndarray, ids: np.ndarray, logprobs: np.ndarray, label_logprob: np.ndarray) -> np.ndarray:
    """Per position: the label is not among the entries, or its entry has the log-prob stored for the label.

    A row shifted by one, of another text or of another teacher fails this at most positions.

    Args:
        tokens: [n, S+1]; ids and logprobs: [n, S, K]; label_logprob: [n, S].
        logprobs may be rounded to float16: the slack grows by one part in 1024.
    """
    is_label = ids == tokens[:, 1:, None]
    slack = _LABEL_SLACK + np.abs(label_logprob) / 1024
    entry = np.where(is_label, logprobs, -np.inf).max(axis=-1)
    with np.errstate(invalid="ignore"):  # both may be −inf
        agrees = (np.abs(entry - label_logprob) <= slack) | (entry == label_logprob)
    return agrees | ~is_label.any(axis=-1)


def _take(manifest: Manifest, index: int, n: int, targets: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The targets as arrays of the right shape and type, each checked against what it means."""
    if set(targets) != set(TARGET_NAMES):
        raise ValueError(f"block {index}: arrays are {sorted(targets)}; needed are exactly {sorted(TARGET_NAMES)}")
    s, k, t = manifest.seq_length, manifest.k, len(manifest.temperatures)
    shapes = {"tokens": (n, s + 1), "ids": (n, s, k), "logprobs": (n, s, k), "logz": (n, s, t)}
    arrays: dict[str, np.ndarray] = {}
    for name in TARGET_NAMES:
        array, shape = np.asarray(targets[name]), shapes.get(name, (n, s))
        if array.shape != shape:
            raise ValueError(f"block {index}, {name} has shape {array.shape}; needed is {shape}")
        integer = name in ("tokens", "ids", "segment", "loss_mask")
        if integer and array.dtype.kind not in "iub":
            raise ValueError(f"block {index}, {name} has dtype {array.dtype}; needed is an integer type")
        arrays[name] = array if integer else array.astype(np.float32)

    v = manifest.vocab_size
    ids, present = arrays["ids"], arrays["ids"] >= 0
    logprobs = np.where(present, arrays["logprobs"], -np.inf)
    by_id = np.sort(ids, axis=-1)
    with np.errstate(over="ignore"):
        mass = np.exp(logprobs).sum(axis=-1)
    rules = {
        f"tokens lie in [0, {v})": (arrays["tokens"] >= 0) & (arrays["tokens"] < v),
        f"ids lie in [-1, {v})": (ids >= -1) & (ids < v),
        "ids are unique in a row": (by_id[..., 1:] != by_id[..., :-1]) | (by_id[..., 1:] < 0),
        "logprobs are at most 0": logprobs <= _LOGPROB_SLACK,  # false for NaN, too
        "a row's probabilities sum to at most 1": mass <= 1 + _MASS_SLACK,
        "tail_logprob is at most 0": arrays["tail_logprob"] <= _LOGPROB_SLACK,
        "logz is finite": np.isfinite(arrays["logz"]),
        "label_logprob is at most 0": arrays["label_logprob"] <= _LOGPROB_SLACK,
        "loss_mask is 0 or 1": (arrays["loss_mask"] == 0) | (arrays["loss_mask"] == 1),
        "segment is at least 0": arrays["segment"] >= 0,
    }
    if manifest.entries == "topk":
        rules["label_logprob equals the entry that holds the label"] = label_agrees(
            arrays["tokens"], ids, logprobs, arrays["label_logprob"]
        )
    for rule, holds in rules.items():
        if not holds.all():
            place = [int(i) for i in np.argwhere(~holds)[0]]
            raise ValueError(
                f"block {index}: {rule}, but not at {place} (sample in block, position, …): these are not the targets "
                "of a teacher; nothing was written"
            )
    return arrays


def _half(values: np.ndarray) -> np.ndarray:
    """float16; what lies beyond its range becomes infinite."""
    with np.errstate(over="ignore"):
        return values.astype(np.float16)
