"""Row arithmetic of the distillation objectives: a loss, and the coefficients of its gradient.

One row is one position. z are its logits, τ the temperature, q = softmax(z/τ), q₁ = softmax(z). The teacher gives
probabilities p_k on the entries S of the row and a mass T outside them; the student's mass there is T_q.
Every objective is one formula applied to a *target* (probabilities π on S, a mass T on the tail taken as one event):

    KD = Σ_S π·(log π − log q) + T·(log T − log T_q)              m = Σ_S π + T
    ∂KD/∂(z_v/τ) = m·q_v − T·q_v/T_q    off the support           (q_v/T_q: the student's softmax within its tail)
                 = m·q_v − π_v          on the support

    truncated:     π = p,             T = 0
    renormalized:  π = p/Σ_S p,       T = 0
    ghost:         π = p,             T = the teacher's tail mass

Cross-entropy adds q₁_v everywhere and −1 at the label, which is one more entry of the row when it lies outside S.
T·q_v/T_q is formed from the tail's own log-normaliser, so nothing is divided by T_q and nothing is computed as
1 − (something near 1). Everything here is fp64 on [C] and [C, K]: it costs nothing next to the [C, V] work.

Shapes: C rows of a chunk, K teacher entries, E = K, or K + 1 with labels.
Collectives: none (the caller combines ranks).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Kind = Literal["ghost", "truncated", "renormalized"]


class TeacherTopK(NamedTuple):
    """The teacher's K entries of every position.

    Attributes:
        ids: [N, K] integer (or [s, b, K]); vocabulary ids, unique in a row; −1 marks an absent entry.
        logprobs: the same shape, floating; natural log of the teacher's own probability at the objective's
            temperature, not renormalised; ignored where ids < 0; −inf is probability 0.
        tail_logprob: [N]; log of the teacher's mass outside the entries. None: 1 − their sum, which from
            half-precision log-probabilities is mostly noise when the tail is small.
    """

    ids: Tensor
    logprobs: Tensor
    tail_logprob: Tensor | None = None


def without_entries(positions: int, device: torch.device) -> TeacherTopK:
    """K = 0, where the teacher's distribution comes from elsewhere."""
    return TeacherTopK(*(torch.empty(positions, 0, dtype=kind, device=device) for kind in (torch.int32, torch.float32)))


class TeacherHead(NamedTuple):
    """A resident teacher, whose whole distribution is softmax((hidden·weightᵀ + bias)/τ)."""

    hidden: Tensor  # [N, Dt] or [s, b, Dt]: what enters its output layer; sliced as the student's is
    weight: Tensor  # [Vp, Dt]; this rank's shard, of the same padded vocabulary as the student's
    bias: Tensor | None = None  # [Vp]


@dataclass(frozen=True)
class KDObjective:
    """What is minimised: kd_weight·KD + ce_weight·CE per position."""

    kind: Kind = "ghost"  # ghost: K + 1 events, a KL. truncated: the paper's, biased. renormalized: p/Σp
    temperature: float = 1.0  # τ; the teacher's log-probabilities must be its own at this τ
    scale_by_temperature_squared: bool = True  # multiplies KD and its gradient by τ²
    kd_weight: float = 1.0
    ce_weight: float = 0.0  # needs labels

    def __post_init__(self) -> None:
        """Refuse what no run can mean."""
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind is {self.kind!r}; known kinds are {', '.join(get_args(Kind))}")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(f"temperature is {self.temperature}; it must be a finite number above 0")
        for name in ("kd_weight", "ce_weight"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)}; it must be finite")

    @property
    def kd_scale(self) -> float:
        """Factor of the reported KD: τ² or 1."""
        return self.temperature**2 if self.scale_by_temperature_squared else 1.0

    @property
    def kd_factor(self) -> float:
        """Factor of ∂KD/∂(z/τ) in ∂L/∂z: the chain rule's 1/τ, and τ² where asked."""
        return self.kd_weight * self.kd_scale / self.temperature

    def total(self, kd: Tensor, ce: Tensor | None) -> Tensor:
        """The loss from its parts, `kd` with its scale in it; no cross-entropy without labels."""
        loss = self.kd_weight * kd
        return loss if ce is None else loss + self.ce_weight * ce


class KDLoss(NamedTuple):
    """The loss of every position; all fields have the leading shape of the full sequence and are 0 where masked.

    Every field carries the position's loss_mask weight, so that loss = kd_weight·kd + ce_weight·ce and a mean over a
    batch is field.sum() / loss_mask.sum().

    Attributes:
        loss: fp32 (fp64 for fp64 inputs); carries the gradient.
        kd: detached; τ² included when the objective scales by it.
        ce: detached; None without labels.
        tail: detached; the teacher's mass outside its entries.
        support: detached; the student's mass on the teacher's entries, at the objective's temperature.
    """

    loss: Tensor
    kd: Tensor
    ce: Tensor | None
    tail: Tensor
    support: Tensor


class Target(NamedTuple):
    """What an objective makes of the teacher's rows (fp64)."""

    log_probs: Tensor  # [C, K]; log π; −inf where absent
    tail: Tensor  # [C]; T, the mass put on the tail as one event
    teacher_tail: Tensor  # [C]; the teacher's tail mass, whatever the objective does with it


