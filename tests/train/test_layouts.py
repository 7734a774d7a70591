"""Every layout computes the gradients of one process: whole steps, through Megatron-Core's schedules and DDP.

One process's gradients are exported under Hugging Face names; each layout's expected ones are loaded from there, just
as its weights are, so that slicing and packing are the conversion's, which tests/student checks against transformers.
Bounds: 1e-5 of each tensor's largest gradient, fp32 sums in another order through four layers; 1e-4 for the second
step, before which Adam moved every weight by ±lr, some in a direction that was rounding.
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
    overlap: bool = False  # reduce gradients, and gather parameters if distributed, beside the computation
    data_parallel: bool = False  # two replicas
    frozen: tuple[str, ...] = ()
    mean_over: str = "tokens"
    implementation: str = "fused"

    @property
    def ranks(self) -> int:
        return self.parallel.tensor * self.parallel.pipeline * (2 if self.data_parallel else 1)

    @property
    def reference(self) -> "Cell":
        """The cell of one process whose numbers it must give: means of means also depend on the micro-batch."""
        micro_batch = self.micro_batch if self.mean_over == "micro_batches" else 1
        return Cell(self.model, micro_batch=micro_batch, frozen=self.frozen, mean_over=self.mean_over)


TIED, UNTIED, EXPERTS = "llama, tied", "llama 3, untied", "gpt-oss"
HEAD = ("output_layer",)
CELLS = [
    Cell(UNTIED, micro_batch=4, recompute=True, backward="in_forward"),
    Cell("qwen2, biases", ParallelConfig(tensor=2), micro_batch=2, backward="in_forward"),
    Cell(UNTIED, ParallelConfig(tensor=2, sequence_parallel=True), micro_batch=2, frozen=HEAD),
    Cell(UNTIED, ParallelConfig(pipeline=2), micro_batch=2, recompute=True),
    Cell(TIED, ParallelConfig(pipeline=2, virtual_pipeline=2), backward="in_forward"),
    Cell(UNTIED, data_parallel=True, distributed="yes", overlap=True, backward="in_forward"),
    Cell(TIED, data_parallel=True, mean_over="micro_batches"),
    Cell(EXPERTS, ParallelConfig(expert=2), data_parallel=True, micro_batch=2, recompute=True),
    Cell(EXPERTS, ParallelConfig(tensor=2, expert=2, sequence_parallel=True), backward="in_forward"),
]
MORE_CELLS = [
    Cell(TIED, micro_batch=2),
    Cell(TIED, ParallelConfig(tensor=2), recompute=True),
    Cell(UNTIED, ParallelConfig(tensor=2), implementation="dense"),
    Cell(TIED, ParallelConfig(tensor=2), micro_batch=2, implementation="forward_chunked"),
    Cell("qwen3, norms", ParallelConfig(pipeline=2), backward="in_forward"),
    Cell(UNTIED, ParallelConfig(pipeline=2), frozen=HEAD, backward="in_forward"),
    Cell("qwen3, norms", ParallelConfig(tensor=2, sequence_parallel=True), backward="in_forward"),
    Cell(UNTIED, data_parallel=True, backward="in_forward"),
    Cell(UNTIED, data_parallel=True, overlap=True),
    Cell(TIED, data_parallel=True, micro_batch=2, distributed="yes"),
    Cell(TIED, ParallelConfig(tensor=2, pipeline=2), micro_batch=2),
    Cell(UNTIED, ParallelConfig(tensor=2), data_parallel=True),
    Cell("qwen2, biases", ParallelConfig(pipeline=2), data_parallel=True, backward="in_forward"),
    Cell(EXPERTS, ParallelConfig(expert=2), data_parallel=True, distributed="yes"),
    Cell(EXPERTS, ParallelConfig(tensor=2, sequence_parallel=True), micro_batch=2),
    Cell(EXPERTS, ParallelConfig(tensor=2, expert=4, sequence_parallel=True), data_parallel=True),
    Cell(EXPERTS, ParallelConfig(tensor=2, expert=2, sequence_parallel=True), data_parallel=True, micro_batch=2),
    Cell(EXPERTS, ParallelConfig(pipeline=2, expert=2), data_parallel=True),
]


def by_ranks():
    """One test for all cells of as many ranks, as starting the ranks takes longer than the cells."""
    for marks, cells in (((), CELLS), (pytest.mark.full, MORE_CELLS)):
        for ranks in sorted({cell.ranks for cell in cells}):
            chosen = [cell for cell in cells if cell.ranks == ranks]
            yield pytest.param(ranks, chosen, marks=marks, id=f"{ranks} ranks, {len(chosen)} cells")


def run_config(folder, cell) -> RunConfig:
    return RunConfig(
        run_dir="unused",
        teacher=TeacherConfig(model=str(folder)),
        data=DataConfig(source="unused", sequence_length=LENGTH),
        student=StudentConfig(recompute=cell.recompute, frozen=cell.frozen),
        loss=LossConfig(
            implementation=cell.implementation,  # type: ignore[arg-type]
            kind="ghost",
            ce_weight=0.3,
            chunk_tokens=5,
            backward=cell.backward,  # type: ignore[arg-type]
        ),
        parallel=cell.parallel,
        optimizer=OptimizerConfig(
            lr=1e-3,
            decay="constant",
            distributed=cell.distributed,  # type: ignore[arg-type]
            overlap_grad_reduce=cell.overlap,
            overlap_param_gather=cell.overlap and cell.distributed == "yes",
        ),
        train=TrainConfig(
            precision="fp32",
            global_batch=SAMPLES,
            micro_batch=cell.micro_batch,
            mean_over=cell.mean_over,  # type: ignore[arg-type]
        ),
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


def two_steps(folder, cell):
    """(config, student, first step's gradients by name, and of both steps the loss sum, tokens, gradient norm)."""
    import itertools

    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    from megatron_kd.student.hf_weights import HfWeights
    from megatron_kd.student.model import initialize_parallel
    from megatron_kd.train.setup import build_student
    from megatron_kd.train.step import batch_shape, run_forward_backward

    parallel_state.destroy_model_parallel()
    config = run_config(folder, cell)
    initialize_parallel(config.parallel, seed=1)
    student = build_student(config, HfWeights(folder), manifest())
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    gradients, figures = [], []
    for _ in range(2):
        for chunk in student.chunks:
            chunk.zero_grad_buffer()
        student.optimizer.zero_grad()
        data = batches(rank, ranks, cell.micro_batch, student.handle.has_head)
        sums = run_forward_backward(
            student.chunks,
            student.handle,
            list(itertools.tee(data, len(student.chunks))),
            micro_batches=SAMPLES // (ranks * cell.micro_batch),
            shape=batch_shape(config),
        )
        gradients = gradients or [
            {n: p.main_grad.clone() for n, p in unwrap_model(chunk).named_parameters() if p.requires_grad}
            for chunk in student.chunks
        ]
        _, norm, _ = student.optimizer.step()
        if parallel_state.get_tensor_model_parallel_rank() > 0:
            sums.zero_()
        torch.distributed.all_reduce(sums)
        figures.append([*sums.tolist(), float(norm)])
    return config, student, gradients, figures


def reference_steps(rank, world_size, folders, cells, file):
    """What one process computes: {cell: (figures, gradients by Hugging Face names, 0 where nothing is trained)}.

    It goes to a file: each tensor handed from process to process would take a file descriptor.
    """
    from megatron.core.utils import unwrap_model

    from megatron_kd import platform
    from megatron_kd.student.architecture import architecture
    from megatron_kd.student.convert import export_to_hf
    from megatron_kd.student.hf_weights import HfWeights

    platform.init_distributed()
    found = {}
    for cell in cells:
        config, student, (gradients,), figures = two_steps(folders[cell.model], cell)
        chunk, hf = unwrap_model(student.chunks[0]), HfWeights(folders[cell.model]).config
        for name, parameter in chunk.named_parameters():
            parameter.data = gradients.get(name, torch.zeros_like(parameter))
        found[cell] = figures, export_to_hf([chunk], hf, architecture(hf, config.parallel))
    torch.save(found, file)


def layouts(rank, world_size, folders, file, cells):
    """{cell: (figures, the reference's, worst difference of a gradient)} of this rank."""
    from megatron_kd import platform
    from megatron_kd.student.hf_weights import HfWeights

    platform.init_distributed()
    references, found = torch.load(file, weights_only=False), {}
    for cell in cells:
        _, _, gradients, figures = two_steps(folders[cell.model], cell)
        hf = HfWeights(folders[cell.model]).config
        wanted_figures, wanted_gradients = references[cell.reference]
        expected, _ = megatron_twin(hf, wanted_gradients, LENGTH, cell.parallel)
        worst = 0.0
        for chunk, mine in zip(expected, gradients):
            for name, wanted in chunk.named_parameters():
                assert (name in mine) != name.startswith(cell.frozen or "\0"), name
                if name in mine:
                    scale = wanted.abs().max().clamp(min=1e-12)
                    worst = max(worst, ((mine[name] - wanted).abs().max() / scale).item())
        # With the distributed optimizer each rank holds only its part of the summed gradient; norm and second step
        # cover it.
        found[cell] = figures, wanted_figures, worst if cell.distributed == "no" else 0.0
    return found


@pytest.mark.parametrize(("ranks", "cells"), list(by_ranks()))
def test_steps_are_the_same_under_every_layout(tmp_path, ranks, cells):
    folders = {cell.model: str(save_random_model(tmp_path / cell.model, FAMILY[cell.model])) for cell in cells}
    references = sorted({cell.reference for cell in cells}, key=str)
    run_ranks(reference_steps, 1, folders, references, tmp_path / "references.pt")
    for found in run_ranks(layouts, ranks, folders, tmp_path / "references.pt", cells):
        for cell, ((first, second), (wanted_first, wanted_second), worst) in found.items():
            assert first == pytest.approx(wanted_first, rel=1e-5), cell
            assert second == pytest.approx(wanted_second, rel=1e-4), cell
            assert worst <= 1e-5, cell
