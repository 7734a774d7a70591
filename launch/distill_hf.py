"""Trains any Hugging Face causal language model on a teacher's cache, without Megatron: the shortest way in.

    python launch/distill_hf.py --config configs/quickstart.yaml [--section.key value …]

The model's own head never runs: its final hidden states and the head's weight go into the fused loss, which projects
them chunk by chunk. One process, on its GPU if there is one; `train.global_batch` samples a step, `train.micro_batch`
at a time. A model whose logits are more than hidden · weightᵀ (soft-capped, scaled, wrapped) is refused by name.

The student's folder, <run_dir>/student_hf, is printed on stdout.
"""

import math
import tempfile
import time
from pathlib import Path

from megatron_kd.config import RunConfig
from megatron_kd.config_io import config_from_command_line


def main(config: RunConfig) -> Path:
    """Trains, saves the student as a Hugging Face folder and returns it."""
    import torch

    from megatron_kd import platform
    from megatron_kd.cache import TeacherCache
    from megatron_kd.console import Console
    from megatron_kd.data.dataset import BatchLoader, Place
    from megatron_kd.data.order import SampleOrder
    from megatron_kd.loss import fused_linear_kl
    from megatron_kd.student.hf_weights import HfWeights, save_hf
    from megatron_kd.teacher.hf import HfEngine
    from megatron_kd.teacher.weights import resolve_model
    from megatron_kd.train.checks import check_cache, checked

    console = Console(metrics=Path(config.run_dir) / "metrics.jsonl")
    console.stage("Distil, without Megatron")
    cache = TeacherCache.open(config.cache_url)
    weights = HfWeights(resolve_model(config.student_init, console), config.student.keep_layers)
    check_cache(cache.manifest, config, weights, config.cache_url)

    device = platform.device()
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[config.train.precision]
    with tempfile.TemporaryDirectory() as folder:
        save_hf(Path(folder) / "student", weights.config, weights, companions=weights.folder)
        engine = HfEngine(Path(folder) / "student", dtype, device)  # refuses what is not hidden · weightᵀ
    model, head = engine.model.train().requires_grad_(True), engine.head

    settings, train = config.optimizer, config.train
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    order = SampleOrder(cache.manifest.samples, cache.manifest.block, config.seed, train.global_batch)
    loader = BatchLoader(
        cache,
        order,
        config.loss,
        Place(),
        micro_batch=train.micro_batch,
        first_step=0,
        device=device,
        packed=False,
    )
    stream = checked(loader, cache.manifest, config.loss, config.cache_url)
    with console.progress("distill", train.steps, "step") as progress:
        for step in range(1, train.steps + 1):
            started = time.perf_counter()
            batches = [next(stream) for _ in range(train.global_batch // train.micro_batch)]
            tokens = sum(batch.loss_mask.sum() for batch in batches)  # the step's loss is a mean over all of them
            sums = {"loss": 0.0, "kd": 0.0, "ce": 0.0, "tail": 0.0, "support": 0.0}
            for batch in batches:
                losses = fused_linear_kl(
                    engine.forward(batch.tokens, batch.segment),
                    head.weight,
                    batch.teacher,
                    objective=config.loss.objective,
                    labels=batch.labels,
                    loss_mask=batch.loss_mask / tokens,
                    bias=head.bias,
                    vocab_size=cache.manifest.vocab_size,
                    chunk_tokens=config.loss.chunk_tokens,
                    backward=config.loss.backward,
                )
                losses.loss.sum().backward()
                sums = {name: value + float(getattr(losses, name).detach().sum()) for name, value in sums.items()}
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config, step)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_grad or math.inf)
            optimizer.step()
            optimizer.zero_grad()
            speed = train.global_batch * cache.manifest.seq_length / (time.perf_counter() - started)
            progress.update(step, {**sums, "gradient_norm": float(norm), "tokens_per_second": speed})
    loader.close()
    folder = Path(config.run_dir) / "student_hf"
    save_hf(folder, model.config, model.state_dict(), companions=weights.folder)
    return folder


def learning_rate(config: RunConfig, step: int) -> float:
    """Linear warm-up, then `optimizer.decay` from lr to min_lr."""
    settings = config.optimizer
    if step <= settings.warmup_steps:
        return settings.lr * step / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(config.train.steps - settings.warmup_steps, 1)
    share = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[settings.decay]
    return settings.min_lr + share * (settings.lr - settings.min_lr)


if __name__ == "__main__":
    config = config_from_command_line(__doc__)  # before the heavy imports: a typo is answered at once

    from megatron_kd.cache import CacheError
    from megatron_kd.entry import job

    with job(CacheError):
        print(main(config))
