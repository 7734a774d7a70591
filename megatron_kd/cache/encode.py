"""From the teacher's numbers to the stored ones.

    entries      sorted by falling log-prob, ties by lowest id, absent ones last
    topk_rank    the ids as ranks (ranks.py)
    topk_logprob_step
                 m_k = bits of float16(−logprob_k), which grow with k because the entries fall;
                 step = m_0, m_1 − m_0, m_2 − m_1, …: small numbers, so they compress

Both are stored as planes of bytes, the lowest first: the high bytes are few and skewed, the low ones are noise, and
each plane is compressed for itself. decode.py goes the other way.

Shapes: n samples, S positions, K entries, T temperatures.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import xxhash

from megatron_kd.cache.codecs import preset
from megatron_kd.cache.ranks import RankCoder
from megatron_kd.cache.schema import ArraySpec, Manifest, block_arrays

# What a writer passes for one block, in the teacher's own terms.
TARGET_NAMES = ("tokens", "ids", "logprobs", "tail_logprob", "logz", "label_logprob", "loss_mask", "segment")
# A teacher's float32 softmax sums to 1 within far less; float16 rounding is not in it yet.
_MASS_SLACK = 1e-2
_LOGPROB_SLACK = 1e-3
# The label's log-prob may come from another reduction than the entries'; a shifted or foreign row is off by nats.
_LABEL_SLACK = 1e-2


def encode_block(
    manifest: Manifest, coder: RankCoder, index: int, targets: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The stored arrays of block `index`, checked: what cannot be a teacher's output raises `ValueError`.

    Args:
        targets: TARGET_NAMES → array. tokens [n, S+1]; ids [n, S, K], −1 = absent; logprobs [n, S, K], natural log of
            the teacher's own probability at temperature 1; tail_logprob, label_logprob, loss_mask, segment [n, S];
            logz [n, S, T].
    """
    rows = manifest.rows(index)
    arrays = _take(manifest, index, rows.stop - rows.start, targets)
    ids, magnitude = sort_entries(arrays["ids"], arrays["logprobs"], preset(manifest.codecs).mantissa_bits)
    step = np.diff(magnitude, axis=-1, prepend=np.uint16(0))
    stored = {
        "tokens": arrays["tokens"],
        "topk_rank": coder.encode(arrays["tokens"][:, :-1], ids),
        "topk_logprob_step": np.stack([step & 0xFF, step >> 8], axis=1),
        "tail_logprob": _half(np.minimum(arrays["tail_logprob"], 0)),
        "logz": arrays["logz"],
        "label_logprob": arrays["label_logprob"],
        "loss_mask": arrays["loss_mask"],
        "segment": arrays["segment"],
    }
    return {spec.name: np.ascontiguousarray(stored[spec.name], spec.dtype) for spec in block_arrays(manifest)}


