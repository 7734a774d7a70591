"""A Hugging Face checkpoint as a mapping from names to tensors, with some of its layers left out.

Pruning a teacher into a student is nothing more than a list of layers to keep: the view renumbers them, and everything
downstream (building, loading, exporting, evaluating) sees an ordinary, shallower checkpoint. Tensors are read one at a
time, so a checkpoint of any size can be opened.

GPT-OSS is published with its experts in MXFP4: for a tensor `x`, `x_blocks` holds two 4-bit numbers a byte and
`x_scales` an exponent for every 32 of them. The view shows `x` in bfloat16, which holds all those numbers.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

_BLOCKS, _SCALES = "_blocks", "_scales"  # suffixes of a tensor in MXFP4
_LAYER = re.compile(r"^(model\.layers\.)(\d+)(\..*)$")
# Everything beside the weights that a tokenizer or generation needs.
_COMPANIONS = ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "generation_config.json", "*.jinja")


class HfWeights(Mapping[str, Tensor]):
    """Names and tensors of a safetensors folder, restricted to `keep_layers`."""

    def __init__(self, folder: str | Path, keep_layers: Sequence[int] | None = None) -> None:
        """Args: folder: with config.json and *.safetensors; keep_layers: in the student's order, None keeps all.

        Raises:
            ValueError: no such checkpoint; a layer that it does not have.
        """
        self.folder = Path(folder)
        files = sorted(self.folder.glob("*.safetensors"))
        if not files or not (self.folder / "config.json").exists():
            raise ValueError(f"{folder}: a folder with config.json and *.safetensors is needed")
        self.config: PreTrainedConfig = AutoConfig.from_pretrained(self.folder)
        depth = self.config.num_hidden_layers
        kept = tuple(range(depth)) if keep_layers is None else tuple(keep_layers)
        absent = [layer for layer in kept if not 0 <= layer < depth]
        if absent or not kept:
            raise ValueError(f"student.keep_layers holds {absent or kept}; {folder} has layers 0 to {depth - 1}")
        self.config.num_hidden_layers = len(kept)
        if getattr(self.config, "layer_types", None):
            self.config.layer_types = [self.config.layer_types[layer] for layer in kept]
        stored = {name: safe_open(file, "pt") for file in files for name in safe_open(file, "pt").keys()}  # noqa: SIM118
        self._tensors = {
            new_name.removesuffix(_BLOCKS): (handle, name)
            for name, handle in stored.items()
            if not name.endswith(_SCALES)
            for new_name in _renumbered(name, kept)
        }
        self._scales = {name: handle for name, handle in stored.items() if name.endswith(_SCALES)}
        self._leave_quantization(folder)

    def __getitem__(self, name: str) -> Tensor:
        handle, stored_name = self._tensors[name]
        tensor = handle.get_tensor(stored_name)
        if not stored_name.endswith(_BLOCKS):
            return tensor
        scales = stored_name.removesuffix(_BLOCKS) + _SCALES
        return convert_moe_packed_tensors(tensor, self._scales[scales].get_tensor(scales))

    @property
    def parameters(self) -> int:
        """Numbers in all tensors; nothing is read."""
        return sum(
            math.prod(handle.get_slice(name).get_shape()) * (2 if name.endswith(_BLOCKS) else 1)
            for handle, name in self._tensors.values()
        )

    def _leave_quantization(self, folder: str | Path) -> None:
        """What is read, trained and saved is not quantised, so the configuration says so no longer."""
        settings = getattr(self.config, "quantization_config", None)
        if settings is None:
            return
        if settings["quant_method"] != "mxfp4":
            raise ValueError(
                f"{folder}: its weights are quantised, quant_method {settings['quant_method']!r}; only 'mxfp4' is read"
            )
        del self.config.quantization_config

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def save_hf(
    folder: str | Path, config: PreTrainedConfig, tensors: Mapping[str, Tensor], companions: str | Path
) -> None:
    """Writes a folder that `AutoModelForCausalLM.from_pretrained` loads.

    Args:
        folder: made if absent; written beside its final place and moved there last.
        config: of the model whose weights these are.
        tensors: by Hugging Face name.
        companions: the folder whose tokenizer and generation settings go with the model.
    """
    folder = Path(folder)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    config.save_pretrained(partial)
    save_torch_state_dict({name: tensor.contiguous() for name, tensor in tensors.items()}, partial)
    for pattern in _COMPANIONS:
        for file in Path(companions).glob(pattern):
            shutil.copy2(file, partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def _renumbered(name: str, kept: Sequence[int]) -> list[str]:
    """The names under which the tensor appears in the student: none, one, or several for a layer kept twice."""
    match = _LAYER.match(name)
    if match is None:
        return [name]
    prefix, layer, suffix = match.groups()
    return [f"{prefix}{position}{suffix}" for position, kept_layer in enumerate(kept) if kept_layer == int(layer)]
