"""Every layout computes the gradients of one process: the whole step, through Megatron-Core's schedules and DDP.

One process's gradients are exported under Hugging Face names; each layout's expected ones are loaded from there, just
as its weights are, so that slicing and packing are the conversion's, which tests/student checks against transformers.
Bound: 1e-5 of each tensor's largest gradient, fp32 sums in another order through four layers.
"""

from dataclasses import dataclass, field

import pytest
import torch

from megatron_kd.cache import Manifest
from megatron_kd.config import (
    DataConfig,
    LossConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    StudentConfig,
    TeacherConfig,
    TrainConfig,
)
from tests.distributed import run_ranks
from tests.tiny import FAMILY, SIZES, megatron_twin, save_random_model

SAMPLES, LENGTH, K = 4, 16, 6


@dataclass(frozen=True)
class Cell:
    """A layout, and how its step is cut."""

    model: str
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    micro_batch: int = 1
    recompute: bool = False
    backward: str = "recompute"
    distributed: str = "no"
    data_parallel: bool = False  # two replicas

    @property
    def ranks(self) -> int:
        return self.parallel.tensor * self.parallel.pipeline * (2 if self.data_parallel else 1)


TIED, UNTIED, EXPERTS = "llama, tied", "llama 3, untied", "gpt-oss"
CELLS = [
    Cell(TIED, micro_batch=2),
    Cell(UNTIED, micro_batch=4, recompute=True, backward="in_forward"),
    Cell("qwen2, biases", ParallelConfig(tensor=2), micro_batch=2, backward="in_forward"),
    Cell(TIED, ParallelConfig(tensor=2), recompute=True),
    Cell("qwen3, norms", ParallelConfig(pipeline=2), backward="in_forward"),
    Cell(UNTIED, ParallelConfig(pipeline=2), micro_batch=2, recompute=True),
    Cell(TIED, ParallelConfig(pipeline=2, virtual_pipeline=2), backward="in_forward"),
    Cell(UNTIED, data_parallel=True, backward="in_forward"),
    Cell(TIED, data_parallel=True, micro_batch=2, distributed="yes"),
    Cell(TIED, ParallelConfig(tensor=2, pipeline=2), micro_batch=2),
    Cell(UNTIED, ParallelConfig(tensor=2), data_parallel=True),
    Cell("qwen2, biases", ParallelConfig(pipeline=2), data_parallel=True, backward="in_forward"),
    Cell("qwen3, norms", ParallelConfig(tensor=2, sequence_parallel=True), backward="in_forward"),
    Cell(EXPERTS, ParallelConfig(expert=2), data_parallel=True, recompute=True),
    Cell(EXPERTS, ParallelConfig(tensor=2, expert=2, sequence_parallel=True), micro_batch=2, backward="in_forward"),
]
MORE_CELLS = [
    Cell(EXPERTS, ParallelConfig(expert=2), data_parallel=True, micro_batch=2, distributed="yes"),
    Cell(EXPERTS, ParallelConfig(tensor=2, sequence_parallel=True)),
    Cell(EXPERTS, ParallelConfig(tensor=2, expert=4, sequence_parallel=True), data_parallel=True),
    Cell(EXPERTS, ParallelConfig(tensor=2, expert=2, sequence_parallel=True), data_parallel=True, micro_batch=2),
    Cell(EXPERTS, ParallelConfig(pipeline=2, expert=2), data_parallel=True),
]


def by_ranks(cells):
    return [[cell for cell in cells if cell.ranks == ranks] for ranks in sorted({cell.ranks for cell in cells})]


def run_config(folder, cell) -> RunConfig:
    return RunConfig(
        run_dir="unused",
        teacher=TeacherConfig(model=str(folder)),
        data=DataConfig(source="unused", sequence_length=LENGTH),
        student=StudentConfig(recompute=cell.recompute),
        loss=LossConfig(kind="ghost", ce_weight=0.3, chunk_tokens=5, backward=cell.backward),  # type: ignore[arg-type]
        parallel=cell.parallel,
        optimizer=OptimizerConfig(lr=1e-3, decay="constant", distributed=cell.distributed),  # type: ignore[arg-type]
        train=TrainConfig(precision="fp32", global_batch=SAMPLES, micro_batch=cell.micro_batch),
    )


def manifest() -> Manifest:
    text = dict.fromkeys(
        ("teacher", "teacher_revision", "teacher_dtype", "tokenizer_hash", "dataset", "dataset_hash", "packing"), ""
    )
    return Manifest(**text, vocab_size=SIZES["vocab_size"], samples=SAMPLES, seq_length=LENGTH, k=K)


