"""One block of the cache: its samples through the teacher, micro-batch by micro-batch.

Shapes: n samples of the block, b of a micro-batch, S positions, K entries, T temperatures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron_kd.cache import Manifest
from megatron_kd.data.samples import SampleSet
from megatron_kd.teacher.engine import TeacherEngine
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
    group: dist.ProcessGroup | None = None,
) -> Iterator[BlockResult]:
    """Computes block `index`, and says so after each micro-batch.

    Args:
        engine: the teacher.
        samples: its input.
        index: the block.
        manifest: which samples a block holds, entries, temperatures, vocabulary, micro-batch.
        chunk_tokens: positions whose logits exist at a time.
        group: the ranks that hold the other rows of the head.

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
        batch = slice(first, min(first + manifest.micro_batch, rows.stop))
        targets = _targets(engine, samples, batch, manifest, chunk_tokens, group)
        nll = torch.empty(0)
        if targets is not None:
            _require_finite(targets.logz, first, manifest)
            parts.append(Targets(*(part.cpu().unflatten(0, (-1, manifest.seq_length)) for part in targets)))
            nll = -parts[-1].label_logprob[_tensor(samples.loss_mask[batch]) != 0]
        if parts and batch.stop == rows.stop:
            arrays |= {name: array.numpy() for name, array in concatenated(parts)._asdict().items()}
        yield BlockResult(arrays, batch.stop - rows.start, nll.mean().item() if len(nll) else 0.0)


def _targets(
    engine: TeacherEngine,
    samples: SampleSet,
    batch: slice,
    manifest: Manifest,
    chunk_tokens: int,
    group: dist.ProcessGroup | None,
) -> Targets | None:
    tokens = _tensor(samples.tokens[batch])
    hidden = engine.hidden_states(tokens[:, :-1], _tensor(samples.segment[batch]))
    if hidden is None or engine.head is None:
        return None
    hidden, labels = hidden.flatten(0, 1), tokens[:, 1:].flatten().to(hidden.device)
    settings = {
        "vocab_size": manifest.vocab_size,
        "temperatures": manifest.temperatures,
        "chunk_tokens": chunk_tokens,
        "group": group,
    }
    if manifest.entries == "topk":
        return topk_targets(hidden, engine.head, labels, k=manifest.k, **settings)
    numbers = range(batch.start, batch.stop)
    uniform = uniform_numbers(manifest.seed, numbers, manifest.seq_length, manifest.draws)
    return sampled_targets(hidden, engine.head, labels, uniform.flatten(0, 1).to(hidden.device), **settings)


def _tensor(array: NDArray[np.integer]) -> Tensor:
    return torch.from_numpy(np.array(array, dtype=np.int64))


def _require_finite(logz: Tensor, first_sample: int, manifest: Manifest) -> None:
    bad = (~logz.isfinite()).any(dim=1).nonzero()
    if len(bad):
        sample, position = divmod(int(bad[0]), manifest.seq_length)
        raise TeacherError(
            f"the teacher's logits are not finite at sample {first_sample + sample}, position {position} "
            f"(computing in {manifest.teacher_dtype}); try teacher.dtype float32, or check the weights"
        )
