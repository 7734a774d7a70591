"""Processes that end together: a rank with its launcher, a rank's helpers with the rank.

torchrun starts each rank in a session of its own, and Megatron-Core's checkpoint writer keeps a helper process that
serves until the rank tells it to stop. Without a word from here a killed launcher leaves ranks that hold their GPU, a
killed rank leaves its helper, and a SIGTERM, which torchrun sends to the rank's whole process group, takes the helper
away before the rank has written the checkpoint that the signal asks for.

Linux alone can tie a process to its parent; elsewhere `end_with_parent` does nothing. No heavy imports: a helper that
starts slowly delays the first checkpoint.
"""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent() -> None:
    """The kernel kills this process as soon as its parent has ended, in whatever way."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def serve_rank() -> None:
    """For a helper, which imports the rank's main script as `__mp_main__`: it ends with its rank, not before."""
    end_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
