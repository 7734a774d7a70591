"""Bytes on a rank of each pipeline stage, term by term.

Letters: N positions of a micro-batch, n those of a rank between the tensor-parallel regions (N/t under sequence
parallelism), h, q, k, f as in shape.py, t tensor-parallel ranks, a experts a token goes to, e bytes of a parameter,
P parameters of the rank, d ranks that share its optimizer state.

    parameters    e·P
    gradients     4·P                            fp32 main gradients
    optimizer     12·P/d (fp32: 8·P/d)           master weights and two moments; d = 1 without the distributed optimizer
    teacher       e·P of the teacher             resident, for the online losses
    targets       N·(8·K + 48)                   ids and log-probabilities, tokens, labels, mask
    activations   micro-batches in flight · layers · (recompute: e·n·h, else A) (+ 2·e·n·h before the head)
    head, layer   the larger of the loss's peak (head.py) and one layer at work, A

    A = e·(4·n·h + N·(2·q + 2·k)/t + 3·N·f/t)                         experts: 3·N·f/t → n·a·(h + 3·f), and 8·n·E

A counts what Transformer Engine's layers keep: both inputs and outputs of the norms, q, k, v, attention's output, and
around the MLP the output of its first linear and the input of its second; attention keeps no scores.
Nothing is assumed about buffers of libraries: calibration.py's overhead is added for them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from megatron_kd.plan.calibration import OVERHEAD_BYTES
from megatron_kd.plan.planned import PlannedRun
from megatron_kd.plan.shape import ModelShape, rank_parameters


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one rank; `head` and `layer` are not alive together."""

    parameters: float
    gradients: float
    optimizer: float
    teacher: float
    targets: float
    activations: float
    head: float
    layer: float
    overhead: float = OVERHEAD_BYTES

    @property
    def peak(self) -> float:
        """The most that is alive at once."""
        every = sum(getattr(self, field.name) for field in fields(self))
        return every - min(self.head, self.layer)


def layer_activations(shape: ModelShape, run: PlannedRun) -> float:
    """A: what one layer keeps for backward of one micro-batch where it is not recomputed."""
    layout, e = run.layout, run.element
    n, positions, t = layout.local_positions, layout.positions, layout.tensor
    kept = e * (4 * n * shape.hidden + positions * (2 * shape.query + 2 * shape.key_value) / t)
    if shape.experts:
        return kept + e * n * shape.active * (shape.hidden + 3 * shape.width) + 8 * n * shape.experts
    return kept + e * 3 * positions * shape.width / t


def stage_memory(run: PlannedRun, stage: int) -> StageMemory:
    """A rank of pipeline stage `stage`."""
    layout, shape, e = run.layout, run.shape, run.element
    first, last = stage == 0, stage == layout.pipeline - 1

    def own(model: ModelShape) -> tuple[float, float]:
        return rank_parameters(
            model, model.layers // layout.pipeline, tensor=layout.tensor, expert=layout.expert, first=first, last=last
        )

    shared, experts = own(shape)
    replicas = (layout.data * layout.context, layout.expert_data) if run.distributed_optimizer else (1, 1)
    state = 12 if e == 2 else 8
    layer = layer_activations(shape, run)
    border = e * layout.local_positions * shape.hidden
    in_flight = layout.in_flight(stage) * shape.layers / layout.pipeline * (border if run.recompute else layer)
    return StageMemory(
        parameters=e * (shared + experts),
        gradients=4 * (shared + experts),
        optimizer=state * (shared / replicas[0] + experts / replicas[1]),
        teacher=e * sum(own(run.needed_teacher)) if run.online else 0,
        targets=layout.positions * ((0 if run.online else 8 * run.entries) + 48) if last else 0,
        activations=in_flight + 2 * border * last,
        head=run.head_cost().bytes if last else 0,
        layer=layer,
    )
