"""Distilling through Megatron-LM's own `pretrain()` is the project's own training job, number for number.

Both start from the same Hugging Face folder, read the same cache in the same order and take four steps.
"""

import contextlib
import importlib.util
import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_kd.config import LossConfig, OptimizerConfig, ParallelConfig, StudentConfig, TrainConfig
from megatron_kd.config_io import load_config
from tests.distributed import run_ranks
from tests.teacher.models import save_llama, write_run
from tests.tiny import megatron_twin

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron.training") is None,
    reason="megatron-core before 0.19 has no megatron.training in its package",
)

LENGTH, STEPS = 32, 4
MEGATRON = """
    --num-layers 4 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --kv-channels 8 --seq-length 32 --max-position-embeddings 128 --position-embedding-type rope
    --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
    --attention-softmax-in-fp32 --calculate-per-token-loss --micro-batch-size 2 --global-batch-size 4 --train-iters 4
    --lr 1e-2 --min-lr 0 --lr-warmup-iters 2 --lr-decay-style cosine --weight-decay 0.1 --adam-beta2 0.999 --clip-grad 1
    --eval-interval 1000 --log-interval 1 --distributed-backend gloo --transformer-impl local --use-cpu-initialization
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion
    --no-rope-fusion --no-persist-layer-norm --kd-ce-weight 0.1 --kd-chunk-tokens 20
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A run whose teacher is cached, and a student that is another model."""
    from megatron_kd.teacher.run import cache_teacher

    folder = tmp_path_factory.mktemp("megatron")
    file = write_run(
        folder, 30, micro_batch=2, data={"sequence_length": LENGTH, "held_out": 0.2}, cache={"k": 16, "block": 4}
    )
    config = replace(
        load_config(file),
        student=StudentConfig(init=str(save_llama(folder / "student", num_hidden_layers=4, intermediate_size=48))),
        loss=LossConfig(ce_weight=0.1, chunk_tokens=20),
        optimizer=OptimizerConfig(lr=1e-2, warmup_steps=2),
        train=TrainConfig(steps=STEPS, global_batch=4, micro_batch=2, precision="fp32"),
    )
    cache_teacher(config)
    return config


def noted(module):
    """Lets `module.attach` note the chunks it is called on; they are what is trained."""
    chunks, attach = [], module.attach
    module.attach = lambda model, *args, **kwargs: chunks.extend(model) or attach(model, *args, **kwargs)
    return chunks


def train_here(rank, world_size, config):
    """The project's own job: its records, and the trained weights by Hugging Face name."""
    from megatron_kd.student.architecture import architecture
    from megatron_kd.student.convert import export_to_hf
    from megatron_kd.student.hf_weights import HfWeights
    from megatron_kd.train import run, setup

    chunks = noted(setup)
    run.distill(config)
    records = [json.loads(line) for line in Path(config.run_dir, "metrics.jsonl").read_text().splitlines()]
    hf = HfWeights(config.student_init).config
    weights = export_to_hf(chunks, hf, architecture(hf, config.parallel))
    return [record for record in records if record["stage"] == "distill"], weights


def train_in_megatron(rank, world_size, config, arguments, parallel, expected):
    """What Megatron-LM logs of each iteration, and the largest difference of a trained weight."""
    import os

    from megatron_kd import platform
    from megatron_kd.student.hf_weights import HfWeights

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    platform.enable_megatron_training_without_cuda()

    from megatron_kd.plugin import megatron_lm

    chunks = noted(megatron_lm)
    sys.argv = ["pretrain_gpt_kd.py", *MEGATRON.split(), "--kd-student-init", config.student_init, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as log:
        megatron_lm.pretrain_gpt()
    wanted, _ = megatron_twin(HfWeights(config.student_init).config, expected, LENGTH, parallel)
    worst = max(
        (mine - theirs).abs().max().item()
        for chunk, twin in zip(chunks, wanted)
        for mine, theirs in zip(chunk.parameters(), twin.parameters())
    )
    return iterations(log.getvalue()), worst


def iterations(log):
    """Iteration → {name: value}, of the lines that Megatron-LM prints."""
    found = {}
    for number, line in re.findall(r"iteration +(\d+)/ +\d+ \| (.*)", log):
        pairs = (part.rsplit(":", 1) for part in line.split(" | ") if ":" in part)
        found[int(number)] = {name.strip(): float(value.strip(" |")) for name, value in pairs}
    return found


def as_megatron_logs(records):
    """The same losses as Megatron-LM logs them: its second line is the mean of the first two iterations."""
    names = {"kd loss": "kd", "lm loss": "ce", "total loss": "loss"}
    losses = [{name: record[key] for name, key in names.items()} for record in records]
    losses[1] = {name: (losses[0][name] + losses[1][name]) / 2 for name in names}
    return dict(enumerate(losses, 1))


@pytest.fixture(scope="module")
def reference(config):
    (found,) = run_ranks(train_here, 1, config)
    return found


LAYOUTS = [
    ParallelConfig(),
    ParallelConfig(tensor=2),
    pytest.param(ParallelConfig(pipeline=2), marks=pytest.mark.full),
    pytest.param(ParallelConfig(pipeline=2, virtual_pipeline=2), marks=pytest.mark.full),
]


@pytest.mark.parametrize("parallel", LAYOUTS, ids=lambda p: f"TP{p.tensor}-PP{p.pipeline}-VPP{p.virtual_pipeline}")
def test_pretrain_on_the_cache_is_the_projects_own_job(config, reference, parallel):
    """Losses are printed with seven digits; a split model sums in another order, four Adam steps of 1e-2 long."""
    records, expected = reference
    arguments = ["--kd-cache", config.cache_url, "--eval-iters", "0", "--tokenizer-type", "NullTokenizer"]
    arguments += ["--vocab-size", "300", "--tensor-model-parallel-size", str(parallel.tensor)]
    arguments += ["--pipeline-model-parallel-size", str(parallel.pipeline)]
    if parallel.virtual_pipeline:
        arguments += ["--num-virtual-stages-per-pipeline-rank", str(parallel.virtual_pipeline)]
    ranks = run_ranks(train_in_megatron, parallel.tensor * parallel.pipeline, config, arguments, parallel, expected)
    logged, _ = ranks[-1]
    for number, losses in as_megatron_logs(records).items():
        for name, value in losses.items():
            assert logged[number][name] == pytest.approx(value, rel=1e-5), (number, name)
    assert len(logged) == STEPS
    assert max(worst for _, worst in ranks) <= 1e-5
