"""Evaluation of a run on its held-out samples: the teacher, the student it started from, the student it became.

All three pass the same samples together, so the teacher runs once. Under torchrun the samples are divided among the
ranks. Collectives: the sum of what the ranks have seen.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from megatron_kd import platform
from megatron_kd.config import RunConfig
from megatron_kd.console import Console
from megatron_kd.data.samples import load_samples
from megatron_kd.evaluate.divergence import Divergence, update
from megatron_kd.student.hf_weights import HfWeights, save_hf
from megatron_kd.teacher.hf import HfEngine
from megatron_kd.teacher.weights import resolve_model

Evaluation = dict[str, dict[str, float]]  # by model: kl, cross_entropy, perplexity, top1_agreement


def evaluate_run(config: RunConfig, student: Path | None, rank: int, ranks: int, console: Console) -> Evaluation:
    """Held-out divergences of `teacher`, `student_before` and, if a folder is given, `student_after`.

    Writes them to <run_dir>/evaluation.json as well.

    Raises:
        ValueError: no held-out samples, or a model that cannot be loaded.
    """
    with tempfile.TemporaryDirectory() as scratch:
        weights = HfWeights(resolve_model(config.student_init, console), config.student.keep_layers)
        before = Path(scratch) / "student_before"
        save_hf(before, weights.config, weights, companions=weights.folder)
        folders = {"teacher": resolve_model(config.teacher.model, console), "student_before": before}
        if student is not None:
            folders["student_after"] = student
        results = divergences(folders, config, rank, ranks, console)
    if rank != 0:
        return results
    path = Path(config.run_dir) / "evaluation.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)
    return results


def divergences(folders: Mapping[str, Path], config: RunConfig, rank: int, ranks: int, console: Console) -> Evaluation:
    """Divergence of each model from the first one on the held-out samples.

    Args:
        folders: Hugging Face folders by the name to report them under; the first is the teacher.
        config: says which samples, how many, how many at a time.
        rank, ranks: this process's share of the micro-batches.
        console: shows progress.
    """
    samples = load_samples(config.samples_dir, "held_out")
    count = min(len(samples), config.evaluate.samples or len(samples))
    dtype = platform.compute_dtype(config.teacher.dtype)
    engines = {name: HfEngine(folder, dtype, platform.device()) for name, folder in folders.items()}
    totals = {name: Divergence() for name in folders}
    console.quantity("held-out samples", count, f"{count * samples.tokens.shape[1] - count:,} positions")
    size = config.evaluate.micro_batch
    mine = range(rank * size, count, ranks * size)
    with console.progress("evaluate", len(mine), "micro_batch") as progress:
        for done, start in enumerate(mine, 1):
            rows = slice(start, min(start + size, count))
            tokens = _tensor(samples.tokens[rows])
            segment = _tensor(samples.segment[rows])
            hidden = [engine.hidden_states(tokens[:, :-1], segment).flatten(0, 1) for engine in engines.values()]
            update(
                list(totals.values()),
                hidden,
                [engine.head.weight for engine in engines.values()],
                tokens[:, 1:].flatten(),
                _tensor(samples.loss_mask[rows]).flatten(),
                vocab_size=int(samples.parameters["vocab_size"]),
            )
            progress.update(done, {name: total.kl / max(total.positions, 1) for name, total in totals.items()})
    for total in totals.values():
        total.sum_over_ranks()
    return {name: total.result() for name, total in totals.items()}


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int64)).to(platform.device())