def sort_entries(ids: np.ndarray, logprobs: np.ndarray, mantissa_bits: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """Entries by falling float16 log-prob, ties by lowest id, absent ones last.

    Args:
        ids: [..., K], −1 = absent.
        logprobs: [..., K], at most 0.
        mantissa_bits: how many of float16's ten bits to keep, rounding to nearest.

    Returns:
        ids int32, and the bits of float16(−logprob) as uint16, both in the shape given.
    """
    present = ids >= 0
    magnitude = _half(np.where(present, -np.minimum(logprobs, 0), np.inf)).view(np.uint16) & 0x7FFF
    dropped = 10 - mantissa_bits
    if dropped:
        magnitude = (magnitude + np.uint16(1 << (dropped - 1))) >> dropped << dropped
    # One integer sorts by both: magnitude above, id below. An absent id becomes the largest 32-bit number.
    key = (magnitude.astype(np.int64) << 32) | ids.astype(np.uint32)
    key.sort(axis=-1)
    return (key & 0xFFFFFFFF).astype(np.uint32).view(np.int32), (key >> 32).astype(np.uint16)


def merge_draws(draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sampled entries from independent draws: each id once, weighted by how often it was drawn.

    The weights sum to 1, and their mean over draws is the teacher's probability: entries of `entries="sampled"`.

    Args:
        draws: ids [..., D] drawn from the teacher's distribution, at temperature 1.

    Returns:
        ids int32 [..., D], −1 where a draw repeated another; log(count/D) float32 [..., D], −inf there. Pass them to
        `write_block` with tail_logprob −inf.
    """
    ordered = np.sort(draws, axis=-1)
    number = ordered.shape[-1]
    first = np.concatenate([np.ones_like(ordered[..., :1], bool), ordered[..., 1:] != ordered[..., :-1]], axis=-1)
    # An id's count is the distance to the next first occurrence, or to the end.
    place = np.where(first, np.arange(number), number)
    following = np.minimum.accumulate(place[..., ::-1], axis=-1)[..., ::-1]
    next_first = np.concatenate([following[..., 1:], np.full_like(following[..., :1], number)], axis=-1)
    count = np.where(first, next_first - np.arange(number), 0)
    with np.errstate(divide="ignore"):
        return np.where(first, ordered, -1).astype(np.int32), np.log(count / number).astype(np.float32)


def commit_word(index: int, stored: Mapping[str, np.ndarray], specs: tuple[ArraySpec, ...]) -> int:
    """xxh64 over the decoded bytes of a block's arrays in the order of `block_arrays`, seeded with the block's number.

    Never 0, which means "not there". The seed makes a block that was copied to another place a wrong one.
    """
    digest = xxhash.xxh64(seed=index)
    for spec in specs:
        digest.update(np.ascontiguousarray(stored[spec.name], spec.dtype).data)
    return digest.intdigest() or 1


def label_agrees(tokens: np.ndarray, ids: np.ndarray, logprobs: np.ndarray, label_logprob: np.ndarray) -> np.ndarray:
    """Per position: what is stored for the label fits the entries. A shifted or foreign row fails at most positions.

    A label among the entries has its entry's log-prob; one that is not is no more probable than the last of them.

    Args:
        tokens: [n, S+1]; position t's label is tokens[:, t + 1].
        ids: [n, S, K], −1 = absent.
        logprobs: [n, S, K], not yet rounded; −inf where absent.
        label_logprob: [n, S].
    """
    is_label = ids == tokens[:, 1:, None]
    entry = np.where(is_label, logprobs, -np.inf).max(axis=-1)
    last = np.where(ids < 0, np.inf, logprobs).min(axis=-1)
    with np.errstate(invalid="ignore"):  # both may be −inf
        equal = (np.abs(entry - label_logprob) <= _LABEL_SLACK) | (entry == label_logprob)
    return np.where(is_label.any(axis=-1), equal, label_logprob <= last + _LABEL_SLACK)


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
        ("tokens", f"lie in [0, {v})"): (arrays["tokens"] >= 0) & (arrays["tokens"] < v),
        ("ids", f"lie in [-1, {v})"): (ids >= -1) & (ids < v),
        ("ids", "are unique in a row"): (by_id[..., 1:] != by_id[..., :-1]) | (by_id[..., 1:] < 0),
        ("logprobs", "are at most 0"): logprobs <= _LOGPROB_SLACK,  # false for NaN, too
        ("logprobs", "are those of probabilities with a sum of at most 1"): mass <= 1 + _MASS_SLACK,
        ("tail_logprob", "is at most 0"): arrays["tail_logprob"] <= _LOGPROB_SLACK,
        ("logz", "is finite"): np.isfinite(arrays["logz"]),
        ("label_logprob", "is at most 0"): arrays["label_logprob"] <= _LOGPROB_SLACK,
        ("loss_mask", "is 0 or 1"): (arrays["loss_mask"] == 0) | (arrays["loss_mask"] == 1),
        ("segment", "is at least 0"): arrays["segment"] >= 0,
    }
    if manifest.entries == "topk":
        fits = label_agrees(arrays["tokens"], ids, logprobs, arrays["label_logprob"])
        rules["label_logprob", "is that of the label's entry, or below all entries"] = fits
    for (name, rule), holds in rules.items():
        if not holds.all():
            place = tuple(int(i) for i in np.argwhere(~holds)[0])
            raise ValueError(
                f"block {index}: {name} {rule}, but not at {place} (sample in block, position, …), where it is "
                f"{arrays[name][place]}: these are not the targets of a teacher; nothing was written"
            )
    return arrays


def _half(values: np.ndarray) -> np.ndarray:
    """float16; what lies beyond its range becomes infinite."""
    with np.errstate(over="ignore"):
        return values.astype(np.float16)
