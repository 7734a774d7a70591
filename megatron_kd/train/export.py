"""A checkpoint of a run → a Hugging Face folder.

One process holds the whole student, whatever layout trained it: `dist_checkpointing` reshards on loading. The head is
cut back to the true rows; tokenizer and generation settings come from the folder the student started from.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from megatron_kd import platform
from megatron_kd.config import ParallelConfig, RunConfig
from megatron_kd.student.architecture import architecture, transformer_config
from megatron_kd.student.checkpoint import latest_checkpoint, load_checkpoint
from megatron_kd.student.convert import export_to_hf
from megatron_kd.student.hf_weights import HfWeights, save_hf
from megatron_kd.student.model import build_model, initialize_parallel
from megatron_kd.teacher.weights import resolve_model


def export_checkpoint(config: RunConfig, output: Path) -> Path:
    """Writes the newest checkpoint of a run as a Hugging Face folder; returns the checkpoint.

    Raises:
        ValueError: the run has no checkpoint.
    """
    found = latest_checkpoint(config.checkpoint_dir)
    if found is None:
        raise ValueError(f"{config.checkpoint_dir} holds no checkpoint: train first, with launch/distill.py")
    weights = HfWeights(resolve_model(config.student_init), config.student.keep_layers)
    whole = replace(config, parallel=ParallelConfig())
    platform.init_distributed()
    initialize_parallel(whole.parallel, whole.seed)
    # Checkpoints hold rows padded for the layout that trained them.
    arch = replace(
        architecture(weights.config, whole.parallel),
        padded_vocab_size=architecture(weights.config, config.parallel).padded_vocab_size,
    )
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[config.train.precision]
    model_config = transformer_config(weights.config, whole.parallel, dtype=dtype)
    chunks = build_model(model_config, arch, config.data.sequence_length)
    load_checkpoint(found[1], chunks)
    weights.config.dtype = dtype
    save_hf(output, weights.config, export_to_hf(chunks, weights.config, arch), companions=weights.folder)
    return found[1]
