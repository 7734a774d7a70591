"""Runs a teacher over the text and stores its top-K targets in a cache.

    torchrun --nproc-per-node 2 launch/cache_teacher.py --config configs/quickstart.yaml [--section.key value …]

Each process holds the teacher and computes whole blocks of the cache; without torchrun one process does it all.
Run it again after a stop, of whatever kind: it computes what is missing, or returns at once. `--help` lists every
field. The cache's URL is printed on stdout.
"""

import os

from megatron_kd.config_io import config_from_command_line

if __name__ == "__main__":
    config = config_from_command_line(__doc__)  # before the heavy imports: a typo is answered at once

    from megatron_kd.cache import CacheError
    from megatron_kd.entry import job
    from megatron_kd.teacher.blocks import TeacherError
    from megatron_kd.teacher.run import cache_teacher

    with job(CacheError, TeacherError):
        url = cache_teacher(config)
        if int(os.environ.get("RANK", "0")) == 0:
            print(url)
