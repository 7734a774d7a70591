"""Writes the samples on which a Megatron-LM run will train, in their order, for a teacher to cache.

    python launch/megatron_samples.py --samples-dir FOLDER [the run's arguments, without those of its layout …]
    torchrun … launch/cache_teacher.py --config run.yaml --data.source samples-dir --data.samples_dir FOLDER
    torchrun … launch/pretrain_gpt_kd.py --kd-data megatron --kd-cache URL [the run's arguments …]

Needs megatron-core 0.19, whose package holds `megatron.training`. Order and number of the samples depend on the data,
`--seed`, `--split`, `--seq-length`, and the number of training samples: the training run compares each of them.
The folder is printed on stdout.
"""

from argparse import ArgumentParser
from pathlib import Path

from megatron_kd import platform


def add_samples_dir(parser: ArgumentParser) -> ArgumentParser:
    """Adds the one argument that is not Megatron-LM's."""
    parser.add_argument("--samples-dir", type=Path, required=True, help="where the samples are written")
    return parser


if __name__ == "__main__":
    platform.enable_megatron_training_without_cuda()

    from megatron.training.arguments import parse_and_validate_args

    from megatron_kd.entry import job
    from megatron_kd.plugin.megatron_dataset import write_gpt_samples

    with job():
        args = parse_and_validate_args(extra_args_provider=add_samples_dir)
        write_gpt_samples(args.samples_dir)
        print(args.samples_dir)
