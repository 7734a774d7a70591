"""Distilling through Megatron-LM's own `pretrain()` is the project's own training job, number for number.

Both start from the same Hugging Face folder, read the same cache in the same order and take four steps.
"""

import contextlib
import importlib.util
import io
import json
import os
import re
import sys
from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_kd.cache import TeacherCache, TokenBatch
from megatron_kd.config import LossConfig, ParallelConfig
from megatron_kd.loss import KDObjective, TeacherTopK
from megatron_kd.loss import reference as reference_loss
from tests.data.texts import sentences, small_tokenizer
from tests.distributed import run_ranks, run_script
from tests.tiny import megatron_twin

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron.training") is None,
    reason="megatron-core before 0.19 has no megatron.training in its package",
)

ROOT = Path(__file__).parents[2]
LENGTH, STEPS = 32, 4
MEGATRON = """
    --num-layers 4 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --kv-channels 8 --seq-length 32 --max-position-embeddings 128 --position-embedding-type rope
    --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
    --attention-softmax-in-fp32 --calculate-per-token-loss --micro-batch-size 2 --global-batch-size 4 --train-iters 4
    --lr 1e-2 --min-lr 0 --lr-warmup-iters 2 --lr-decay-style cosine --weight-decay 0.1 --adam-beta2 0.999 --clip-grad 1
    --eval-interval 1000 --log-interval 1 --distributed-backend gloo --transformer-impl local --use-cpu-initialization
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion
    --no-rope-fusion --no-persist-layer-norm
"""
LOSS = "--kd-ce-weight 0.1 --kd-chunk-tokens 20"