class Partition(NamedTuple):
    """The student's normalisers of each row over the whole vocabulary (fp64, [C] or [N])."""

    shift: Tensor  # the largest tail logit; 0 where the tail has no column
    log_z: Tensor  # log Σ_v exp(z_v/τ)
    log_tail: Tensor  # its part off the support; −inf where the tail has no column
    log_plain: Tensor  # log Σ_v exp(z_v), the cross-entropy's; equal to log_z at τ = 1


class Entries(NamedTuple):
    """The columns of a row that are treated one by one: the support, then the label where it is not on it."""

    columns: Tensor  # [C, E] this rank's column numbers; −1 where absent or on another rank
    is_label: Tensor | None  # [C, E] bool; None without labels


def make_target(kind: Kind, teacher: TeacherTopK, dead: Tensor | None) -> Target:
    """Target of a chunk's rows; rows where `dead` is true get an empty one, whatever they hold."""
    absent = teacher.ids < 0
    if dead is not None:
        absent = absent | dead[:, None]
    log_probs = teacher.logprobs.double().masked_fill(absent, -math.inf)
    log_mass = log_probs.logsumexp(1)
    if teacher.tail_logprob is None:
        tail = torch.expm1(log_mass).neg_().clamp_(min=0)
    else:
        tail = teacher.tail_logprob.double().exp()
    if dead is not None:
        tail = tail.masked_fill(dead, 0)
    if kind == "renormalized":  # an empty row stays empty
        log_probs = log_probs - log_mass.masked_fill(log_mass == -math.inf, 0)[:, None]
    return Target(log_probs, tail if kind == "ghost" else torch.zeros_like(tail), tail)


def support_divergence(target: Target, z: Tensor, entries: Entries, log_z: Tensor, temperature: float) -> Tensor:
    """[C]: Σ π·(log π − log q) over the support entries that this rank holds.

    It is summed entry by entry once log Z is known: Σπ·log π − Σπ·z + M·log Z would cancel at large logits.
    """
    k = target.log_probs.shape[1]
    held = (entries.columns[:, :k] >= 0) & (target.log_probs > -math.inf)
    log_q = z[:, :k] / temperature - log_z[:, None]
    return (target.log_probs.exp() * (target.log_probs - log_q)).masked_fill_(~held, 0).sum(1)


def tail_divergence(target: Target, part: Partition) -> Tensor:
    """[C]: T·(log T − log T_q); 0 where the student has no column off the support, as there is no tail to match."""
    tail = _bucket(target, part)
    log_student = (part.log_tail - part.log_z).masked_fill(tail == 0, 0)
    return torch.xlogy(tail, tail) - tail * log_student


def dense_coefficients(objective: KDObjective, target: Target, part: Partition) -> tuple[Tensor, Tensor | None]:
    """Coefficients [C] of the columns off the support.

    Returns (a, b) such that ∂L/∂z_v = a·exp((z_v − shift)/τ) + b·exp(z_v − shift); b is None where one
    partition serves both. With the largest tail logit as the shift no exponential overflows and a and b are at
    most of the order of the largest gradient, also where the student's tail has almost no mass.
    """
    tau, kd = objective.temperature, objective.kd_factor
    mass = target.log_probs.exp().sum(1) + _bucket(target, part)
    within_tail = torch.exp(part.shift / tau - part.log_tail.masked_fill(part.log_tail == -math.inf, 0))
    dense = kd * (mass * torch.exp(part.shift / tau - part.log_z) - _bucket(target, part) * within_tail)
    plain = objective.ce_weight * torch.exp(part.shift - part.log_plain)
    no_tail = part.log_tail == -math.inf
    dense, plain = dense.masked_fill_(no_tail, 0), plain.masked_fill_(no_tail, 0)
    if objective.ce_weight == 0:
        return dense, None
    return (dense + plain, None) if tau == 1 else (dense, plain)


def entry_gradients(objective: KDObjective, target: Target, part: Partition, z: Tensor, entries: Entries) -> Tensor:
    """[C, E]: ∂L/∂z at the entries this rank holds (0 elsewhere), from their own logits, to be rounded once."""
    tau, kd = objective.temperature, objective.kd_factor
    tail = _bucket(target, part)
    probs = target.log_probs.exp()
    mass = probs.sum(1) + tail
    wanted = probs
    if z.shape[1] > probs.shape[1]:  # the label off the support follows the tail's formula
        within_tail = torch.exp(z[:, -1] / tau - part.log_tail).masked_fill_(tail == 0, 0)
        wanted = torch.cat([probs, (tail * within_tail)[:, None]], dim=1)
    gradient = kd * (mass[:, None] * torch.exp(z / tau - part.log_z[:, None]) - wanted)
    if objective.ce_weight != 0 and entries.is_label is not None:
        gradient += objective.ce_weight * (torch.exp(z - part.log_plain[:, None]) - entries.is_label.double())
    return gradient.masked_fill_(entries.columns < 0, 0)


def _bucket(target: Target, part: Partition) -> Tensor:
    """The tail mass the objective asks for, where the student has a tail at all."""
    return target.tail.masked_fill(part.log_tail == -math.inf, 0)
