"""Seconds of a step, term by term.

Work of one micro-batch on a rank of a stage, each over what the hardware does of it per second:

    compute   3·(forward FLOPs of its layers)/t, 4· with recompute; head.py's projections; a resident teacher's forward
    memory    5·A a layer (each activation written and read forward; read, its gradient written and read backward),
              7·A with recompute; head.py's traffic
    tensor    a layer's gathers and scatters of e·N·h: 10 under sequence parallelism, else 8 (4 more with recompute),
              half of them with experts; keys and values of the context-parallel ranks; what the head gathers
    expert    4 exchanges of e·n·a·h (6 with recompute), of which (x − 1)/x leave the rank
    pipeline  e·n·h each way

One forward and one backward at a time on each stage (1F1B), of m micro-batches and v chunks a stage, take

    (m − 1)·slowest + Σ_stages/v

Then the gradients of the step are reduced, the optimizer reads and writes its state, parameters are gathered. Nothing
overlaps. FLOP/s, memory and links all run at calibration.py's one efficiency: the share of its data sheet that a GPU
sustains.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from megatron_kd.plan.calibration import EFFICIENCY
from megatron_kd.plan.head import HeadCost
from megatron_kd.plan.memory import layer_activations, stage_memory
from megatron_kd.plan.planned import PlannedRun
from megatron_kd.plan.shape import rank_parameters, token_flops


@dataclass(frozen=True)
class StageTime:
    """Seconds of one micro-batch, forward and backward."""

    compute: float
    memory: float
    tensor: float
    expert: float
    pipeline: float

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step."""

    stages: tuple[StageTime, ...]
    micro_batches: int
    bubble: float  # of the pipeline
    data: float  # reduction of gradients, gather of parameters
    optimizer: float

    @property
    def slowest(self) -> StageTime:
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def total(self) -> float:
        return self.micro_batches * self.slowest.total + self.bubble + self.data + self.optimizer


def model_flops_per_token(run: PlannedRun) -> float:
    """Forward and backward of the student, as TFLOP/s are reported: without recomputation, without a teacher."""
    flops = token_flops(run.shape, run.layout.sequence)
    return 3 * (sum(flops.layers) + flops.head)


def step_time(run: PlannedRun) -> StepTime:
    """The step of a run."""
    layout = run.layout
    stages = tuple(_stage_time(run, stage) for stage in range(layout.pipeline))
    slowest = max(stage.total for stage in stages)
    bubble = sum(stage.total for stage in stages) / layout.virtual - slowest if layout.pipeline > 1 else 0.0
    ends = [_once_a_step(run, stage) for stage in range(layout.pipeline)]
    data, optimizer = max(ends, key=sum)
    return StepTime(stages, layout.micro_batches, max(bubble, 0.0), data, optimizer)


def _stage_time(run: PlannedRun, stage: int) -> StageTime:
    layout, shape, hardware, e = run.layout, run.shape, run.hardware, run.element
    layers, last = shape.layers // layout.pipeline, stage == layout.pipeline - 1
    t, h = layout.tensor, shape.hidden
    here = slice(stage * layers, (stage + 1) * layers)
    work = layout.positions / t * (4 if run.recompute else 3) * sum(token_flops(shape, layout.sequence).layers[here])
    traffic = (7 if run.recompute else 5) * layers * layer_activations(shape, run)

    moves = (10 if layout.sequence_parallel else 8) + 4 * run.recompute
    tensor = moves / (2 if shape.experts else 1) * layers * e * layout.positions * h * (t - 1) / t
    ring = (4 if run.recompute else 3) * layers * e * layout.positions * 2 * shape.key_value / t * (layout.context - 1)
    exchanges = 6 if run.recompute else 4
    expert = exchanges * layers * e * layout.local_positions * shape.active * h * (1 - 1 / layout.expert)
    border = 2 * layout.virtual * e * layout.local_positions * h if layout.pipeline > 1 else 0.0

    if last:
        cost = run.head_cost()
        tensor, traffic = tensor + cost.gathered, traffic + cost.traffic
        work += _projection_flops(run, cost)
    if run.online:
        teacher = run.needed_teacher
        own = teacher.layers // layout.pipeline
        flops = token_flops(teacher, layout.sequence).layers[stage * own : (stage + 1) * own]
        work += layout.positions / t * sum(flops)
        traffic += 2 * own * layer_activations(teacher, run)
    rate = EFFICIENCY * 1e9
    return StageTime(
        compute=work / (1000 * rate * hardware.tflops),
        memory=traffic / (rate * hardware.memory_gb_s),
        tensor=tensor / (rate * _bandwidth(run, t)) + ring / (rate * _bandwidth(run, t * layout.context)),
        expert=expert / (rate * _bandwidth(run, layout.expert)) if shape.experts else 0.0,
        pipeline=border / (rate * _bandwidth(run, layout.world // layout.pipeline + 1)),
    )


def _projection_flops(run: PlannedRun, cost: HeadCost) -> float:
    columns = run.shape.padded_vocab(run.layout.tensor) / run.layout.tensor
    width = cost.projections * run.shape.hidden
    if cost.teacher_projections:
        width += cost.teacher_projections * run.needed_teacher.hidden
    return 2 * run.layout.positions * columns * width


def _once_a_step(run: PlannedRun, stage: int) -> tuple[float, float]:
    """Seconds of the reduction over replicas, and of the optimizer."""
    layout, e = run.layout, run.element
    shared, experts = rank_parameters(
        run.shape,
        run.shape.layers // layout.pipeline,
        tensor=layout.tensor,
        expert=layout.expert,
        first=stage == 0,
        last=stage == layout.pipeline - 1,
    )
    # Gradients scatter in fp32 and parameters gather; or gradients are scattered and gathered.
    moved = 4 + (e if run.distributed_optimizer else 4)
    leaving = shared * (1 - 1 / (layout.data * layout.context)) + experts * (1 - 1 / layout.expert_data)
    rate = EFFICIENCY * 1e9
    data = moved * leaving / (rate * _bandwidth(run, layout.world // layout.pipeline))
    # The state is read and written, gradients are read for their norm, read again, and zeroed.
    state = stage_memory(run, stage).optimizer
    traffic = 2 * state + (4 + 4 + 4 + e) * (shared + experts)
    return data, traffic / (rate * run.hardware.memory_gb_s)


def _bandwidth(run: PlannedRun, ranks: int) -> float:
    """GB/s between neighbouring ranks, of which so many talk to each other."""
    return run.hardware.link_gb_s if run.layout.within_node(ranks) else run.hardware.network_gb_s


def tflops_per_gpu(run: PlannedRun, seconds: float) -> float:
    """The student's FLOPs alone, over a step's seconds."""
    return model_flops_per_token(run) * run.layout.tokens_per_step / seconds / run.layout.world / 1e12
