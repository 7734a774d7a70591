"""The table of `tools/report_scaling.py` against numbers worked out by hand."""

import json

import pytest

from tools.report_scaling import PAPER, main, ratios, read_run, table


def write(folder, *records):
    folder.mkdir()
    lines = [json.dumps(record) + "\n" for record in records]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return str(folder)


def start(world_size, global_batch=4):
    return {"stage": "run", "world_size": world_size, "global_batch": global_batch, "sequence_length": 1000}


def steps(first, *seconds, tflops=100.0):
    return [
        {"stage": "distill", "step": step, "step_seconds": s, "tflops_per_gpu": tflops / s, "memory_gib": 1 + step / 8}
        for step, s in enumerate(seconds, start=first)
    ]


@pytest.fixture
def run(tmp_path):
    """Eight GPUs, 4,000 tokens a step. Restarted after step 6, which is done again; warm-up steps take 50 s."""
    return write(
        tmp_path / "eight",
        {"stage": "teacher", "samples": 3},
        start(2),
        *steps(1, 99.0, 99.0, 99.0, 99.0),  # on two GPUs: another layout
        start(8),
        *steps(1, 50.0, 50.0, 1.0, 2.0, 3.0, 77.0),
        start(8),
        *steps(6, 50.0, 50.0, 4.0, 10.0),
    )


def test_medians_and_quartiles_of_the_steps_that_count(run):
    """1, 2, 3, 4 and 10 s are left: quartiles 2, 3, 4. Peak: 1 + 9/8 GiB = 2.125·2³⁰ bytes = 2.2817 GB."""
    row = read_run(f"ours={run}", warmup=2, window=None)
    assert (row.name, row.gpus, row.tokens) == ("ours", 8, 4000)
    assert (row.seconds.low, row.seconds.median, row.seconds.high) == (2.0, 3.0, 4.0)
    assert (row.tflops.low, row.tflops.median, row.tflops.high) == (25.0, pytest.approx(100 / 3), 50.0)
    assert row.memory == pytest.approx(2.2817, abs=1e-4)
    assert row.window == "5 steps within 3–9; 2 after every start left out"
    assert row.speed == pytest.approx(4000 / 3 / 8)
    assert row.cost(None) == pytest.approx(8 * 3 / 3600 / 4000 * 1e9)  # 1,666.7 GPU-hours
    assert row.cost(3.0) == pytest.approx(5000)


def test_a_window_is_taken_as_given(run):
    row = read_run(run, warmup=0, window=(3, 4))
    assert (row.name, row.seconds.low, row.seconds.median, row.seconds.high) == ("eight", 1.25, 1.5, 1.75)
    with pytest.raises(ValueError, match="none of its 9 steps lies in 1–9 and 100 after a start"):
        read_run(run, warmup=100, window=None)


def test_the_papers_rows_give_the_ratios_that_its_review_found():
    """4.66 per GPU, 14.25 s for one node's tokens on four: 57.0 · 32/128; 1.17 in time."""
    four, one = PAPER["32k"]
    assert four.seconds_for(one.tokens) == pytest.approx(14.25)
    assert one.speed / four.speed == pytest.approx(4.66, abs=5e-3)
    # TFLOP/s and step time agree on what a token costs: that is where the batches come from.
    flops = [row.tflops.median * row.gpus * row.seconds.median / row.tokens for row in (four, one)]
    assert flops[0] == pytest.approx(flops[1], rel=2e-3)
    assert [cell.strip() for cell in ratios(PAPER["32k"]).splitlines()[-1].split("|")[2:-1]] == [
        "× 4.66", "÷ 4.66", "÷ 1.17", "÷ 4", "÷ 4.66", "÷ 4",
    ]  # fmt: skip
    # Tokens a second as the paper prints them, to their rounding.
    speeds = [row.speed for row in PAPER["8k"]]
    assert speeds == pytest.approx([10121, 14170, 14247, 12977], rel=2e-3)


def test_the_command_prints_the_table_and_draws(run, tmp_path, capsys):
    two = write(tmp_path / "two", start(2, 2), *steps(1, *[4.0] * 12))
    main([f"dense={two}", f"fused={run}", "--warmup", "2", "--dollars", "3", "--out", str(tmp_path / "out")])
    lines = capsys.readouterr().out.splitlines()
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith(("| dense", "| fused"))
    ]
    # Of the fewest tokens, 2,000: 4 s on two GPUs, 1.5 s on eight; 250 tokens/s a GPU against 166.7.
    assert cells[0] == ["dense", "2", "2,000", "4", "25", "2.7", "250", "4", "3,333.3"]
    assert cells[1] == ["fused", "8", "4,000", "3 (2–4)", "33.33 (25–50)", "2.3", "167", "1.5", "5,000.0"]
    assert cells[2] == ["fused", "× 0.67", "÷ 0.67", "÷ 2.67", "÷ 0.25", "÷ 1.33", "÷ 0.5"]
    assert table(PAPER["32k"], None).count("GPU-hours") == 1
    assert all((tmp_path / "out" / name).stat().st_size > 10_000 for name in ("layouts.png", "steps.png"))


def test_a_run_without_facts_is_refused(tmp_path):
    folder = write(tmp_path / "old", *steps(1, 1.0, 1.0))
    with pytest.raises(SystemExit, match="no record of stage 'run'"):
        main([folder])
