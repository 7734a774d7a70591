"""Twenty steps of a small student through the whole job, so that a GPU's path is executed wherever there is a GPU.

    python tools/train_check.py OUT

A random teacher over a small tokenizer is written into OUT, cached by launch/cache_teacher.py, and distilled into half
of its layers by launch/distill.py: on GPUs in bf16, with Transformer Engine's layers where it is installed, tensor
parallelism over as many GPUs as divide its heads; without one in fp32 with a tiny model, to check the script. Exits
with 1 unless all steps were trained and the loss fell; prints the medians of the last ten.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import torch
import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the tests' tiny models

STEPS = 20


def main() -> None:
    """Writes the run, trains, reports."""
    out = Path(sys.argv[1]).absolute()
    gpus = torch.cuda.device_count()
    ranks = next(n for n in (8, 4, 2, 1) if n <= max(gpus, 1))
    config = _write_run(out, ranks, gpu=gpus > 0)
    _run("launch/cache_teacher.py", config, 1)
    _run("launch/distill.py", config, ranks)
    records = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["stage"] == "distill"]
    first, last = steps[0]["loss"], steps[-1]["loss"]
    names = ("step_seconds", "tokens_per_second", "tflops_per_gpu", "memory_gib")
    medians = {name: statistics.median(step[name] for step in steps[-10:]) for name in names}
    print(f"TP {ranks}: {len(steps)} steps, loss {first:.4f} -> {last:.4f}; " +
          ", ".join(f"{name} {value:.4g}" for name, value in medians.items()))  # fmt: skip
    if len(steps) != STEPS or not last < first:
        sys.exit(1)


def _write_run(out: Path, ranks: int, *, gpu: bool) -> Path:
    from tests.data.texts import write_jsonl
    from tests.teacher.models import save_llama

    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 16,
             "num_key_value_heads": 8, "max_position_embeddings": 2048, "initializer_range": 0.02}  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    config = {
        "run_dir": str(out / "run"),
        "teacher": {"model": str(save_llama(out / "teacher", **(sizes if gpu else {})))},
        "data": {"source": str(write_jsonl(out / "text.jsonl", 400)), "sequence_length": 1024 if gpu else 64,
                 "max_samples": 16},
        "cache": {"k": 64, "block": 8},
        "student": {"keep_layers": [0, 2] if gpu else [0]},
        "optimizer": {"lr": 1.0e-3, "distributed": "yes" if gpu else "no"},
        "parallel": {"tensor": ranks, "sequence_parallel": ranks > 1},
        "train": {"steps": STEPS, "global_batch": 8, "micro_batch": 2, "precision": "bf16" if gpu else "fp32"},
    }  # fmt: skip
    (out / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return out / "run.yaml"


def _run(script: str, config: Path, ranks: int) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    subprocess.run([*launcher, script, "--config", str(config)], cwd=ROOT, check=True, stdout=sys.stderr)


if __name__ == "__main__":
    main()
