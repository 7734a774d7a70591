"""The `hf` engine: any transformers causal language model whose logits are its final hidden states times its head.

Each rank holds a replica: on its GPU, or, where there are more GPUs on the machine than ranks, split layer by layer
over its share of them. Packed documents are told apart by positions that restart: given no mask and no key-value cache,
transformers derives from them the block-diagonal mask of every kind of layer, sliding windows included.

What a model really does is checked on a small input when it is loaded, not assumed from its name:
a document packed behind another must have the hidden states it has alone, and the model's own logits must be
hidden · weightᵀ + bias.

Collectives: none.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from megatron_kd.teacher.engine import Head, positions_in_documents
from megatron_kd.teacher.weights import no_progress_bars

# Settings that change the logits after the projection, with the value that means "not used".
_LOGIT_SETTINGS: dict[str, Any] = {
    "final_logit_softcapping": None,
    "logits_soft_cap": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "lm_head_multiplier": 1.0,
}
_PROBE_LENGTHS = (24, 16)  # two documents, packed
# Relative L2 difference that other summation orders explain; a leak between documents is far larger.
_PROBE_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


# Of a GPU's free memory, for weights; activations and one chunk of logits need the rest.
_SHARE_OF_MEMORY = 0.8


class HfEngine:
    """A transformers model; see `TeacherEngine` for the members."""

    head: Head

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        max_memory: dict[int | str, int] | None = None,
    ) -> None:
        """Loads the model and checks it.

        Args:
            folder: configuration and safetensors.
            dtype: what to compute in.
            device: where, if it is one device.
            max_memory: bytes of weights by device, to fill one after the other; None: all on `device`.

        Raises:
            ValueError: not a causal language model, or one whose logits or documents this engine cannot represent.
        """
        placement: dict[str, Any] = {"device_map": "sequential", "max_memory": max_memory} if max_memory else {}
        try:
            with no_progress_bars():
                model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, use_safetensors=True, **placement)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{folder}: transformers cannot load it as a causal language model: {error}") from error
        self.model: PreTrainedModel = (model if max_memory else model.to(device)).eval().requires_grad_(False)
        self._folder = folder
        if any(parameter.is_meta for parameter in self.model.parameters()):
            raise ValueError(f"{folder}: its weights do not fit the memory of {sorted(map(str, max_memory or {}))}")
        self.name = type(model).__name__
        self._refuse_logit_settings()
        projection = self.model.get_output_embeddings()
        if type(projection) is not torch.nn.Linear:  # an adapter around it would be trained past, or computed without
            raise ValueError(
                f"{folder}: the head of {self.name} is a {type(projection).__name__}; a plain Linear is needed"
            )
        self.head = Head(projection.weight, getattr(projection, "bias", None))
        self.dtype = dtype
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.vocabulary_rows = self.head.weight.shape[0]
        self._check()

    @torch.no_grad()
    def hidden_states(self, tokens: Tensor, segment: Tensor) -> Tensor:
        """[b, S, D] final hidden states of tokens [b, S] with document numbers [b, S]."""
        return self.forward(tokens, segment)

    def forward(self, tokens: Tensor, segment: Tensor) -> Tensor:
        """`hidden_states`, with what backward needs."""
        device = self.head.weight.device
        positions = positions_in_documents(segment.to(device))
        output = self.model.base_model(
            input_ids=tokens.to(device), position_ids=positions, attention_mask=self._masks(positions), use_cache=False
        )
        return output.last_hidden_state.to(device)

    def _masks(self, positions: Tensor) -> dict[str, Any] | None:
        """None: the model makes its masks. GPT-OSS leaves the positions out of account (transformers 5.24)."""
        if self.model.config.model_type != "gpt_oss":
            return None
        inputs = {
            "config": self.model.config,
            "inputs_embeds": positions.new_empty((*positions.shape, 0), dtype=self.dtype),  # looked at for its shape
            "attention_mask": None,
            "cache": None,
            "position_ids": positions,
        }
        return {
            "full_attention": create_causal_mask(**inputs),
            "sliding_attention": create_sliding_window_causal_mask(**inputs),
        }

    def _refuse_logit_settings(self) -> None:
        config = self.model.config.get_text_config()
        for setting, unused in _LOGIT_SETTINGS.items():
            value = getattr(config, setting, unused)
            if value not in (unused, None):
                raise ValueError(
                    f"{self._folder}: {self.name} has {setting}={value}, which changes the logits after the "
                    "projection; the hf engine supports heads without it"
                )

    @torch.no_grad()
    def _check(self) -> None:
        rows = self.vocabulary_rows
        tokens = (torch.arange(sum(_PROBE_LENGTHS)) * 7919 + 13).remainder(rows)[None]
        segment = torch.repeat_interleave(torch.tensor([0, 1]), torch.tensor(_PROBE_LENGTHS))[None]
        second = tokens[:, _PROBE_LENGTHS[0] :]
        packed = self.hidden_states(tokens, segment)[:, _PROBE_LENGTHS[0] :]
        alone = self.hidden_states(second, torch.zeros_like(second))
        self._require_close(
            packed, alone, "a document packed behind another differs from the same document alone: documents are "
            "not isolated; a model whose attention honours position_ids is needed"
        )  # fmt: skip
        logits = self.model(input_ids=second.to(alone.device), use_cache=False).logits
        projected = torch.nn.functional.linear(alone, self.head.weight, self.head.bias)
        self._require_close(
            projected, logits, "its logits are not hidden · weightᵀ + bias of its output embedding; "
            "a model with a plain linear head is needed"
        )  # fmt: skip

    def _require_close(self, found: Tensor, expected: Tensor, problem: str) -> None:
        difference = ((found - expected).float().norm() / expected.float().norm()).item()
        tolerance = _PROBE_TOLERANCE[self.dtype]
        if not difference <= tolerance:  # NaN too
            raise ValueError(f"{self._folder}: {self.name}: {problem} (relative difference {difference:.1e})")


def gpu_share() -> dict[int | str, int] | None:
    """Bytes of weights that each GPU of this process may hold, where it has several; None where it has one or none."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    share = torch.cuda.device_count() // ranks
    if share < 2:
        return None
    first = int(os.environ.get("LOCAL_RANK", "0")) * share
    return {gpu: int(torch.cuda.mem_get_info(gpu)[0] * _SHARE_OF_MEMORY) for gpu in range(first, first + share)}
