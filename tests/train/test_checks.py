"""A cache that does not fit the run is found out before the first step."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_kd.cache import Manifest
from megatron_kd.config import CacheConfig, DataConfig, LossConfig, RunConfig, TeacherConfig
from megatron_kd.data.attention import DocumentAttention
from megatron_kd.data.dataset import Batch
from megatron_kd.data.tokenizer import load_tokenizer, tokenizer_hash
from megatron_kd.loss import TeacherTopK
from megatron_kd.student.hf_weights import HfWeights
from megatron_kd.train.checks import check_cache, check_first_batch
from tests.distributed import run_ranks
from tests.teacher.models import save_llama

CONFIG = RunConfig(
    run_dir="run",
    teacher=TeacherConfig(model="t"),
    data=DataConfig(source="s"),
    cache=CacheConfig(url="a-cache"),
    loss=LossConfig(),
)
TOPK = SimpleNamespace(entries="topk")
V, K, S = 50, 12, 40


def _batch(shift=0, noise=0.0):
    random = torch.Generator().manual_seed(0)
    everything = (3 * torch.randn(1, S, V, generator=random)).log_softmax(-1)
    logprobs, ids = everything.topk(K)
    # Half of the labels are among the entries, as for a decent teacher; of the others some may be by chance.
    labels = torch.where(torch.arange(S) % 2 == 0, ids[..., 3], torch.randint(0, V, (1, S), generator=random))
    label_logprob = everything.gather(-1, labels[..., None])[..., 0]
    teacher = TeacherTopK(ids.roll(shift, 1), (logprobs.half().float() + noise).roll(shift, 1))
    ones = torch.ones(1, S)
    return Batch(
        (7,), labels, labels, labels, labels, ones, teacher, label_logprob, DocumentAttention(torch.tensor([0, S]))
    )


def test_targets_that_belong_to_the_labels_pass_after_rounding():
    check_first_batch(_batch(), TOPK, LossConfig(), "a-cache")


@pytest.mark.parametrize("damage", [{"shift": 1}, {"shift": -1}, {"noise": 0.2}])
def test_shifted_targets_and_another_teachers_are_refused_with_the_numbers(damage):
    with pytest.raises(ValueError, match=r"\d+ of 40 labels of samples \(7,\) .* a-cache are shifted"):
        check_first_batch(_batch(**damage), TOPK, LossConfig(), "a-cache")


def test_targets_of_other_text_are_refused_though_no_label_is_among_them():
    batch = _batch()
    entries = TeacherTopK(torch.full_like(batch.teacher.ids, V - 1), batch.teacher.logprobs)
    foreign = replace(batch, teacher=entries, labels=torch.zeros_like(batch.labels))
    with pytest.raises(ValueError, match="of 40 labels"):
        check_first_batch(foreign, TOPK, LossConfig(), "a-cache")


def test_masked_positions_and_a_teacher_that_never_names_the_label_pass():
    """A label outside the entries is fine as long as it is less probable than all of them."""
    batch = _batch()
    half = (torch.arange(S) < S // 2).float()[None]
    broken = torch.where(half[..., None] > 0, batch.teacher.logprobs, 0.0)
    check_first_batch(
        replace(batch, teacher=TeacherTopK(batch.teacher.ids, broken), loss_mask=half), TOPK, LossConfig(), "a-cache"
    )
    absent = replace(batch, labels=torch.full_like(batch.labels, -5), label_logprob=torch.full((1, S), -30.0))
    check_first_batch(absent, TOPK, LossConfig(), "a-cache")


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    return HfWeights(save_llama(tmp_path_factory.mktemp("student")))


def _manifest(student, **changes):
    fitting = Manifest(
        teacher="t", teacher_revision="r", teacher_dtype="float32",
        tokenizer_hash=tokenizer_hash(load_tokenizer(student.folder)), vocab_size=student.config.vocab_size,
        dataset="d", dataset_hash="h", packing="p", samples=8, seq_length=512, k=16, temperatures=(1.0, 2.0),
    )  # fmt: skip
    return replace(fitting, **changes)


def test_a_fitting_cache_passes(student):
    check_cache(_manifest(student), replace(CONFIG, loss=LossConfig(k=16, temperature=2.0)), student, "a-cache")


@pytest.mark.parametrize(
    ("manifest", "loss", "message"),
    [
        ({"tokenizer_hash": "f" * 64}, {}, "made with tokenizer ffffffffffff…, the student"),
        ({"vocab_size": 301}, {}, "holds a vocabulary of 301, the student .* one of 300"),
        ({"seq_length": 256}, {}, "holds samples of 256 positions; data.sequence_length asks for 512"),
        ({}, {"k": 17}, "loss.k = 17; a-cache holds 16 entries"),
        ({}, {"k": 0}, "loss.k = 0"),
        ({}, {"temperature": 3.0}, "loss.temperature = 3; a-cache serves 1, 2"),
        ({"entries": "sampled", "draws": 12}, {}, "loss.kind = 'ghost'; a-cache holds sampled entries"),
    ],
)
def test_each_disagreement_is_named_with_both_values(student, manifest, loss, message):
    with pytest.raises(ValueError, match=message):
        check_cache(_manifest(student, **manifest), replace(CONFIG, loss=LossConfig(**loss)), student, "a-cache")


def _check_finite(rank, world, loss_of_rank, gradient_norm):
    from megatron_kd import platform
    from megatron_kd.train.metrics import TrainingError, check_finite

    platform.init_distributed()
    values = {"loss": sum(loss_of_rank), "gradient_norm": gradient_norm}
    try:
        check_finite(7, values, torch.tensor([loss_of_rank[rank], 5.0]), [10 * rank, 10 * rank + 1])
    except TrainingError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("losses", "norm", "named"),
    [
        ((1.0, 2.0), 3.0, None),
        ((1.0, float("nan")), 3.0, "step 7: loss nan, gradient norm 3.0; rank 1 had samples [10, 11]."),
        ((1.0, 2.0), float("inf"), "rank 0 had samples [0, 1]; rank 1 had samples [10, 11]."),
    ],
)
def test_what_is_not_finite_is_traced_to_its_rank_and_samples(losses, norm, named):
    for message in run_ranks(_check_finite, 2, losses, norm):
        assert named in message if named else message is None
