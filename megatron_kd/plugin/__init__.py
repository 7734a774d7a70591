"""The seam: the distillation loss inside any Megatron-Core model."""

from megatron_kd.plugin.attach import KDHandle, attach

__all__ = ["KDHandle", "attach"]
