"""The plan against public parameter counts, the paper's figures, and its own formulas when one size moves."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_kd.cli import main
from megatron_kd.config_io import load_config
from megatron_kd.plan.calibration import EFFICIENCY, OVERHEAD_BYTES
from megatron_kd.plan.memory import layer_activations, stage_memory
from megatron_kd.plan.planned import plan_run
from megatron_kd.plan.report import make_report, to_table
from megatron_kd.plan.shape import model_parameters
from megatron_kd.plan.step_time import model_flops_per_token, step_time, tflops_per_gpu
from tools import plan_paper

ROOT = Path(__file__).resolve().parent.parent.parent
FUSED_8K, ONE_NODE = "llama31_8b_to_3b_8k_fused", "gpt_oss_20b_32k_one_node"
FOUR_NODES = "gpt_oss_20b_32k_four_nodes_dense"
WITH_MODELS = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml") if path.stem != "quickstart")


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)  # configurations name configs/models/… from there


def run_of(name, *overrides):
    return plan_run(load_config(f"configs/{name}.yaml", overrides))


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        # As published with the checkpoints; the isolated head's: embedding, head, one layer's linears and three norms.
        (FUSED_8K, 3_212_749_824),
        (ONE_NODE, 20_914_757_184),
        ("gpt_oss_20b_32k_one_gpu_head", 2 * 131_072 * 4096 + 2 * 4096 * (4096 + 1024) + 3 * 4096 * 4096 + 3 * 4096),
    ],
)
def test_parameters_are_the_published_ones(config, parameters):
    assert model_parameters(run_of(config).shape) == parameters


def test_teachers_parameters_are_the_published_ones():
    assert model_parameters(run_of(FUSED_8K).teacher) == 8_030_261_248
    assert model_parameters(run_of(ONE_NODE).teacher) == 116_829_156_672


def test_flops_a_token_are_the_papers():
    """3.13e10 at 32K; at 8K what TFLOP/s · seconds / tokens gives in the paper's four rows, 23.3e9 to 23.5e9."""
    assert model_flops_per_token(run_of(ONE_NODE)) == pytest.approx(3.13e10, rel=0.005)
    assert model_flops_per_token(run_of(FUSED_8K)) == pytest.approx(23.4e9, rel=0.01)


@pytest.mark.parametrize("name", WITH_MODELS)
def test_every_configuration_can_be_planned(name):
    assert make_report(name, run_of(name)).peak_gib > 0


def test_the_papers_figures():
    """Memory within 15 % everywhere, the one node's step within 20 %; the four dense nodes': see docs/plan.md."""
    for row, report in plan_paper.reports().items():
        if row.peak_gib is not None:
            assert report.peak_gib == pytest.approx(row.peak_gib, rel=0.15), row.config
        if row.step_s is not None and "four_nodes" not in row.config:
            assert report.time.total == pytest.approx(row.step_s, rel=0.20), row.config


def test_the_constants_are_the_fit_and_the_document_is_current():
    """Rounded to 3 digits; the document is what the tool would write."""
    planned = plan_paper.reports()
    efficiency, overhead = plan_paper.fit(planned)
    assert efficiency == pytest.approx(EFFICIENCY, abs=6e-4)
    assert overhead == pytest.approx(OVERHEAD_BYTES / 2**30, abs=6e-3)
    assert (ROOT / "docs" / "plan.md").read_text(encoding="utf-8") == plan_paper.document(planned)


def memory_of(run):
    return stage_memory(run, run.layout.pipeline - 1)


