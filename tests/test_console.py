"""What a run shows is what it records; other ranks are silent; a log file stays readable."""

import json

from megatron_kd.console import Console, byte_count, duration, read_records, read_steps


def test_records_go_to_the_file_and_key_value_lines_to_stderr(tmp_path, capsys):
    console = Console(0, tmp_path / "run" / "metrics.jsonl")
    console.stage("Distil")
    console.quantity("samples", 12, "of the cache")
    with console.progress("distill", 3, "step") as progress:
        for step in range(1, 4):
            progress.update(step, {"kl": 1.0 / step})
    console.close()
    out, err = capsys.readouterr()
    assert out == ""
    assert "\r" not in err
    lines = err.splitlines()
    assert lines[0] == "== Distil"
    assert lines[1].split() == ["samples", "12", "of", "the", "cache"]
    assert lines[-1].startswith("stage=distill step=3 total=3 kl=0.3333 eta=")
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3]
    assert [record["kl"] for record in records] == [1.0, 0.5, 1 / 3]


def test_the_file_is_appended_to(tmp_path):
    for value in (1, 2):
        console = Console(0, tmp_path / "metrics.jsonl")
        console.record({"value": value})
        console.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_the_last_record_of_a_step_counts_and_a_line_cut_short_is_left_out(tmp_path):
    """As after a restart: steps 2 and 3 are done again, and the first process died while it wrote."""
    path = tmp_path / "metrics.jsonl"
    for steps, loss in (((1, 2, 3), 1.0), ((2, 3, 4), 2.0)):
        console = Console(0, path)
        with console.progress("distill", 4, "step") as progress:
            for step in steps:
                progress.update(step, {"loss": loss})
        console.record({"stage": "evaluate", "step": 9})
        console.close()
        with path.open("a") as file:
            file.write('{"stage": "distill", "st')
    assert {step: record["loss"] for step, record in read_steps(path).items()} == {1: 1.0, 2: 2.0, 3: 2.0, 4: 2.0}
    assert len(read_records(path)) == 8


def test_other_ranks_are_silent(tmp_path, capsys):
    console = Console(1, tmp_path / "metrics.jsonl")
    console.stage("x")
    console.note("x")
    with console.progress("x", 1, "step") as progress:
        progress.update(1, {"y": 1})
    assert capsys.readouterr() == ("", "")
    assert not (tmp_path / "metrics.jsonl").exists()


def test_units():
    assert [duration(s) for s in (4.4, 65, 3 * 3600 + 725)] == ["4s", "1m05s", "3h12m"]
    assert [byte_count(n) for n in (12, 2048, 3 * 2**30)] == ["12 B", "2.0 KiB", "3.0 GiB"]
