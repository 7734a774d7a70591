"""A run as the planner sees it: its configuration, resolved to models, layout and hardware."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_kd.config import HardwareConfig, Implementation, LossConfig, RunConfig
from megatron_kd.plan.head import HeadCost, head_cost
from megatron_kd.plan.layout import Layout, make_layout
from megatron_kd.plan.shape import ModelShape, model_shape, student_config, teacher_config


@dataclass(frozen=True)
class PlannedRun:
    """Everything the formulas take."""

    config: RunConfig
    shape: ModelShape  # the student
    teacher: ModelShape | None  # None: its configuration is not at hand
    layout: Layout

    @property
    def hardware(self) -> HardwareConfig:
        return self.config.hardware

    @property
    def loss(self) -> LossConfig:
        return self.config.loss

    @property
    def recompute(self) -> bool:
        return self.config.student.recompute

    @property
    def element(self) -> int:
        """e: bytes of a parameter or activation."""
        return {"bf16": 2, "fp32": 4}[self.config.train.precision]

    @property
    def entries(self) -> int:
        """K that the loss sees."""
        cache = self.config.cache
        return self.loss.k or (cache.k if cache.entries == "topk" else cache.draws)

    @property
    def distributed_optimizer(self) -> bool:
        """`auto` counts as yes: where there are GPUs there is Transformer Engine."""
        return self.config.optimizer.distributed != "no"

    @property
    def online(self) -> bool:
        """Whether the teacher is resident."""
        return self.loss.implementation in ("online", "online_dense")

    def head_cost(self) -> HeadCost:
        """Of a rank of the last stage."""
        teacher_hidden = self.needed_teacher.hidden if self.online else 0
        return head_cost(self.loss, self.shape, self.layout, self.entries, self.element, teacher_hidden)

    @property
    def needed_teacher(self) -> ModelShape:
        """The teacher; raises ValueError where it is not known."""
        if self.teacher is None:
            raise ValueError("the teacher's sizes are needed: set teacher.config to its config.json")
        return self.teacher

    def with_loss(self, implementation: Implementation) -> PlannedRun:
        """The same run with another implementation of the loss."""
        loss = replace(self.loss, implementation=implementation)
        return replace(self, config=replace(self.config, loss=loss))


def plan_run(config: RunConfig) -> PlannedRun:
    """Resolves a configuration.

    Raises:
        ValueError: no such model, a model that cannot be built, a layout that does not divide.
    """
    shape = model_shape(student_config(config))
    layout = make_layout(config, shape)
    try:
        teacher = model_shape(teacher_config(config))
    except ValueError:
        teacher = None
    return PlannedRun(config, shape, teacher, layout)
