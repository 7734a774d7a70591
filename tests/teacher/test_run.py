"""The launcher's work in one process: what it writes, what it skips, what it refuses."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_kd.cache import CacheError, CacheWriter, TeacherCache
from megatron_kd.config import CacheConfig, DataConfig, RunConfig, TeacherConfig
from megatron_kd.console import Console
from megatron_kd.data.samples import load_samples
from megatron_kd.teacher import fill
from megatron_kd.teacher.blocks import TeacherError
from megatron_kd.teacher.engine import Replica
from megatron_kd.teacher.hf import HfEngine
from megatron_kd.teacher.run import cache_teacher
from tests.data.texts import write_jsonl
from tests.teacher.models import save_llama

K, LENGTH = 12, 48


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A tiny random teacher and thirty documents."""
    folder = tmp_path_factory.mktemp("teacher")
    save_llama(folder / "llama")
    write_jsonl(folder / "text.jsonl", 30)
    return folder


def run_config(teacher, run_dir, **cache) -> RunConfig:
    return RunConfig(
        run_dir=str(run_dir),
        teacher=TeacherConfig(model=str(teacher / "llama"), micro_batch=3, chunk_tokens=50, dtype="float32"),
        data=DataConfig(source=str(teacher / "text.jsonl"), sequence_length=LENGTH, max_samples=18),
        cache=CacheConfig(**{"k": K, "block": 4, "temperatures": (1.0, 2.0), **cache}),
    )


def objects(url):
    """Bytes of every object of a cache; the group's own metadata holds the time it was made."""
    root = Path(url)
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file() and p.parent != root}


@pytest.fixture(scope="module")
def cache(teacher, tmp_path_factory):
    """A cache of all samples, made by one process."""
    return cache_teacher(run_config(teacher, tmp_path_factory.mktemp("run")))


def test_the_cache_holds_the_teachers_distribution(teacher, cache):
    """Against transformers on each document alone, fp64 softmax; float16 keeps 11 bits of a log-probability."""
    samples = load_samples(cache.replace("teacher.zarr", "samples"), "train")
    model = AutoModelForCausalLM.from_pretrained(teacher / "llama").eval()
    batch = TeacherCache.open(cache).read(range(len(samples)))
    assert len(samples) == 18
    for number in range(len(samples)):
        tokens = torch.from_numpy(np.array(samples.tokens[number])).long()
        segment = samples.segment[number]
        for document in range(segment.max() + 1):
            begin, end = np.flatnonzero(segment == document)[[0, -1]] + [0, 1]
            with torch.no_grad():
                logits = model(tokens[None, begin:end]).logits[0].double()
            wanted = logits.log_softmax(-1)
            ids = torch.from_numpy(np.array(batch.ids[number, begin:end])).long()
            logprobs = torch.from_numpy(np.array(batch.logprobs[number, begin:end])).double()
            assert (ids.sort(-1).values == wanted.topk(K).indices.sort(-1).values).all()
            torch.testing.assert_close(logprobs, wanted.gather(1, ids), rtol=2**-11, atol=1e-4)
            labels = tokens[begin + 1 : end + 1]
            found = torch.from_numpy(np.array(batch.label_logprob[number, begin:end])).double()
            torch.testing.assert_close(found, wanted.gather(1, labels[:, None])[:, 0], rtol=1e-5, atol=1e-4)
            tail = wanted.scatter(1, ids, -torch.inf).logsumexp(-1)
            found = torch.from_numpy(np.array(batch.tail_logprob[number, begin:end])).double()
            torch.testing.assert_close(found, tail, rtol=2**-10, atol=1e-4)


def test_ranks_share_the_blocks_and_give_the_same_bytes(teacher, cache, tmp_path, monkeypatch):
    """Rank 0 of 2, then rank 1 of 2; one process alone made the other."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        url = cache_teacher(run_config(teacher, tmp_path))
        missing = CacheWriter.resume(url, TeacherCache.open(url).manifest).missing_blocks()
        assert missing == {"0": [1, 3], "1": []}[rank]
    assert objects(url) == objects(cache)


def test_a_run_computes_only_what_is_missing(teacher, cache, tmp_path, monkeypatch):
    """One block's commit word is gone: that block is computed again, to the same bytes, and no other."""
    config = run_config(teacher, tmp_path)
    url = cache_teacher(config)
    commit = tmp_path / "teacher.zarr" / "commit" / "c.2"
    commit.unlink()
    computed = []
    compute = fill.compute_block
    monkeypatch.setattr(fill, "compute_block", lambda *a: computed.append(a[2]) or compute(*a))
    cache_teacher(config)
    assert computed == [2]
    assert objects(url) == objects(cache)
    cache_teacher(config)
    assert computed == [2]


