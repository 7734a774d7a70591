"""estimate, stats, merge, repair, inspect, and the commands."""

import argparse
import json

import numpy as np
import pytest

from megatron_kd.cache import (
    CacheError,
    CacheWriter,
    check_space,
    estimate,
    inspect,
    merge,
    recommended_block,
    repair,
    stats,
    verify,
)
from megatron_kd.cache.cli import add_commands
from tests.cache.targets import files, fill, manifest, table, targets

M = manifest()


@pytest.fixture
def folder(tmp_path):
    fill(CacheWriter.create(tmp_path / "c", M, table(M)))
    return tmp_path / "c"


def run(*argv):
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers(required=True))
    arguments = parser.parse_args([str(item) for item in argv])
    arguments.run(arguments)


def test_estimate_from_the_first_block(tmp_path):
    """Within 5 % of the outcome, objects exact; on a disk with room it passes, without it is refused."""
    m = manifest(samples=64, block=16, seq_length=64, vocab_size=5000)
    first = table(m)
    found = estimate(m, first, targets(m, range(16)))
    check_space(tmp_path / "c", found.bytes)
    fill(CacheWriter.create(tmp_path / "c", m, first))
    written = files(tmp_path / "c")
    assert found.objects == len(written)
    assert found.bytes == pytest.approx(sum(map(len, written.values())), rel=0.05)
    with pytest.raises(CacheError, match=r"needs 1048576\.00 GiB but the disk has"):
        check_space(tmp_path / "not" / "there", 1 << 50)
    check_space("s3://no/disk", 1 << 50)


def test_estimate_before_anything_ran():
    """K = 100 on a vocabulary of 49,152: 209 bytes a token, 172 with compact log-probs."""
    m = manifest(vocab_size=49152, k=100, samples=1000, seq_length=512)
    assert estimate(m).bytes_per_token == pytest.approx(208, rel=0.02)
    assert estimate(manifest(vocab_size=49152, k=100, codecs="compact")).bytes_per_token == pytest.approx(172, rel=0.02)


@pytest.mark.parametrize(
    ("samples", "writers", "block"),
    [(220, 2, 13), (10_000_000, 64, 986), (1, 8, 1), (0, 1, 1)],
)
def test_recommended_block(samples, writers, block):
    """64 MiB of ranks, 512 · 100 · 1.33 bytes a sample; eight blocks for each writer of a small set."""
    assert recommended_block(samples, 512, 100, writers) == block


def test_stats(folder, tmp_path):
    """Against sums over the targets themselves."""
    found, want = stats(folder), targets(M, range(10))
    on = want["loss_mask"] == 1
    p = np.exp(want["logprobs"].astype(np.float64))[on]
    assert found.positions == on.sum()
    for k in (1, 4, 8):  # fp16 log-probs: relative 2⁻¹¹ · |logprob| ≤ 2⁻⁷
        assert found.mass[k] == pytest.approx(p[:, :k].sum(-1).mean(), rel=2**-7)
    assert found.teacher_nll == pytest.approx(-want["label_logprob"][on].mean(), rel=1e-6)
    labels = (want["ids"] == want["tokens"][:, 1:, None]).any(-1)
    assert found.label_among_entries == pytest.approx(labels[on].mean())
    sizes = files(folder)
    assert found.bytes_by_array["topk_rank"] == sum(len(d) for n, d in sizes.items() if n.startswith("topk_rank/c."))
    assert "label among the entries" in str(found)
    pytest.importorskip("matplotlib")
    found.plot(tmp_path / "s.png")
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    assert stats(folder, max_blocks=1).blocks == 1


def test_stats_of_a_cache_without_blocks(tmp_path):
    CacheWriter.create(tmp_path, M, table(M))
    with pytest.raises(CacheError, match="no committed block"):
        stats(tmp_path)


def test_merge(tmp_path, folder):
    """Two halves, one with a damaged block; the damaged one is left behind, the whole equals the undisturbed cache."""
    a, b = tmp_path / "a", tmp_path / "b"
    fill(CacheWriter.create(a, M, table(M)), [0, 1])
    fill(CacheWriter.create(b, M, table(M)), [2])
    damaged = a / "logz" / "c.1.0.0"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    merged = merge(tmp_path / "m", [a, b])
    assert merged.missing == (1,)
    assert "block 1, array logz" in merged.damaged[0]
    fill(CacheWriter.create(tmp_path / "c2", M, table(M)), [1])
    assert merge(tmp_path / "m", [tmp_path / "c2"]).missing == ()
    assert files(tmp_path / "m") == files(folder)
    assert merge(tmp_path / "m", [a]).copied == {str(a): 0}


def test_merge_refuses_other_caches(tmp_path, folder):
    other = manifest(seed=5)
    CacheWriter.create(tmp_path / "seed", other, table(other))
    with pytest.raises(CacheError, match="seed: 0 here, 5 there"):
        merge(folder, [tmp_path / "seed"])
    CacheWriter.create(tmp_path / "table", M, np.arange(M.vocab_size))
    with pytest.raises(CacheError, match="tables id_by_rank"):
        merge(folder, [tmp_path / "table"])
    with pytest.raises(ValueError, match="sources is empty"):
        merge(folder, [])


def test_repair(folder):
    """Damaged blocks become missing, leftovers go, a resume completes; damaged metadata is refused."""
    before = files(folder)
    (folder / "tokens" / "c.1.0").write_bytes(b"x")
    (folder / "tokens" / "c.1.0.abc.partial").write_bytes(b"x")
    report, marked = repair(folder)
    assert marked == [1]
    assert report.leftovers == ("tokens/c.1.0.abc.partial",)
    writer = CacheWriter.resume(folder, M)
    assert writer.missing_blocks() == [1]
    fill(writer)
    assert files(folder) == before
    (folder / "zarr.json").write_text("{}")
    with pytest.raises(CacheError, match=r"zarr\.json"):
        repair(folder)


def test_inspect(folder):
    """Manifest, completeness, and positions in text: the first entry with its probability, the label marked."""
    text = inspect(folder, samples=[0, 99], positions=3, entries=8, decode=lambda ids: "/".join(f"w{i}" for i in ids))
    want = targets(M, range(1))
    assert "teacher              toy" in text
    assert "3 of 3 committed" in text
    assert "sample 99 does not exist" in text
    t = int(np.flatnonzero(want["loss_mask"][0])[0])
    assert f"{np.exp(want['logprobs'][0, t, 0]):.3f}" in text
    assert f"'w{want['tokens'][0, t + 1]}' came next" in text


def test_commands(folder, tmp_path, capsys):
    """Each prints its result; what is wrong ends in exit code 1 with the block named."""
    run("inspect", folder)
    run("stats", folder)
    run("verify", folder)
    assert "3 of 3 blocks good" in capsys.readouterr().out
    run("merge", tmp_path / "m", folder)
    assert "3 blocks from" in capsys.readouterr().out
    (folder / "segment" / "c.0.0").write_bytes(b"")
    with pytest.raises(SystemExit) as left:
        run("verify", folder)
    assert left.value.code == 1
    assert "block 0, array segment" in capsys.readouterr().out
    run("repair", folder)
    assert "marked missing: 0" in capsys.readouterr().out
    assert verify(folder).missing == (0,)
    with pytest.raises(SystemExit, match="holds no teacher cache"):
        run("inspect", tmp_path, "--storage-options", json.dumps({}))


def test_command_options_must_be_json(folder, capsys):
    with pytest.raises(SystemExit):
        run("verify", folder, "--storage-options", "[1]")
    assert "is not a JSON object" in capsys.readouterr().err
