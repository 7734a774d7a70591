"""One block of the cache: its samples through the teacher, micro-batch by micro-batch.

Ranks that hold different experts of a teacher each compute a share of a micro-batch, and give one another the targets.
Collectives: the teacher's, and an all-gather of the targets among such ranks.

Shapes: n samples of the block, b of a micro-batch, S positions, K entries, T temperatures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_kd.cache import Manifest
from megatron_kd.data.samples import SampleSet
from megatron_kd.teacher.engine import Replica, TeacherEngine
from megatron_kd.teacher.sampling import sampled_targets, uniform_numbers
from megatron_kd.teacher.targets import Targets, concatenated
from megatron_kd.teacher.topk import topk_targets

Arrays = dict[str, NDArray[np.generic]]


class TeacherError(RuntimeError):
    """The teacher gives numbers that cannot be targets; the message says where."""


@dataclass
class BlockResult:
    """A block under way: `arrays` are whole when `done` equals the number of its samples."""

    arrays: Arrays  # as `CacheWriter.write_block` takes them; without targets on ranks without the head
    done: int  # samples computed
    nll: float  # mean −log p(label) of the last micro-batch's learnt positions, where known


def compute_block(
    engine: TeacherEngine,
    samples: SampleSet,
    index: int,
    manifest: Manifest,
    chunk_tokens: int,
    replica: Replica,
) -> Iterator[BlockResult]:
    """Computes block `index`, and says so after each micro-batch.

    Args:
        engine: the teacher.
        samples: its input.
        index: the block.
        manifest: which samples a block holds, entries, temperatures, vocabulary, micro-batch.
        chunk_tokens: positions whose logits exist at a time.
        replica: this rank's part in the teacher.

    Raises:
        TeacherError: logits that are not finite; names sample and position.
    """
    rows = manifest.rows(index)
    arrays: Arrays = {
        "tokens": samples.tokens[rows],
        "loss_mask": samples.loss_mask[rows],
        "segment": samples.segment[rows],
    }
    parts: list[Targets] = []
    for first in range(rows.start, rows.stop, manifest.micro_batch):
        batch = range(first, min(first + manifest.micro_batch, rows.stop))
        targets = _targets(engine, samples, batch, manifest, chunk_tokens, replica)
        nll = torch.empty(0)
        if targets is not None:
            _require_finite(targets.logz, first, manifest.teacher_dtype)
            parts.append(Targets(*(part.cpu() for part in targets)))
            nll = -parts[-1].label_logprob[_tensor(samples.loss_mask[batch.start : batch.stop]) != 0]
        if parts and batch.stop == rows.stop:
            arrays |= {name: array.numpy() for name, array in concatenated(parts)._asdict().items()}
        yield BlockResult(arrays, batch.stop - rows.start, nll.mean().item() if len(nll) else 0.0)


def _targets(
    engine: TeacherEngine,
    samples: SampleSet,
    batch: range,
    manifest: Manifest,
    chunk_tokens: int,
    replica: Replica,
) -> Targets | None:
    """[b, S, …] of a micro-batch; None on ranks without the head."""
    rows = replica.share.rows(batch)
    tokens = _tensor(samples.tokens[rows])
    hidden = engine.hidden_states(tokens[:, :-1], _tensor(samples.segment[rows]))
    if hidden is None or engine.head is None:
        return None
    hidden, labels = hidden.flatten(0, 1), tokens[:, 1:].flatten().to(hidden.device)
    settings = {
        "vocab_size": manifest.vocab_size,
        "temperatures": manifest.temperatures,
        "chunk_tokens": chunk_tokens,
        "group": replica.group,
    }
    if manifest.entries == "topk":
        targets = topk_targets(hidden, engine.head, labels, k=manifest.k, **settings)
    else:
        uniform = uniform_numbers(manifest.seed, rows, manifest.seq_length, manifest.draws).flatten(0, 1)
        targets = sampled_targets(hidden, engine.head, labels, uniform.to(hidden.device), **settings)
    by_sample = (part.unflatten(0, (len(rows), -1)) for part in targets)
    return Targets(*(replica.share.together(part, len(batch)) for part in by_sample))


def _tensor(array: NDArray[np.integer]) -> Tensor:
    return torch.from_numpy(np.array(array, dtype=np.int64))


def _require_finite(logz: Tensor, first_sample: int, dtype: str) -> None:
    bad = (~logz.isfinite()).any(dim=2).nonzero()
    if len(bad):
        sample, position = bad[0].tolist()
        raise TeacherError(
            f"the teacher's logits are not finite at sample {first_sample + sample}, position {position} "
            f"(computing in {dtype}); try teacher.dtype float32, or check the weights"
        )