def test_a_cache_of_other_targets_is_refused(teacher, tmp_path):
    cache_teacher(run_config(teacher, tmp_path))
    with pytest.raises(CacheError, match="k: 5 here, 12 there"):
        cache_teacher(run_config(teacher, tmp_path, k=5))


def test_k_beyond_the_vocabulary_is_refused(teacher, tmp_path):
    with pytest.raises(ValueError, match="k is 301 but the vocabulary has 300"):
        cache_teacher(run_config(teacher, tmp_path, k=301))


def test_a_teacher_that_overflows_is_named_and_writes_nothing(teacher, tmp_path, monkeypatch):
    stock = HfEngine.hidden_states

    def broken(self, tokens, segment):
        hidden = stock(self, tokens, segment)
        if tokens.shape[1] == LENGTH:
            hidden[1, 5] = torch.inf
        return hidden

    monkeypatch.setattr(HfEngine, "hidden_states", broken)
    with pytest.raises(TeacherError, match="not finite at sample 1, position 5"):
        cache_teacher(run_config(teacher, tmp_path))
    assert not (tmp_path / "teacher.zarr").exists()


def test_a_disk_that_is_too_small_is_refused_before_the_teacher_runs(teacher, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 1))
    monkeypatch.setattr(HfEngine, "__init__", None)
    with pytest.raises(CacheError, match="free some, lower k"):
        cache_teacher(run_config(teacher, tmp_path))


def test_a_failing_write_ends_the_run(teacher, tmp_path, monkeypatch):
    def fails(self, index, arrays):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CacheWriter, "write_block", fails)
    with pytest.raises(OSError, match="No space left"):
        cache_teacher(run_config(teacher, tmp_path))


def test_the_held_out_samples_can_be_cached_too(teacher, tmp_path):
    config = run_config(teacher, tmp_path, split="held_out")
    manifest = TeacherCache.open(cache_teacher(config)).manifest
    assert "split=held_out" in manifest.packing
    assert manifest.samples == len(load_samples(config.samples_dir, "held_out"))


def test_a_split_without_samples_is_refused(teacher, tmp_path):
    config = run_config(teacher, tmp_path, split="held_out")
    with pytest.raises(ValueError, match="no samples in split held_out"):
        cache_teacher(replace(config, data=replace(config.data, held_out=0.0)))


def test_another_order_of_training_uses_the_same_cache(teacher, tmp_path):
    config = run_config(teacher, tmp_path)
    assert cache_teacher(config) == cache_teacher(replace(config, seed=config.seed + 1))


def test_progress_is_recorded(teacher, tmp_path):
    config = run_config(teacher, tmp_path)
    cache_teacher(config)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["samples"] for record in records][-1] == 18
    assert all(record["nll"] > 0 and record["tokens_per_second"] > 0 for record in records)


def test_drawn_targets_go_through_the_cache(teacher, cache, tmp_path):
    """Blocks of a manifest that samples: mass 1, the same draws whichever block a sample stands in."""
    samples = load_samples(cache.replace("teacher.zarr", "samples"), "train")
    topk = TeacherCache.open(cache).manifest
    engine = HfEngine(teacher / "llama", torch.float32, torch.device("cpu"))
    found = []
    for block in (2, 3):
        manifest = replace(topk, entries="sampled", draws=8, k=8, block=block, micro_batch=1)
        url = str(tmp_path / f"{block}.zarr")
        fill.fill(url, manifest, None, range(manifest.blocks), samples, engine, chunk_tokens=50, console=Console(1),
                  replica=Replica(0, 1))  # fmt: skip
        found.append(TeacherCache.open(url).read(range(len(samples))))
    assert np.array_equal(found[0].ids, found[1].ids)
    mass = np.where(np.asarray(found[0].ids) >= 0, np.exp(found[0].logprobs), 0).sum(-1)
    np.testing.assert_allclose(mass, 1, atol=8 * 2**-11)  # each of at most 8 log-probs is rounded to float16
