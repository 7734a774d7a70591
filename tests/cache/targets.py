"""Synthetic teachers for the cache tests; no torch."""

import numpy as np

from megatron_kd.cache import Manifest, RankTable, rank_table


def manifest(**changes) -> Manifest:
    """A small cache; `created` is fixed so that two runs give the same bytes."""
    fields = {
        "teacher": "toy", "teacher_revision": "r0", "teacher_dtype": "float32", "tokenizer_hash": "t0",
        "vocab_size": 500, "dataset": "zipf", "dataset_hash": "d0", "packing": "concatenate",
        "samples": 10, "seq_length": 16, "k": 8, "block": 4, "created": "2025-01-01T00:00:00+00:00",
    }  # fmt: skip
    return Manifest(**(fields | changes))


def targets(m: Manifest, rows: slice | range, seed: int = 0) -> dict[str, np.ndarray]:
    """Targets of some samples, each from its own seed: the same whichever block or process asks."""
    samples = [sample(m, n, seed) for n in range(rows.start, rows.stop)]
    return {name: np.stack([s[name] for s in samples]) for name in samples[0]}


def sample(m: Manifest, n: int, seed: int = 0) -> dict[str, np.ndarray]:
    """One sample of a random teacher whose logits favour low ids; its top K, tail and normalisers in float64."""
    rng = np.random.default_rng((seed, n))
    s, v = m.seq_length, m.vocab_size
    wide = min(v, 1000)  # ids with any probability, spread over the vocabulary
    support = np.sort(rng.choice(v, wide, replace=False)) if v > wide else np.arange(v)
    logits = rng.normal(0, 3, (s, wide)) - np.log1p(np.arange(wide))
    tokens = rng.integers(0, wide, s + 1)
    logz = np.stack([np.log(np.exp(logits / t).sum(-1)) for t in m.temperatures], -1)
    logprobs = logits - logz[:, :1]
    order = np.argsort(-logprobs, axis=-1, kind="stable")
    top, rest = order[:, : m.k], order[:, m.k :]
    with np.errstate(divide="ignore"):
        tail = np.log(np.exp(np.take_along_axis(logprobs, rest, -1)).sum(-1))
    return {
        "tokens": support[tokens].astype(np.int32),
        "ids": support[top].astype(np.int32),
        "logprobs": np.take_along_axis(logprobs, top, -1).astype(np.float32),
        "tail_logprob": tail.astype(np.float32),
        "logz": logz.astype(np.float32),
        "label_logprob": np.take_along_axis(logprobs, tokens[1:, None], -1)[:, 0].astype(np.float32),
        "loss_mask": (rng.random(s) < 0.9).astype(np.uint8),
        "segment": np.sort(rng.integers(0, 3, s)).astype(np.int32),
    }


def table(m: Manifest) -> RankTable | np.ndarray:
    """The table of the first block; of nothing where there is none."""
    if not m.samples:
        return np.arange(m.vocab_size)
    first = targets(m, m.rows(0))
    return rank_table(first["tokens"], first["ids"], m.vocab_size)


def fill(writer, blocks=None, seed: int = 0) -> None:
    """Write the blocks that are missing, or those named."""
    for index in writer.missing_blocks() if blocks is None else blocks:
        writer.write_block(index, targets(writer.manifest, writer.manifest.rows(index), seed))


def files(folder) -> dict[str, bytes]:
    """Every file under a folder, by its relative path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