def batches(rank, ranks, micro_batch, head):
    """This data-parallel rank's micro-batches; masks differ from sample to sample, and documents are packed."""
    from megatron_kd.data.attention import document_attention
    from megatron_kd.data.dataset import Batch
    from megatron_kd.loss import TeacherTopK

    g = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, SIZES["vocab_size"], (SAMPLES, LENGTH + 1), generator=g)
    logprobs, ids = (torch.randn(SAMPLES, LENGTH, SIZES["vocab_size"], generator=g) * 2).log_softmax(-1).topk(K)
    mask = (torch.rand(SAMPLES, LENGTH, generator=g) > torch.tensor([0.1, 0.3, 0.5, 0.8])[:, None]).float()
    segment = (torch.arange(LENGTH) >= torch.tensor([[3], [8], [12], [16]])).long()
    for first in range(rank * micro_batch, SAMPLES, ranks * micro_batch):
        rows = slice(first, first + micro_batch)
        yield Batch(
            samples=tuple(range(first, first + micro_batch)),
            tokens=tokens[rows, :-1],
            labels=tokens[rows, 1:],
            position_ids=torch.arange(LENGTH).expand(micro_batch, -1),
            segment=segment[rows],
            loss_mask=mask[rows],
            teacher=TeacherTopK(ids[rows], logprobs[rows]) if head else None,
            label_logprob=None,
            attention=document_attention(segment[rows], packed=False),
        )


def one_step(folder, cell):
    """(config, student, gradients, loss sum and tokens over all ranks, gradient norm) of one step of a cell."""
    import itertools

    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    from megatron_kd.student.hf_weights import HfWeights
    from megatron_kd.student.model import initialize_parallel
    from megatron_kd.train.setup import build_student
    from megatron_kd.train.step import run_forward_backward

    parallel_state.destroy_model_parallel()
    config = run_config(folder, cell)
    initialize_parallel(config.parallel, seed=1)
    student = build_student(config, HfWeights(folder), manifest())
    for chunk in student.chunks:
        chunk.zero_grad_buffer()
    student.optimizer.zero_grad()
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    data = batches(rank, ranks, cell.micro_batch, student.handle.has_head)
    sums = run_forward_backward(
        student.chunks,
        student.handle,
        list(itertools.tee(data, len(student.chunks))),
        micro_batches=SAMPLES // (ranks * cell.micro_batch),
        shape=(cell.micro_batch, LENGTH),
    )
    gradients = [
        {n: p.main_grad.clone() for n, p in unwrap_model(chunk).named_parameters()} for chunk in student.chunks
    ]
    _, norm, _ = student.optimizer.step()
    if parallel_state.get_tensor_model_parallel_rank() > 0:
        sums.zero_()
    torch.distributed.all_reduce(sums)
    return config, student, gradients, sums.tolist(), float(norm)


def reference_step(rank, world_size, folder, model):
    """What one process computes: sums, norm, and gradients by Hugging Face names."""
    from megatron.core.utils import unwrap_model

    from megatron_kd import platform
    from megatron_kd.student.architecture import architecture
    from megatron_kd.student.convert import export_to_hf
    from megatron_kd.student.hf_weights import HfWeights

    platform.init_distributed()
    config, student, (gradients,), sums, norm = one_step(folder, Cell(model))
    chunk, hf = unwrap_model(student.chunks[0]), HfWeights(folder).config
    for name, parameter in chunk.named_parameters():
        parameter.data = gradients[name]
    return sums, norm, export_to_hf([chunk], hf, architecture(hf, config.parallel))


def layouts(rank, world_size, folders, references, cells):
    """{cell: (sums, norm, worst difference of a gradient)} of this rank."""
    from megatron_kd import platform
    from megatron_kd.student.hf_weights import HfWeights

    platform.init_distributed()
    found = {}
    for cell in cells:
        _, _, gradients, sums, norm = one_step(folders[cell.model], cell)
        hf = HfWeights(folders[cell.model]).config
        expected, _ = megatron_twin(hf, references[cell.model][2], LENGTH, cell.parallel)
        worst = 0.0
        for chunk, mine in zip(expected, gradients):
            for name, wanted in chunk.named_parameters():
                scale = wanted.abs().max().clamp(min=1e-12)
                worst = max(worst, ((mine[name] - wanted).abs().max() / scale).item())
        # With the distributed optimizer each rank holds only its part of the summed gradient; the norm covers it.
        found[cell] = sums, norm, worst if cell.distributed == "no" else 0.0
    return found


@pytest.mark.parametrize(
    "cells", [*by_ranks(CELLS), *(pytest.param(cells, marks=pytest.mark.full) for cells in by_ranks(MORE_CELLS))]
)
def test_a_step_is_the_same_under_every_layout(tmp_path, cells):
    folders = {cell.model: str(save_random_model(tmp_path / cell.model, FAMILY[cell.model])) for cell in cells}
    references = {model: run_ranks(reference_step, 1, folder, model)[0] for model, folder in folders.items()}
    for found in run_ranks(layouts, cells[0].ranks, folders, references, cells):
        for cell, (sums, norm, worst) in found.items():
            wanted_sums, wanted_norm, _ = references[cell.model]
            assert sums == pytest.approx(wanted_sums, rel=1e-5), cell
            assert norm == pytest.approx(wanted_norm, rel=1e-5), cell
            assert worst <= 1e-5, cell
