"""Top-K distillation losses with the output projection fused in: exact, chunked, vocabulary-parallel.

`fused_linear_kl` is the loss on cached entries, `online_kl` on a resident teacher; `reference` is their definition;
`dense_kl`, `online_dense_kl` and `forward_chunked_kl` are the baselines they are compared with; `validate` checks what
would cost a device synchronisation. Needs torch only.
"""

from megatron_kd.loss.baselines import dense_kl, forward_chunked_kl, online_dense_kl
from megatron_kd.loss.fused_linear_kl import fused_linear_kl
from megatron_kd.loss.objective import KDLoss, KDObjective, TeacherHead, TeacherTopK
from megatron_kd.loss.online import online_kl
from megatron_kd.loss.plan import choose_chunk_tokens
from megatron_kd.loss.reference import reference
from megatron_kd.loss.validate import validate

# By the names of configurations: losses of cached targets, and those that want a teacher in memory.
CACHED_LOSSES = {"fused": fused_linear_kl, "forward_chunked": forward_chunked_kl, "dense": dense_kl}
ONLINE_LOSSES = {"online": online_kl, "online_dense": online_dense_kl}

__all__ = [
    "CACHED_LOSSES",
    "ONLINE_LOSSES",
    "KDLoss",
    "KDObjective",
    "TeacherHead",
    "TeacherTopK",
    "choose_chunk_tokens",
    "dense_kl",
    "forward_chunked_kl",
    "fused_linear_kl",
    "online_dense_kl",
    "online_kl",
    "reference",
    "validate",
]
