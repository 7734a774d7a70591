"""Prepared samples: whole or absent, made once, never overwritten, and the very tokens of the text."""

import dataclasses
import json

import numpy as np
import pytest

from megatron_kd.config import DataConfig, RunConfig, TeacherConfig
from megatron_kd.console import Console
from megatron_kd.data.document import SourceError
from megatron_kd.data.packing import PackedSamples, TokenStream
from megatron_kd.data.samples import GIVEN, load_samples, prepare, sample_parameters, split_documents, write_samples
from megatron_kd.data.tokenizer import load_tokenizer, tokenizer_hash, vocabulary_size
from tests.data.texts import sentences, small_tokenizer, write_jsonl

SILENT = Console(rank=1)


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


def run_config(folder, documents=20, **data) -> RunConfig:
    folder.mkdir(exist_ok=True)
    source = write_jsonl(folder / "text.jsonl", documents)
    settings = {"source": str(source), "sequence_length": 32, **data}
    return RunConfig(run_dir=str(folder / "run"), teacher=TeacherConfig(model="m"), data=DataConfig(**settings))


def test_the_samples_are_the_text(tmp_path, tokenizer):
    """Joined again, the training samples are the first 18 of 20 documents, each closed by the end token."""
    folder = prepare(run_config(tmp_path), tokenizer, SILENT)
    wanted = [id for text in sentences(20)[:18] for id in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    train, held_out = load_samples(folder, "train"), load_samples(folder, "held_out")
    joined = [*train.tokens[:, :-1].ravel(), train.tokens[-1, -1]]
    assert joined[: len(wanted)] == wanted
    assert set(joined[len(wanted) :]) <= {tokenizer.eos_token_id}
    assert (train.counts.documents, train.counts.tokens, train.counts.samples) == (18, len(wanted), len(train))
    assert train.counts.learnt == train.loss_mask.sum() == len(wanted) - 18
    assert held_out.counts.documents == 2
    assert tokenizer.decode(held_out.tokens[0][:5]) == tokenizer.decode(tokenizer(sentences(20)[18])["input_ids"][:5])
    assert (train.tokens.dtype, train.segment.dtype, train.loss_mask.dtype) == (np.int32, np.int32, np.uint8)


def test_preparing_again_changes_nothing(tmp_path, tokenizer):
    config = run_config(tmp_path)
    folder = prepare(config, tokenizer, SILENT)
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*")}
    assert prepare(config, tokenizer, SILENT) == folder
    assert before == {file: file.stat().st_mtime_ns for file in folder.rglob("*")}
    assert [path.name for path in folder.parent.iterdir()] == ["samples"]  # nothing temporary is left


def test_other_samples_are_never_overwritten(tmp_path, tokenizer):
    config = run_config(tmp_path)
    prepare(config, tokenizer, SILENT)
    longer = dataclasses.replace(config, data=dataclasses.replace(config.data, sequence_length=64))
    with pytest.raises(ValueError, match="sequence_length: 32 there, 64 asked for"):
        prepare(longer, tokenizer, SILENT)
    write_jsonl(tmp_path / "text.jsonl", 21)
    with pytest.raises(ValueError, match="source_hash"):
        prepare(config, tokenizer, SILENT)


def test_a_moved_source_is_the_same_source(tmp_path, tokenizer):
    config = run_config(tmp_path)
    prepare(config, tokenizer, SILENT)
    moved = (tmp_path / "text.jsonl").rename(tmp_path / "moved.jsonl")
    prepare(dataclasses.replace(config, data=dataclasses.replace(config.data, source=str(moved))), tokenizer, SILENT)


def test_samples_made_elsewhere_are_taken_as_they_are_if_their_tokenizer_is_the_teachers(tmp_path, tokenizer):
    config = run_config(tmp_path, source=GIVEN)
    random = np.random.default_rng(0)
    tokens = random.integers(0, 300, (5, 33), dtype=np.int32)
    segment = np.repeat(np.array([[0, 1]], np.int32), 16, 1).repeat(5, 0)
    mask = random.integers(0, 2, (5, 32), dtype=np.uint8)
    pieces = (PackedSamples(tokens[rows], segment[rows], mask[rows]) for rows in (slice(0, 2), slice(2, 5)))
    made = {**sample_parameters(config.data, tokenizer), "source": "a data set", "packing": "its own"}
    write_samples(config.samples_dir, {"train": (5, pieces)}, made)

    train = load_samples(prepare(config, tokenizer, SILENT), "train")
    for name, wanted in (("tokens", tokens), ("segment", segment), ("loss_mask", mask)):
        assert np.array_equal(getattr(train, name), wanted)
    assert (train.counts.documents, train.counts.samples, train.counts.learnt) == (10, 5, mask.sum())
    with pytest.raises(ValueError, match="tokenizer_hash"):
        prepare(config, small_tokenizer(280), SILENT)


def test_max_samples_spreads_fewer_training_samples_over_the_whole_text(tmp_path, tokenizer):
    whole = load_samples(prepare(run_config(tmp_path), tokenizer, SILENT), "train")
    fewer = run_config(tmp_path, max_samples=3, samples_dir=str(tmp_path / "fewer"))
    train = load_samples(prepare(fewer, tokenizer, SILENT), "train")
    assert len(train) == train.counts.samples == 3
    chosen = [0, len(whole) // 3, 2 * len(whole) // 3]
    for name in ("tokens", "segment", "loss_mask"):
        assert np.array_equal(getattr(train, name), getattr(whole, name)[chosen])
    assert train.counts.tokens == 3 * 33  # none of the three begins where another ends
    assert train.counts.learnt == train.loss_mask.sum()
    assert train.counts.documents == sum(len(set(row)) for row in train.segment.tolist())
    assert len(load_samples(tmp_path / "fewer", "held_out")) > 3


def test_documents_are_filled_up_to_a_multiple(tmp_path, tokenizer):
    """For context parallelism: every document of every sample divides by 4; what was added is never learnt."""
    plain = prepare(run_config(tmp_path / "plain"), tokenizer, SILENT)
    filled = prepare(run_config(tmp_path / "filled", document_multiple=4), tokenizer, SILENT)
    for split in ("train", "held_out"):
        samples = load_samples(filled, split)
        for segment in samples.segment:
            assert (np.bincount(segment) % 4 == 0).all()
        assert samples.counts.learnt == load_samples(plain, split).counts.learnt
        assert samples.counts.documents == load_samples(plain, split).counts.documents
    one = prepare(run_config(tmp_path / "one", documents=1, document_multiple=4, held_out=0.5), tokenizer, SILENT)
    assert all((np.bincount(segment) % 4 == 0).all() for segment in load_samples(one, "held_out").segment)
    with pytest.raises(ValueError, match=r"data.document_multiple is 5; a divisor of data.sequence_length = 32"):
        prepare(run_config(tmp_path / "odd", document_multiple=5), tokenizer, SILENT)


def test_no_text_leaves_nothing_behind(tmp_path, tokenizer):
    with pytest.raises(SourceError, match="no text in it"):
        prepare(run_config(tmp_path, documents=0), tokenizer, SILENT)
    assert not list((tmp_path / "run").iterdir())


def test_missing_samples_say_what_makes_them(tmp_path):
    with pytest.raises(ValueError, match="megatron-kd prepare"):
        load_samples(tmp_path, "train")


def test_a_split_without_documents_is_empty(tmp_path, tokenizer):
    folder = prepare(run_config(tmp_path, held_out=0.0), tokenizer, SILENT)
    assert load_samples(folder, "held_out").tokens.shape == (0, 33)


def equal_documents(count, length) -> TokenStream:
    tokens = np.arange(count * length, dtype=np.int32)
    return TokenStream(tokens, np.arange(count, dtype=np.int64) * length, np.ones(len(tokens), np.uint8))


@pytest.mark.parametrize(
    ("documents", "fraction", "train", "held_out"),
    [(20, 0.1, 18, 2), (25, 0.1, 23, 2), (10, 0.1, 9, 1), (3, 0.0, 3, 0), (4, 0.5, 2, 2)],
)
def test_the_last_documents_are_held_out(documents, fraction, train, held_out):
    stream = equal_documents(documents, 5)
    split = split_documents(stream, fraction)
    assert (len(split["train"].starts), len(split["held_out"].starts)) == (train, held_out)


def test_a_single_document_is_cut():
    stream = equal_documents(1, 1000)
    split = split_documents(stream, 0.1)
    assert (len(split["train"].tokens), len(split["held_out"].tokens)) == (900, 100)
    assert split["held_out"].tokens[0] == 900
    with pytest.raises(ValueError, match="0 ≤ held_out < 1"):
        split_documents(stream, 1.0)


def test_the_tokenizer_hash_tells_vocabularies_apart_and_survives_saving(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(tmp_path)
    again("text", truncation=True, max_length=2)  # what a call leaves behind is not the tokenizer
    assert tokenizer_hash(again) == tokenizer_hash(tokenizer)
    other = small_tokenizer()
    other.add_tokens(["<new>"])
    assert tokenizer_hash(other) != tokenizer_hash(tokenizer)
    assert vocabulary_size(other) == vocabulary_size(tokenizer) + 1 == 301


def test_a_folder_without_tokenizer_or_end_token_is_refused(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="no tokenizer"):
        load_tokenizer(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings.pop("eos_token")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    with pytest.raises(ValueError, match="no eos_token"):
        load_tokenizer(tmp_path)