def test_memory_moves_with_sequence_vocabulary_entries_and_ranks():
    """8K fused, one rank: twice S, more V, more K, then two ranks, each term by its formula."""
    base = run_of(FUSED_8K)
    m, h, s = memory_of(base), 3072, 8192
    assert m.parameters == 2 * 3_212_749_824
    assert (m.gradients, m.optimizer) == (2 * m.parameters, 6 * m.parameters)
    assert m.targets == s * (8 * 100 + 48)
    assert m.activations == (28 + 2) * 2 * s * h  # recomputed: one input a layer, and the final norm's two

    longer = memory_of(run_of(FUSED_8K, "--data.sequence_length", "16384"))
    assert (longer.parameters, longer.optimizer) == (m.parameters, m.optimizer)
    assert longer.targets == 2 * m.targets
    assert longer.activations == 2 * m.activations
    assert longer.layer == 2 * m.layer
    assert longer.head - m.head == s * (2 * h + 96)  # the chunk stays

    wider = memory_of(replace(base, shape=replace(base.shape, vocab=base.shape.vocab + 1280)))
    assert wider.parameters - m.parameters == 2 * 1280 * h
    assert wider.head - m.head == 2 * 4096 * 1280

    more = memory_of(run_of("llama31_8b_to_3b_8k_fused_k256"))
    assert more.targets - m.targets == s * 8 * 156
    assert more.head - m.head == 144 * 4096 * 156

    two = memory_of(run_of(FUSED_8K, "--hardware.gpus_per_node", "2", "--parallel.tensor", "2"))
    norms = 2 * (2 * 28 + 1) * h  # on every rank
    assert two.parameters == (m.parameters - norms) / 2 + norms
    assert (two.targets, two.activations) == (m.targets, m.activations)
    assert m.head - two.head == 2 * 4096 * 128_256 / 2
    assert m.layer - two.layer == 2 * s * (2 * 3072 + 2 * 1024 + 3 * 8192) / 2

    split = ("--hardware.gpus_per_node", "2", "--parallel.tensor", "2", "--parallel.sequence_parallel", "true")
    assert memory_of(run_of(FUSED_8K, *split)).activations == m.activations / 2


def test_memory_of_replicas_stages_and_recomputation():
    base = run_of(ONE_NODE)
    m = memory_of(base)
    # Experts' state is shared by two replicas, the rest by four.
    experts = 24 * 8 * (3 * 2880 * 2880 + 3 * 2880)
    assert m.optimizer == 12 * ((m.parameters / 2 - experts) / 4 + experts / 2)
    assert memory_of(run_of(ONE_NODE, "--optimizer.distributed", "'no'")).optimizer == 6 * m.parameters
    assert m.activations == 24 * layer_activations(base.shape, base) + 4 * 16_384 * 2880
    assert memory_of(run_of(ONE_NODE, "--student.recompute", "true")).activations == (24 + 2) * 2 * 16_384 * 2880
    staged = run_of(FOUR_NODES, "--student.recompute", "false")
    kept = [stage_memory(staged, stage).activations for stage in range(4)]
    layer = layer_activations(staged.shape, staged)
    assert kept == [6 * 4 * layer, 6 * 3 * layer, 6 * 2 * layer, 6 * layer + 4 * 8192 * 2880]


def test_step_time_moves_with_what_it_depends_on():
    base = run_of(FUSED_8K)
    time, peak = step_time(base), EFFICIENCY * 989e12
    stage = time.slowest
    body = 2 * (28 * (3072 * 5120 + 3072 * 3072 + 3 * 3072 * 8192)) + 28 * 4 * 3072 * 8192 / 2
    head = 2 * 3072 * 128_256
    assert stage.compute == pytest.approx(8192 * 4 * (body + head) / peak)  # recomputed layers, four projections
    at_once = step_time(run_of(FUSED_8K, "--loss.backward", "in_forward"))
    assert stage.compute - at_once.slowest.compute == pytest.approx(8192 * head / peak)
    assert stage.tensor == stage.expert == stage.pipeline == time.bubble == time.data == 0
    assert step_time(run_of(FUSED_8K, "--hardware.tflops", "1978")).slowest.compute == pytest.approx(stage.compute / 2)
    assert step_time(run_of(FUSED_8K, "--hardware.memory_gb_s", "9600")).slowest.memory == pytest.approx(
        stage.memory / 2
    )
    assert step_time(run_of(FUSED_8K, "--train.global_batch", "64")).micro_batches == 64
    assert tflops_per_gpu(base, 20.2) == pytest.approx(304, rel=0.01)  # the paper's own pair

    node = step_time(run_of(ONE_NODE)).slowest
    link = EFFICIENCY * 450e9
    assert node.tensor == pytest.approx((5 * 24 + 3) * 2 * 32_768 * 2880 / 2 / link)
    assert node.expert == pytest.approx(4 * 24 * 2 * 16_384 * 4 * 2880 * 3 / 4 / link)
    assert step_time(run_of(ONE_NODE, "--hardware.link_gb_s", "900")).slowest.tensor == pytest.approx(node.tensor / 2)
    four = step_time(run_of(FOUR_NODES))
    assert four.slowest.pipeline == pytest.approx(2 * 2 * 8192 * 2880 / (EFFICIENCY * 50e9))
    assert four.slowest == four.stages[-1]
    assert four.bubble == pytest.approx(sum(stage.total for stage in four.stages[:-1]))


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        (FUSED_8K, ["--hardware.gpus_per_node", "3"], "train.global_batch = 32 does not divide by .* = 3"),
        (FUSED_8K, ["--parallel.tensor", "2"], "gpus_per_node = 1 does not divide by .* = 2"),
        (
            FUSED_8K,
            ["--hardware.gpus_per_node", "5", "--parallel.tensor", "5"],
            "num_attention_heads = 24 .*tensor = 5",
        ),
        (FUSED_8K, ["--hardware.gpus_per_node", "3", "--parallel.pipeline", "3"], "num_hidden_layers = 28 .* = 3"),
        (FUSED_8K, ["--hardware.gpus_per_node", "3", "--parallel.context", "3"], "sequence_length = 8192 .* = 6"),
        (FUSED_8K, ["--hardware.gpus_per_node", "2", "--parallel.expert", "2"], "the model has no experts"),
        (ONE_NODE, ["--parallel.expert", "6"], "experts = 32 .* parallel.expert = 6"),
        (ONE_NODE, ["--parallel.tensor", "16", "--hardware.nodes", "2"], "num_key_value_heads = 8 .*tensor = 16"),
        (ONE_NODE, ["--parallel.sequence_parallel", "false"], "experts need it with parallel.tensor > 1"),
        (ONE_NODE, ["--train.global_batch", "30"], "train.global_batch = 30 does not divide by .* = 4"),
        (ONE_NODE, ["--student.config", "nowhere.json"], "student: no configuration found at 'nowhere.json'"),
    ],
)
def test_what_does_not_divide_is_refused_by_its_number(name, overrides, message):
    with pytest.raises(ValueError, match=message):
        run_of(name, *overrides)


