"""One optimizer step: Megatron-Core's schedule over micro-batches whose targets go to the plugin.

The loss function returns Megatron's triple (sum of the per-token loss, number of tokens, what to log). The model is
configured with `calculate_per_token_loss`, so `finalize_model_grads` divides gradients by the tokens of the *global*
batch: the step's loss is a mean over tokens. Without it (`train.mean_over: micro_batches`) each micro-batch's sum is
divided by its own tokens, and a token counts for more the fewer its micro-batch has. The sum is a plain `.sum()`, masks
and weights are inside the loss, so its gradient is one scalar for all positions, which is what lets the fused loss skip
a projection in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from torch import Tensor
from torch.nn import Module

from megatron_kd import platform
from megatron_kd.config import RunConfig
from megatron_kd.data.dataset import Batch
from megatron_kd.plugin import KDHandle


def forward_step(handle: KDHandle, batches: Iterator[Batch], model: Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Megatron's forward step: hands the targets to the plugin and runs the model."""
    batch = next(batches)
    if batch.teacher is not None:  # otherwise the output layer is on another pipeline stage
        handle.set_targets(model, batch.teacher, labels=batch.labels, loss_mask=batch.loss_mask)
    extra: dict[str, Any] = {} if batch.attention.packed is None else {"packed_seq_params": batch.attention.packed}
    if get_model_config(model).mtp_num_layers:  # the heads' own loss is formed inside the model
        extra["loss_mask"] = batch.loss_mask
    output = model(batch.tokens, batch.position_ids, batch.attention.mask, labels=batch.labels, **extra)
    return output, partial(token_sum, batch.loss_mask)


def token_sum(loss_mask: Tensor, loss: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Megatron's loss function over per-token losses [b, S] in which the mask is already accounted for."""
    total = loss.sum()
    tokens = (loss_mask != 0).sum().to(torch.int)
    return total, tokens, {"loss": torch.stack([total.detach(), tokens.to(total.dtype)])}


def batch_shape(config: RunConfig) -> tuple[int, int]:
    """(micro-batch, sequence length) of what passes between pipeline stages: packed documents are one long sample."""
    micro_batch, length = config.train.micro_batch, config.data.sequence_length
    return (1, micro_batch * length) if platform.has_transformer_engine() else (micro_batch, length)


def run_forward_backward(
    chunks: list[Module],
    handle: KDHandle,
    batches: list[Iterator[Batch]],
    *,
    micro_batches: int,
    shape: tuple[int, int],
    forward_only: bool = False,
) -> Tensor:
    """Forward and backward of one step on this rank.

    Args:
        chunks: wrapped model chunks.
        handle: the plugin's.
        batches: one iterator of micro-batches per chunk.
        micro_batches: micro-batches of this rank in the step.
        shape: `batch_shape`.
        forward_only: leave out the backward.

    Returns:
        float64 [2]: sum of the loss and number of tokens; zeros where the last stage is elsewhere.
    """
    several = len(chunks) > 1
    logged = get_forward_backward_func()(
        forward_step_func=partial(forward_step, handle),
        data_iterator=batches if several else batches[0],
        model=chunks if several else chunks[0],
        num_microbatches=micro_batches,
        micro_batch_size=shape[0],
        seq_length=shape[1],
        forward_only=forward_only,
    )
    zero = torch.zeros(2, dtype=torch.float64, device=next(chunks[0].parameters()).device)
    return sum((record["loss"].double() for record in logged), start=zero)
