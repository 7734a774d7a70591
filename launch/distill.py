"""Trains a student on a teacher's cache.

    torchrun --nproc-per-node 2 launch/distill.py --config configs/quickstart.yaml [--section.key value …]

Run it again after a stop, of whatever kind: it goes on from the newest checkpoint. `--help` lists every field.
The folder of the last checkpoint is printed on stdout.
"""

from megatron_kd.config_io import config_from_command_line
from megatron_kd.lifetime import serve_rank

if __name__ == "__mp_main__":  # a helper of Megatron-Core's checkpoint writer
    serve_rank()

if __name__ == "__main__":
    config = config_from_command_line(__doc__)  # before the heavy imports: a typo is answered at once

    from megatron_kd.cache import CacheError
    from megatron_kd.entry import job, print_result
    from megatron_kd.train.metrics import TrainingError
    from megatron_kd.train.run import distill

    with job(CacheError, TrainingError):
        print_result(distill(config))