@pytest.fixture(scope="module")
def reference(config):
    """The project's own job: its records, and its checkpoint."""
    done = run_script(ROOT / "launch/distill.py", "--config", str(Path(config.run_dir).parent / "run.yaml"))
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in Path(config.run_dir, "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["stage"] == "distill"], Path(done.stdout.strip())


def train_in_megatron(rank, world_size, config, arguments, parallel, checkpoint):
    """What Megatron-LM logs of each iteration, and the largest difference of a trained weight from the checkpoint's."""
    from megatron_kd import platform
    from megatron_kd.student.checkpoint import load_weights
    from megatron_kd.student.hf_weights import HfWeights

    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    platform.enable_megatron_training_without_cuda()

    from megatron_kd.plugin import megatron_lm

    trained, attach = [], megatron_lm.attach
    megatron_lm.attach = lambda chunks, *args, **kwargs: trained.extend(chunks) or attach(chunks, *args, **kwargs)
    sys.argv = [
        "pretrain_gpt_kd.py",
        *MEGATRON.split(),
        *LOSS.split(),
        "--kd-student-init",
        config.student_init,
        *arguments,
    ]
    with contextlib.redirect_stdout(io.StringIO()) as log:
        megatron_lm.pretrain_gpt()
    weights = HfWeights(config.student_init)
    expected, _ = megatron_twin(weights.config, weights, LENGTH, parallel)
    load_weights(checkpoint, expected)
    worst = max(
        (mine - theirs).abs().max().item()
        for chunk, twin in zip(trained, expected)
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


LAYOUTS = [
    ParallelConfig(),
    ParallelConfig(tensor=2),
    pytest.param(ParallelConfig(pipeline=2, virtual_pipeline=2), marks=pytest.mark.full),
]


@pytest.mark.parametrize("parallel", LAYOUTS, ids=lambda p: f"TP{p.tensor}-PP{p.pipeline}-VPP{p.virtual_pipeline}")
def test_pretrain_on_the_cache_is_the_projects_own_job(config, reference, parallel):
    """Losses are printed with seven digits; a split model sums in another order, four Adam steps of 1e-2 long."""
    records, checkpoint = reference
    arguments = ["--kd-cache", config.cache_url, "--eval-iters", "0", "--tokenizer-type", "NullTokenizer"]
    arguments += ["--vocab-size", "300", "--tensor-model-parallel-size", str(parallel.tensor)]
    arguments += ["--pipeline-model-parallel-size", str(parallel.pipeline)]
    if parallel.virtual_pipeline:
        arguments += ["--num-virtual-stages-per-pipeline-rank", str(parallel.virtual_pipeline)]
    ranks = run_ranks(train_in_megatron, parallel.tensor * parallel.pipeline, config, arguments, parallel, checkpoint)
    logged, _ = ranks[-1]
    for number, losses in as_megatron_logs(records).items():
        for name, value in losses.items():
            assert logged[number][name] == pytest.approx(value, rel=1e-5), (number, name)
    assert len(logged) == STEPS
    assert max(worst for _, worst in ranks) <= 1e-5


def parsed(config, *arguments, **settings):
    """The arguments of a run that can distil, some of them set otherwise."""
    from megatron_kd.plugin.megatron_lm import add_kd_arguments

    args = add_kd_arguments(ArgumentParser()).parse_args(["--kd-cache", config.cache_url, *arguments])
    stock = {
        "seq_length": LENGTH,
        "padded_vocab_size": 384,
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": config.student_init,
        "eval_iters": 0,
        "transformer_impl": "local",
        "init_model_with_meta_device": False,
        "pipeline_model_parallel_size": 1,
        "micro_batch_size": 2,
    }
    vars(args).update({**stock, **settings})
    return args


def test_arguments_are_the_fields_of_the_loss(config):
    from megatron_kd.plugin.megatron_lm import Distillation

    arguments = (
        "--kd-kind truncated --kd-k 8 --kd-temperature 1 --kd-weight 0.5 --kd-ce-weight 0.25 --kd-chunk-tokens 7"
    )
    args = parsed(config, *arguments.split(), "--kd-backward", "in_forward", "--no-kd-scale-by-temperature-squared")
    expected = LossConfig(
        kind="truncated", k=8, temperature=1.0, kd_weight=0.5, ce_weight=0.25, chunk_tokens=7, backward="in_forward",
        scale_by_temperature_squared=False,
    )  # fmt: skip
    assert Distillation(args).loss == expected
    assert args.dataloader_type == "external"
    assert Distillation(parsed(config)).loss == LossConfig()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seq_length": 64}, "sequence length is 64; .*samples of 32 positions"),
        ({"padded_vocab_size": 256}, "256 vocabulary rows, .* made for 300"),
        ({"kd_k": 17}, "loss.k = 17; .* holds 16 entries"),
        ({"kd_temperature": 2.0}, "loss.temperature = 2; .* serves 1"),
        ({"eval_iters": 5}, "--eval-iters is 5; .*--kd-valid-cache"),
        ({"logits_load_dir": "x"}, "--logits-load-dir"),
        ({"reset_position_ids": True}, "--reset-position-ids"),
        ({"kd_student_init": "x", "init_model_with_meta_device": True}, "--init-model-with-meta-device"),
        (
            {"transformer_impl": "transformer_engine", "pipeline_model_parallel_size": 2},
            "--micro-batch-size is 2 in 2 pipeline stages",
        ),
    ],
)
def test_what_cannot_be_distilled_is_refused_by_name(config, settings, message):
    from megatron_kd.plugin.megatron_lm import Distillation

    with pytest.raises(ValueError, match=message):
        Distillation(parsed(config, **settings))


def test_another_tokenizer_is_refused(config, tmp_path):
    from megatron_kd.plugin.megatron_lm import Distillation

    small_tokenizer(280).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path} has hash .* was made with"):
        Distillation(parsed(config, tokenizer_model=str(tmp_path)))


