"""The run that the adapters' tests repeat in each framework, and compare with the project's own job."""

import pytest
import yaml

from megatron_kd.config_io import load_config
from tests.teacher.models import save_llama, write_run


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Four steps in fp32, 32 positions a sample; the teacher is cached already, and the student is another model."""
    from megatron_kd.teacher.run import cache_teacher

    folder = tmp_path_factory.mktemp("run")
    save_llama(folder / "student", num_hidden_layers=4, seed=1)
    file = write_run(
        folder, 30, micro_batch=2, data={"sequence_length": 32, "held_out": 0.2}, cache={"k": 16, "block": 4}
    )
    settings = yaml.safe_load(file.read_text())
    settings |= {
        "student": {"init": str(folder / "student")},
        "loss": {"ce_weight": 0.1, "chunk_tokens": 20},
        "optimizer": {"lr": 1e-2, "warmup_steps": 2},
        "train": {"steps": 4, "global_batch": 4, "micro_batch": 2, "precision": "fp32"},
    }
    file.write_text(yaml.safe_dump(settings))
    config = load_config(file)
    cache_teacher(config)
    return config
