"""What a finished run has to show: the table of divergences, the loss curve, a few words of the student's own."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_kd.console import read_steps
from megatron_kd.evaluate.run import Evaluation

_COLUMNS = ("kl", "cross_entropy", "perplexity", "top1_agreement")


def format_table(evaluation: Evaluation) -> str:
    """The evaluation as aligned text, one model a row; nats a token."""
    lines = [f"{'model':<16}" + "".join(f"{column:>16}" for column in _COLUMNS)]
    for name, values in evaluation.items():
        lines.append(f"{name:<16}" + "".join(f"{values[column]:>16.4f}" for column in _COLUMNS))
    return "\n".join(lines)


def plot_loss(metrics: Path, picture: Path) -> None:
    """Loss curve of the training steps in `metrics.jsonl`; where a run was resumed, the later record counts.

    Raises:
        ValueError: the file holds no training step.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = read_steps(metrics)
    if not steps:
        raise ValueError(f"{metrics} holds no training step")
    numbers = sorted(steps)
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(numbers, [steps[number]["kd"] for number in numbers], label="distillation loss", color="tab:blue")
    if any(steps[number]["ce"] for number in numbers):
        axes.plot(numbers, [steps[number]["ce"] for number in numbers], label="cross-entropy", color="tab:orange")
    axes.set(xlabel="step", ylabel="nats a token", title="Training loss")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)


def generate(folder: Path, prompt: str, tokens: int) -> str:
    """A greedy continuation of `prompt` by the model in a Hugging Face folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        output = model.generate(
            **inputs,
            max_new_tokens=tokens,
            do_sample=False,
            repetition_penalty=1.3,
            pad_token_id=tokenizer.eos_token_id,
        )
    return tokenizer.decode(output[0], skip_special_tokens=True)
