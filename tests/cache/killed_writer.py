"""A writer process that is killed on the way: `python -m tests.cache.killed_writer FOLDER RANK RANKS STEP`.

It writes the missing blocks of its rank. A step is one of four moments of writing one object: nothing written, half of
the partial file written, the partial file complete, the object in place. At step STEP (counted from 0) the process
kills itself with SIGKILL; −1 never. Each block it computes becomes a line of output.
"""

import os
import signal
import sys

from megatron_kd.cache import CacheWriter
from megatron_kd.cache.store import LocalStore
from tests.cache.targets import manifest, table, targets

STEPS_PER_OBJECT = 4


def main(folder: str, rank: int, ranks: int, kill_at: int) -> None:
    step = -1

    def pass_step() -> None:
        nonlocal step
        step += 1
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    whole = LocalStore.write

    def write(self, key: str, data: bytes) -> None:
        pass_step()
        path = os.path.join(self.url, key)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        for length in (len(data) // 2, len(data)):
            with open(f"{path}.{rank}.partial", "wb") as file:
                file.write(data[:length])
            pass_step()
        os.unlink(f"{path}.{rank}.partial")
        whole(self, key, data)
        pass_step()

    LocalStore.write = write
    m = manifest()
    writer = CacheWriter.open_or_create(folder, m, table(m))
    for index in writer.missing_blocks():
        if index % ranks == rank:
            print(index, flush=True)
            writer.write_block(index, targets(m, m.rows(index)))
    assert "torch" not in sys.modules


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
