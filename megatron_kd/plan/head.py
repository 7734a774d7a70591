"""What the output layer and the loss cost on a rank of the last stage, by implementation.

N positions, n those of this rank under sequence parallelism, D hidden, V padded vocabulary, Vp columns of this rank,
C positions of a chunk, K entries, e bytes of a parameter, kd rows of fp32. Peak bytes beyond states and hidden states:

    fused            e·n·D + e·C·Vp + 144·C·K (+ 4·Vp·D in_forward) (+ 2·e·C·D under sequence parallelism)
    online           e·n·D + 2·e·C·Vp + e·C·(D + D') + 12 MiB        (+ 2·e·C·(D + D') under sequence parallelism)
    forward_chunked  2·e·N·Vp + 14·C·Vp                              (19 for ghost) + e·N·D gathered
    dense            20·N·V                                          (21 for ghost) + e·N·D gathered
    online_dense     20·N·V + e·N·D gathered

The bytes a logit of the baselines are those of the operations in baselines.py: of dense, log q and target, 4 each, and
three temporaries of torch's kl_div; of forward_chunked, logits and their gradient, and the fp32 work of one chunk.
Traffic is what operations other than GEMMs read and write, each input and output once; tests count both.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_kd.config import LossConfig
from megatron_kd.loss import choose_chunk_tokens
from megatron_kd.plan.layout import Layout
from megatron_kd.plan.shape import ModelShape

_ENTRY_BYTES = 144  # fp64 and int64 work of one entry of the chunk in hand
_ROW_BYTES = 96  # statistics and results of a position
_ONLINE_SCRATCH = 12 << 20  # three blocks of rows in fp32


class HeadCost(NamedTuple):
    """Of one micro-batch on one rank."""

    bytes: float  # at the peak, beyond states and the hidden states that enter
    traffic: float  # bytes of memory read and written outside GEMMs
    projections: int  # GEMMs of 2·N·Vp·D
    teacher_projections: int  # the same with the teacher's hidden size
    gathered: float  # bytes received from the other tensor-parallel ranks


def chunk_tokens(loss: LossConfig, shape: ModelShape, layout: Layout, element: int) -> int:
    """C: as set, else as the loss chooses."""
    columns = shape.padded_vocab(layout.tensor) // layout.tensor
    return min(layout.positions, loss.chunk_tokens or choose_chunk_tokens(layout.positions, columns, element))


def head_cost(
    loss: LossConfig, shape: ModelShape, layout: Layout, entries: int, element: int, teacher_hidden: int = 0
) -> HeadCost:
    """The costs of `loss.implementation`. `entries`: K; `element`: e; `teacher_hidden`: D', of a resident teacher."""
    t, positions, h = layout.tensor, layout.positions, shape.hidden
    whole = shape.padded_vocab(t)
    columns = whole // t
    chunk = chunk_tokens(loss, shape, layout, element)
    ghost = loss.kind == "ghost"
    logits, rows = positions * columns, element * positions * h
    arriving = rows * (t - 1) / t if layout.sequence_parallel else 0.0  # hidden rows or their gradient, once
    chunked = element * layout.local_positions * h + _ROW_BYTES * positions
    if layout.sequence_parallel:
        chunked += 2 * element * chunk * h
    if loss.implementation == "fused":
        at_once = loss.backward == "in_forward"
        peak = chunked + element * chunk * columns + _ENTRY_BYTES * chunk * entries + 4 * columns * h * at_once
        passes = 2 if at_once else 3
        return HeadCost(peak, 3 * element * logits, 3 if at_once else 4, 0, passes * arriving)
    if loss.implementation == "online":
        copies = element * chunk * (h + teacher_hidden * (3 if layout.sequence_parallel else 1))
        return HeadCost(
            chunked + copies + 2 * element * chunk * columns + _ONLINE_SCRATCH, 220 * logits, 4, 2, 5 * arriving
        )
    if loss.implementation == "forward_chunked":
        work = (19 if ghost else 14) * chunk * columns
        return HeadCost(2 * element * logits + work + rows, (205 if ghost else 104) * logits, 3, 0, 2 * arriving)
    # Both dense ones work on the whole vocabulary on every rank.
    online = loss.implementation == "online_dense"
    peak = (21 if ghost and not online else 20) * positions * whole + rows
    traffic = (98 if online else 154 if ghost else 88) * positions * whole
    gathered = (2 if online else 1) * element * positions * whole * (t - 1) / t
    return HeadCost(peak, traffic, 3, int(online), gathered + (3 if online else 2) * arriving)
