"""The one place that knows there may be no GPU.

Megatron-Core names CUDA in places that have nothing to do with CUDA: `device="cuda"`, `torch.cuda.current_device()`,
streams, the random-number state, tensor type names. On a machine without CUDA `init_distributed` (or
`enable_megatron_without_cuda`, for code that makes its own process group) maps those to the CPU, so that everything
above this module is written as if for a GPU. With CUDA present nothing is changed.

Collectives: none but the process group's own set-up.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import resource
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CUDA = torch.cuda.is_available()

# Megatron-Core warns at import about every GPU library it does not find; what is used is said where it is chosen.
warnings.filterwarnings("ignore", module=r"megatron\.core")
warnings.filterwarnings("ignore", message="Please use DTensor instead")  # its checkpoints' business

if not _CUDA:
    # Megatron-Core compiles small fused functions as it is imported, which here costs seconds an import and, at the
    # first call, a C++ compiler. This must precede its import, so it cannot wait for `init_distributed`.
    torch.compile = lambda model=None, **options: (lambda function: function) if model is None else model


def device() -> torch.device:
    """Where this process computes: its GPU, by `LOCAL_RANK`, or the CPU."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if _CUDA else torch.device("cpu")


def backend() -> str:
    """The process-group backend of `device()`."""
    return "nccl" if _CUDA else "gloo"


def compute_dtype(name: str) -> torch.dtype:
    """The dtype called `bfloat16` or `float32`; `auto` is bfloat16 where the device has instructions for it."""
    if name == "auto":
        native = _CUDA or torch.cpu._is_avx512_bf16_supported() or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return torch.bfloat16 if native else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def has_transformer_engine() -> bool:
    """Whether Transformer Engine's layers and optimizer can be used."""
    return _CUDA and importlib.util.find_spec("transformer_engine") is not None


def has_accumulating_gemm() -> bool:
    """Whether NVIDIA apex's GEMM that adds into an fp32 gradient buffer is there."""
    return _CUDA and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None


def megatron_version() -> str:
    """Megatron-Core's; it is not imported, which takes seconds, nor need it have a package's metadata.

    NVIDIA's NeMo images hold it without.
    """
    try:
        return version("megatron-core")
    except PackageNotFoundError:
        folder = Path(str(importlib.util.find_spec("megatron.core").origin)).parent  # type: ignore[union-attr]
        # From 0.19 on it adds the commit of whatever repository it lies in.
        return str(runpy.run_path(str(folder / "package_info.py"))["__version__"]).split("+")[0]


def init_distributed(timeout_seconds: float = 600.0) -> tuple[int, int]:
    """Joins torchrun's process group, or makes one of a single process.

    Returns:
        (rank, world size)
    """
    enable_megatron_without_cuda()
    if _CUDA and not torch.distributed.is_initialized():
        torch.cuda.set_device(device())
    return join_group(backend(), timeout_seconds)


def join_group(backend: str, timeout_seconds: float = 600.0) -> tuple[int, int]:
    """As `init_distributed`, on a backend of choice and without Megatron-Core."""
    if not torch.distributed.is_initialized():
        if "WORLD_SIZE" not in os.environ:
            torch.distributed.init_process_group(
                backend, store=torch.distributed.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60)
            )
        else:
            torch.distributed.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def shutdown() -> None:
    """Leaves the process group."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def synchronize() -> None:
    """Waits for the device; for timing only."""
    if _CUDA:
        torch.cuda.synchronize()


def peak_memory_bytes() -> int:
    """The most this process has held: device memory on a GPU, resident memory otherwise."""
    if _CUDA:
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def enable_megatron_without_cuda() -> None:
    """Lets Megatron-Core run on the CPU. Does nothing where CUDA is present, or when called again."""
    if _CUDA or getattr(torch.cuda, "_megatron_kd_stand_ins", False):
        return
    torch.cuda._megatron_kd_stand_ins = True  # type: ignore[attr-defined]
    for name, stand_in in _STAND_INS.items():
        setattr(torch.cuda, name, stand_in)
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    _CudaMeansCpu().__enter__()

    from megatron.core.tensor_parallel import random as megatron_random

    megatron_random._get_cuda_rng_state = _get_rng_state
    megatron_random._set_cuda_rng_state = _set_rng_state

    from megatron.core.transformer.moe import token_dispatcher

    token_dispatcher.maybe_move_tensor_to_cpu = _moved_to_cpu


def supply_te_general_gemm() -> None:
    """Defines a name that Megatron-Core 0.16's router looks up, and does not define without Transformer Engine."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def enable_megatron_training_without_cuda() -> None:
    """Lets `megatron.training.pretrain` run on the CPU, with `--distributed-backend gloo` and local layers.

    Does nothing where CUDA is present. Otherwise to be called before `megatron.training` parses its arguments.
    """
    if _CUDA:
        return
    enable_megatron_without_cuda()
    # It makes its process groups where there are devices; those before generation 10 it wants in one hardware queue.
    torch.cuda.device_count = lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(major=10)

    from megatron.core.datasets import utils as dataset_utils
    from megatron.training import training

    training.initialize_megatron = functools.partial(training.initialize_megatron, allow_no_cuda=True)
    dataset_utils.compile_helpers = lambda: None  # they come built with the package, without a Makefile


class _CudaMeansCpu(TorchFunctionMode):
    """Rewrites `device="cuda…"` in any torch call, and the CUDA spelling of tensors' types."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # The distributed optimizer recognises its parameters by the name of the CUDA type.
            return func(*args).replace("torch.", "torch.cuda.")
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _without_cuda(kwargs["device"])}
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], _without_cuda(args[1]), *args[2:])
        return func(*args, **kwargs)


def _without_cuda(value: Any) -> Any:
    named = isinstance(value, (str, torch.device)) and str(value).startswith("cuda")
    return torch.device("cpu") if named else value


def _get_rng_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = None, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _moved_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron-Core's converts to numpy only what it has moved; all_to_all takes numpy's sizes but not a tensor's."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


class _Stream:
    """A stream on a device that has only one: everything is already in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_stream = 0

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        return None

    wait_stream = wait_event = synchronize = record = wait = _nothing

    def record_event(self, event: Any = None) -> _Stream:
        return self

    def query(self) -> bool:
        return True


@contextlib.contextmanager
def _stream_context(stream: Any) -> Iterator[None]:
    yield


_ONLY_STREAM = _Stream()

_STAND_INS: dict[str, Any] = {
    "current_device": lambda: torch.device("cpu"),
    "set_device": lambda device: None,
    "synchronize": lambda device=None: None,
    "current_stream": lambda device=None: _ONLY_STREAM,
    "default_stream": lambda device=None: _ONLY_STREAM,
    "stream": _stream_context,
    "Stream": _Stream,
    "Event": _Stream,
    "get_rng_state": _get_rng_state,
    "set_rng_state": _set_rng_state,
    "manual_seed": torch.manual_seed,
}