def test_one_json_object_a_configuration_whatever_its_name(tmp_path, capsys):
    """A copy under another name gives the same numbers."""
    for folder in ("hardware",):
        shutil.copytree(ROOT / "configs" / folder, tmp_path / folder)
    shutil.copy(ROOT / "configs" / f"{ONE_NODE}.yaml", tmp_path / "x.yaml")
    main(["plan", f"configs/{ONE_NODE}.yaml", str(tmp_path / "x.yaml"), "--json", "--train.global_batch", "64"])
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    keys = "config world_size tokens_per_step step_time_s tflops_per_gpu peak_gib head_gib fits"
    assert list(first) == keys.split()
    assert (first.pop("config"), second.pop("config")) == (ONE_NODE, "x")
    assert first == second
    assert (first["world_size"], first["tokens_per_step"], first["fits"]) == (8, 64 * 32_768, True)


def test_the_table_shows_configurations_side_by_side():
    reports = [make_report(name, run_of(name)) for name in (ONE_NODE, f"{ONE_NODE}_dense", FOUR_NODES)]
    table = to_table(reports)
    rows = {line[:34].strip(): line[34:].split() for line in table.splitlines()}
    assert rows[""] == [report.name for report in reports]
    assert rows["peak"] == [f"{report.peak_gib:.1f}" for report in reports]
    assert rows["step"] == [f"{report.time.total:.2f}" for report in reports]
    assert [word for word in rows["fits"] if word in ("yes,", "no:")] == ["yes,", "no:", "no:"]
    for report in reports:
        stage = report.stages[report.fullest]
        terms = [getattr(stage, name) for name in vars(stage)]
        assert stage.peak == sum(terms) - min(stage.head, stage.layer)


def test_what_the_cache_costs():
    """Tokens · forward FLOPs over the node's rate; online with the 120B teacher does not fit one node."""
    cache = make_report("x", run_of(FUSED_8K)).cache
    assert cache.tokens == 1000 * 32 * 8192
    teacher = run_of(FUSED_8K).teacher
    forward = 2 * (model_parameters(teacher) - 128_256 * 4096) + 32 * 4 * 4096 * 8192 / 2
    assert cache.build_seconds == pytest.approx(cache.tokens * forward / (EFFICIENCY * 989e12), rel=1e-3)  # norms
    assert cache.size.bytes == pytest.approx(cache.tokens * (100 * (1.33 + 0.65) + 11), rel=0.01)
    assert cache.online_fits
    assert 0 < cache.break_even_steps < 1000
    assert not make_report("x", run_of(ONE_NODE)).cache.online_fits
