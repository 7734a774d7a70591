"""How a command or a distributed job ends: one clear message, an exit code that means something, and promptly.

Exit codes: 0 done, 1 failed, 2 bad command line or configuration, 130 interrupted.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_kd import platform
from megatron_kd.lifetime import end_with_parent

_OTHER_RANKS_WAIT_SECONDS = 1.0


@contextmanager
def job(*expected: type[Exception]) -> Iterator[None]:
    """Runs a job; turns what goes wrong into a message and an exit code.

    `expected` exceptions (and bad values, missing files) are the user's to mend: their message is shown. Anything else
    is ours and shows its traceback. A rank ends with the launcher that started it.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
    try:
        yield
    except KeyboardInterrupt:
        _leave(130, "interrupted")
    except (ValueError, OSError, *expected) as error:
        _leave(1, f"error: {error}")
    except Exception:
        _leave(1, traceback.format_exc())
    else:
        platform.shutdown()


def _leave(code: int, message: str) -> None:
    """Leaves at once: peers may be waiting in a collective that this process will never enter."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if int(os.environ.get("RANK", "0")) != 0:
        # What every rank meets is said by rank 0 alone; what only this rank met is said a moment later.
        time.sleep(_OTHER_RANKS_WAIT_SECONDS)
        message = f"[rank {os.environ['RANK']}] {message}"
    sys.stdout.flush()
    print(message, file=sys.stderr, flush=True)
    for helper in multiprocessing.active_children():  # Megatron-Core's checkpoint writer keeps one, which would stay
        helper.kill()
    os._exit(code)


def print_result(result: object) -> None:
    """A distributed job's result on stdout, once."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(result, flush=True)
