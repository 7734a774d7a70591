"""How the ranks of a run share its work, and the refusal of what does not divide.

Megatron-Core numbers ranks tensor first, then context, expert, data, and pipeline last: the t tensor-parallel ranks
of a group are neighbours, and a pipeline stage is a run of world/p ranks. Expert-parallel ranks are taken from the
tensor- and data-parallel ones of a stage, an expert is whole on its rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_kd.config import RunConfig
from megatron_kd.plan.shape import ModelShape


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel groups, and a rank's share of the batch."""

    world: int
    tensor: int
    context: int
    pipeline: int
    virtual: int  # model chunks a stage
    expert: int
    sequence_parallel: bool
    sequence: int  # S
    micro_batch: int  # samples
    global_batch: int  # samples
    gpus_per_node: int

    @property
    def data(self) -> int:
        """Replicas of the model."""
        return self.world // (self.tensor * self.context * self.pipeline)

    @property
    def expert_data(self) -> int:
        """Replicas of an expert."""
        return self.world // (self.expert * self.pipeline)

    @property
    def micro_batches(self) -> int:
        """Of one replica in a step."""
        return self.global_batch // (self.micro_batch * self.data)

    @property
    def positions(self) -> int:
        """N: positions of a micro-batch on a context-parallel rank."""
        return self.micro_batch * self.sequence // self.context

    @property
    def local_positions(self) -> int:
        """n: those a rank holds between the tensor-parallel regions, N/t under sequence parallelism."""
        return self.positions // (self.tensor if self.sequence_parallel else 1)

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.sequence

    def within_node(self, ranks: int) -> bool:
        """Whether that many neighbouring ranks share a node."""
        return ranks <= self.gpus_per_node

    def in_flight(self, stage: int) -> float:
        """Micro-batches whose activations a stage holds at most, in units of its whole share of the layers."""
        if self.virtual == 1:
            return min(self.micro_batches, self.pipeline - stage)
        warm_up = 2 * (self.pipeline - stage - 1) + (self.virtual - 1) * self.pipeline + 1
        return min(self.micro_batches * self.virtual, warm_up) / self.virtual


def make_layout(config: RunConfig, shape: ModelShape) -> Layout:
    """The layout of a run on its hardware.

    Raises:
        ValueError: a number that does not divide, named with what it should divide by.
    """
    parallel, hardware, train = config.parallel, config.hardware, config.train
    layout = Layout(
        world=hardware.nodes * hardware.gpus_per_node,
        tensor=parallel.tensor,
        context=parallel.context,
        pipeline=parallel.pipeline,
        virtual=parallel.virtual_pipeline or 1,
        expert=parallel.expert,
        sequence_parallel=parallel.sequence_parallel and parallel.tensor > 1,
        sequence=config.data.sequence_length,
        micro_batch=train.micro_batch,
        global_batch=train.global_batch,
        gpus_per_node=hardware.gpus_per_node,
    )
    t, c, p, x = parallel.tensor, parallel.context, parallel.pipeline, parallel.expert
    _divides("num_attention_heads", shape.heads, "parallel.tensor", t)
    _divides("num_key_value_heads", shape.key_value_heads, "parallel.tensor", t)
    if shape.experts:
        _divides("experts", shape.experts, "parallel.expert", x)
        if t > 1 and not layout.sequence_parallel:
            raise ValueError(
                "parallel.sequence_parallel is false: Megatron-Core's experts need it with parallel.tensor > 1"
            )
    else:
        _divides("intermediate_size", shape.width, "parallel.tensor", t)
        if x > 1:
            raise ValueError(f"parallel.expert is {x}, but the model has no experts")
    _divides("num_hidden_layers", shape.layers, "parallel.pipeline · virtual_pipeline", p * layout.virtual)
    _divides("data.sequence_length", layout.sequence, "2 · parallel.context", 2 * c if c > 1 else 1)
    if layout.sequence_parallel:
        _divides("data.sequence_length", layout.sequence, "parallel.context · tensor", c * t)
    _divides("hardware.nodes · gpus_per_node", layout.world, "parallel.tensor · context · pipeline", t * c * p)
    _divides("hardware.nodes · gpus_per_node", layout.world, "parallel.expert · pipeline", x * p)
    _divides("train.global_batch", layout.global_batch, "micro_batch · replicas", layout.micro_batch * layout.data)
    if layout.virtual > 1:
        _divides("micro-batches of a replica", layout.micro_batches, "parallel.pipeline", p)
    return layout


def _divides(what: str, number: int, by: str, divisor: int) -> None:
    if number % divisor:
        raise ValueError(f"{what} = {number} does not divide by {by} = {divisor}")