def test_a_sample_that_is_not_the_data_sets_is_named_with_both_hashes():
    from megatron_kd.plugin.megatron_dataset import ComparedCache

    tokens = np.arange(10 * 5, dtype=np.int32).reshape(10, 5)
    mask = np.ones((10, 4), np.uint8)
    cache = SimpleNamespace(read_tokens=lambda samples: TokenBatch(tokens[samples], mask[samples], mask[samples]))
    dataset = [
        {"tokens": torch.tensor(row[:-1]).long(), "labels": torch.tensor(row[1:]).long(), "loss_mask": torch.ones(4)}
        for row in tokens
    ]
    compared = ComparedCache(cache, dataset, "teacher.zarr")
    assert np.array_equal(compared.read_tokens(np.array([7, 2])).tokens, tokens[[7, 2]])
    elsewhere = ComparedCache(cache, None, "teacher.zarr")  # a rank on which the data set is not built

    tokens[2, 4] += 1  # the last label
    mask[3, 0] = 0
    for sample, name in ((2, "tokens"), (3, "loss mask")):
        with pytest.raises(
            ValueError, match=f"sample {sample}: its {name} hash to [0-9a-f]{{16}} .*, to [0-9a-f]{{16}}"
        ):
            compared.read_tokens(np.array([7, sample]))
        elsewhere.read_tokens(np.array([sample]))


def launch(script, *arguments, ranks=1, check=True):
    done = run_script(ROOT / f"launch/{script}.py", *map(str, arguments), ranks=ranks, timeout=900)
    assert not check or done.returncode == 0, done.stderr
    return done


@pytest.mark.full
def test_a_cache_made_from_megatrons_own_data_set(config, tmp_path):
    """Written, cached, trained on by two ranks and evaluated, with the launchers; other data are refused.

    The first iteration's losses are those of transformers' student on samples 0 to 3, by the loss's definition.
    """
    from megatron_kd.teacher.run import cache_teacher

    write_indexed(tmp_path / "text")
    stock = [*MEGATRON.split(), "--data-path", tmp_path / "text", "--split", "80,20,0", "--eval-iters", "1"]
    stock += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", config.student_init]
    launch("megatron_samples", "--samples-dir", tmp_path / "samples", *stock)
    data = replace(config.data, source="samples-dir", samples_dir=str(tmp_path / "samples"))
    caches = {split: str(tmp_path / f"{split}.zarr") for split in ("train", "held_out")}
    for split, url in caches.items():
        cache_teacher(replace(config, data=data, cache=replace(config.cache, split=split, url=url)))
    kd = ["--kd-data", "megatron", "--kd-cache", caches["train"], "--kd-valid-cache", caches["held_out"]]
    kd += [*LOSS.split(), "--kd-student-init", config.student_init, "--tensor-model-parallel-size", 2]
    done = launch("pretrain_gpt_kd", *kd, *stock, ranks=2)
    logged = iterations(done.stdout)
    assert len(logged) == STEPS
    assert "kd loss value" in done.stdout  # of the held-out cache
    for name, value in first_losses(config.student_init, caches["train"]).items():
        assert logged[1][name] == pytest.approx(value, rel=1e-5), name

    refused = launch("pretrain_gpt_kd", *kd, *stock, "--seed", 1, ranks=2, check=False)
    assert refused.returncode != 0
    assert re.search(r"error: sample \d+: its tokens hash to", refused.stderr)


def write_indexed(prefix):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    tokenizer = small_tokenizer()
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for text in sentences(40):
        ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        builder.add_document(ids, [len(ids)])
    builder.finalize(f"{prefix}.idx")


def first_losses(student, cache):
    read = TeacherCache.open(cache).read(range(4))
    tokens = torch.from_numpy(read.tokens).long()
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32)(tokens[:, :-1]).logits.flatten(0, 1)
    targets = (torch.from_numpy(getattr(read, name)).flatten(0, 1) for name in ("ids", "logprobs", "tail_logprob"))
    teacher = TeacherTopK(*targets)
    mask = torch.from_numpy(read.loss_mask).float().flatten()
    objectives = {"kd loss": KDObjective(), "lm loss": KDObjective(kd_weight=0.0, ce_weight=1.0)}
    return {
        name: (
            reference_loss(
                logits, torch.eye(300), teacher, objective=objective, labels=tokens[:, 1:].flatten(), loss_mask=mask
            ).sum()
            / mask.sum()
        ).item()
        for name, objective in objectives.items()
    }
