"""What a run is: one YAML file, mapped one to one onto these dataclasses.

Both distributed jobs and every `megatron-kd` command read the same file; `config_io.py` loads it.
The comment beside a field is its documentation: `--help` prints it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

if TYPE_CHECKING:
    from megatron_kd.loss import KDObjective

_T = TypeVar("_T")

_Fraction = Annotated[float, Field(ge=0, lt=1)]

# fused: the logits exist one chunk at a time. forward_chunked, dense: the baselines, on whole logits. online: a teacher
# in memory and no cache, fused likewise; online_dense: the same on whole logits.
Implementation = Literal["fused", "forward_chunked", "dense", "online", "online_dense"]


def _section(cls: type[_T]) -> type[_T]:
    """A frozen, keyword-only dataclass that rejects unknown keys when it is loaded."""
    cls.__pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[attr-defined]
    return dataclass(kw_only=True, frozen=True)(cls)


@_section
class TeacherConfig:
    model: str  # Hugging Face folder or name, a .gguf file, or package:NAME for weights inside an installed package
    config: str = ""  # its config.json, for planning where `model` is not at hand; empty: that of `model`
    engine: Literal["hf", "megatron"] = "hf"  # hf: transformers, a replica a rank; megatron: split over ranks
    tensor: PositiveInt = 1  # engine megatron: tensor-parallel ranks of a replica
    pipeline: PositiveInt = 1  # engine megatron: pipeline stages of a replica
    expert: PositiveInt = 1  # engine megatron: ranks that share out the experts, tensor-parallel ones among them
    checkpoint: str = ""  # engine megatron: weights from this Megatron checkpoint; empty: those of `model`
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # auto: bfloat16 where the device computes in it
    micro_batch: PositiveInt = 4  # samples in one forward; never crosses a block, so it is part of the cache's identity
    chunk_tokens: PositiveInt = 512  # positions whose logits exist at a time


@_section
class DataConfig:
    source: str  # text file, .jsonl, .parquet, folder, data set, Megatron .bin; python-docs; samples-dir: prepared ones
    field: str = "text"  # the field that holds the text, or a conversation: a list of {role, content}
    sequence_length: PositiveInt = 512  # positions in a packed sample
    document_multiple: PositiveInt = 1  # documents are filled up to a multiple of it: 2 · parallel.context, if > 1
    held_out: _Fraction = 0.1  # fraction of the documents, from the end, never trained on
    samples_dir: str = ""  # where the packed samples lie; empty: <run_dir>/samples
    max_samples: PositiveInt | None = None  # train on at most so many samples, spread evenly over the text; null: all


@_section
class CacheConfig:
    url: str = ""  # a path or any fsspec URL; empty: <run_dir>/teacher.zarr
    split: Literal["train", "held_out"] = "train"  # which samples the teacher reads
    entries: Literal["topk", "sampled"] = "topk"  # the most probable ones, or draws from the teacher (merged)
    k: PositiveInt = 100  # teacher entries a position, for topk
    draws: PositiveInt = 12  # draws a position, for sampled; the loss needs kind renormalized
    block: PositiveInt = 64  # samples written, committed and resumed as one
    temperatures: tuple[PositiveFloat, ...] = (1.0,)  # softmax temperatures the cache can serve; 1 comes first
    encoding: str = "lossless"  # lossless, or a preset that trades fidelity for bytes (docs/cache-format.md)
    ignore_disk_space: bool = False  # start though the disk looks too small for the finished cache


@_section
class StudentConfig:
    init: str = ""  # Hugging Face folder to start from; empty: the teacher
    config: str = ""  # its config.json, for planning where `init` is not at hand; empty: that of `init`
    keep_layers: tuple[int, ...] | None = None  # layers of `init` to keep, in this order; null: all
    recompute: bool = False  # recompute activations in backward
    frozen: tuple[str, ...] = ()  # parameters whose Megatron names begin so are not trained: output_layer, embedding, …


@_section
class LossConfig:
    implementation: Implementation = "fused"  # what forms the loss; the online ones want a resident teacher, no cache
    kind: Literal["ghost", "truncated", "renormalized"] = "ghost"  # what happens to the teacher's mass off the entries
    k: PositiveInt | None = None  # use only the k most probable entries of the cache; null: all it holds
    temperature: PositiveFloat = 1.0  # softens teacher and student; the cache must store it
    scale_by_temperature_squared: bool = True  # keeps the gradient's size independent of the temperature
    kd_weight: float = 1.0  # weight of the distillation term
    ce_weight: float = 0.0  # weight of cross-entropy on the text itself
    chunk_tokens: PositiveInt | None = None  # positions whose logits exist at a time; null: by a workspace budget
    backward: Literal["recompute", "in_forward"] = "recompute"  # in_forward: three head GEMMs instead of four

    @property
    def objective(self) -> KDObjective:
        """What the loss minimises."""
        from megatron_kd.loss import KDObjective  # torch is not needed to read a configuration

        return KDObjective(
            kind=self.kind,
            temperature=self.temperature,
            scale_by_temperature_squared=self.scale_by_temperature_squared,
            kd_weight=self.kd_weight,
            ce_weight=self.ce_weight,
        )


@_section
class ParallelConfig:
    tensor: PositiveInt = 1  # tensor-parallel ranks
    pipeline: PositiveInt = 1  # pipeline stages
    context: PositiveInt = 1  # context-parallel ranks
    expert: PositiveInt = 1  # ranks that share out the experts; taken from the tensor- and data-parallel ones
    virtual_pipeline: PositiveInt | None = None  # model chunks a pipeline stage; null: no interleaving
    sequence_parallel: bool = False  # shard activations between the tensor-parallel ranks over the sequence


@_section
class OptimizerConfig:
    lr: NonNegativeFloat = 2.0e-5  # peak learning rate
    min_lr: NonNegativeFloat = 0.0  # learning rate at the last step
    warmup_steps: NonNegativeInt = 0  # linear warm-up
    decay: Literal["cosine", "linear", "constant"] = "cosine"  # from lr to min_lr over the run
    weight_decay: NonNegativeFloat = 0.1  # decoupled, as AdamW's; none on biases and norms
    beta1: _Fraction = 0.9  # Adam's memory of the gradient
    beta2: _Fraction = 0.999  # Adam's memory of its square
    eps: PositiveFloat = 1.0e-8  # Adam's floor of the denominator
    clip_grad: NonNegativeFloat = 1.0  # largest gradient norm; 0: no clipping
    distributed: Literal["auto", "yes", "no"] = "auto"  # auto: where Transformer Engine or apex is installed
    overlap_grad_reduce: bool = False  # sum gradients over replicas while the backward still runs
    overlap_param_gather: bool = False  # gather updated parameters while the forward runs; distributed optimizer only


@_section
class TrainConfig:
    steps: PositiveInt = 100  # optimizer steps of the whole run
    global_batch: PositiveInt = 32  # samples a step, over all ranks
    micro_batch: PositiveInt = 1  # samples in one forward of one rank
    precision: Literal["bf16", "fp32"] = "bf16"  # parameters and activations; gradients are summed in fp32 in both
    mean_over: Literal["tokens", "micro_batches"] = "tokens"  # micro_batches: mean of their means, whatever their masks
    log_interval: PositiveInt = 1  # steps between two records of metrics
    evaluate_interval: NonNegativeInt = 0  # steps between two evaluations on evaluate_cache; 0: none
    evaluate_cache: str = ""  # a cache of held-out samples (made with cache.split held_out and a url of its own)
    checkpoint_interval: NonNegativeInt = 0  # steps between two checkpoints; 0: only at the end
    checkpoint_async: bool = False  # write checkpoints in the background while training goes on
    checkpoints_kept: NonNegativeInt = 0  # newest checkpoints that stay, a later one deletes older ones; 0: all
    checkpoint_dir: str = ""  # where checkpoints lie; empty: <run_dir>/checkpoints
    stop_after: PositiveInt | None = None  # leave after this step with a checkpoint, as a scheduler's time limit would


@_section
class EvaluateConfig:
    samples: PositiveInt | None = None  # held-out samples to evaluate on; null: all
    micro_batch: PositiveInt = 4  # samples in one forward


@_section
class PreflightConfig:
    gpu_memory_gib: NonNegativeFloat | None = None  # free on every GPU; null: the peak of `megatron-kd plan`
    disk_gib: NonNegativeFloat | None = None  # free for checkpoints; null: what those to come take
    cache_blocks: PositiveInt | None = 4  # blocks of the cache each node decodes; null: all, divided among them
    clock_skew: NonNegativeFloat = 5.0  # seconds that the nodes' clocks may be apart
    bandwidth: NonNegativeFloat = 0.0  # GB/s that an all-reduce between the nodes must reach; 0: only shown


@_section
class HardwareConfig:
    device: str = "H200"  # what the figures below belong to; configs/hardware has them for others, with sources
    nodes: PositiveInt = 1  # machines
    gpus_per_node: PositiveInt = 8  # GPUs of one
    memory_gib: PositiveFloat = 139.8  # of a GPU, as its driver reports it
    tflops: PositiveFloat = 989.0  # dense bf16 peak of a GPU
    memory_gb_s: PositiveFloat = 4800.0  # bandwidth of a GPU's memory
    link_gb_s: PositiveFloat = 450.0  # between GPUs of a node, each way
    network_gb_s: PositiveFloat = 50.0  # between nodes, of one GPU, each way


@_section
class RunConfig:
    run_dir: str  # everything the run writes, unless a field below says otherwise
    seed: int = 1234  # order of the samples
    teacher: TeacherConfig
    data: DataConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    student: StudentConfig = field(default_factory=StudentConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    preflight: PreflightConfig = field(default_factory=PreflightConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)

    @property
    def samples_dir(self) -> Path:
        return Path(self.data.samples_dir or Path(self.run_dir) / "samples")

    @property
    def cache_url(self) -> str:
        return self.cache.url or str(Path(self.run_dir) / "teacher.zarr")

    @property
    def checkpoint_dir(self) -> Path:
        return Path(self.train.checkpoint_dir or Path(self.run_dir) / "checkpoints")

    @property
    def student_init(self) -> str:
        return self.student.init or self.teacher.model
