"""The configuration refuses what it does not know, and says what it does."""

import pytest

from megatron_kd.config_io import ConfigError, config_from_command_line, describe_fields, load_config

MINIMAL = "run_dir: runs/x\nteacher: {model: a}\ndata: {source: b}\n"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return path


def test_values_come_from_the_file_the_defaults_and_the_command_line_in_that_order(file):
    file.write_text(MINIMAL + "optimizer: {lr: 6e-4}\ntrain: {steps: 7}\n")
    config = load_config(file, ["--train.steps", "10", "--student.keep_layers=[0, 3]", "--seed", "5"])
    assert config.optimizer.lr == 6e-4  # YAML 1.1 reads 6e-4 as text; the field's type decides
    assert (config.train.steps, config.train.micro_batch) == (10, 1)
    assert (config.student.keep_layers, config.seed) == ((0, 3), 5)
    assert config.cache_url == "runs/x/teacher.zarr"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--train.setps", "10"], "unknown key 'train.setps'; did you mean 'steps'?"),
        (["--trian.steps", "10"], "unknown key 'trian'; did you mean 'train'?"),
        (["--cache.qqq", "1"], "known keys: url, split, "),
        (["--train.steps", "many"], "train.steps: found 'many'"),
        (["--train.steps"], "--train.steps: a value is missing"),
        (["--seed.deep", "1"], "--seed.deep: seed is not a section"),
        (["steps", "3"], "found 'steps' where --section.key was expected"),
        (["--train.micro_batch", "0"], "train.micro_batch: found 0: Input should be greater than 0"),
        (["--train.stop_after=-1"], "train.stop_after: found -1: Input should be greater than 0"),
        (["--train.checkpoints_kept=-1"], "train.checkpoints_kept: found -1: Input should be greater than or equal"),
        (["--optimizer.beta2", "1"], "optimizer.beta2: found 1: Input should be less than 1"),
        (["--cache.temperatures", "[1, 0]"], "cache.temperatures.1: found 0: Input should be greater than 0"),
        (["--loss.kind", "goose"], "'ghost', 'truncated' or 'renormalized'"),
    ],
)
def test_what_does_not_fit_is_named(file, overrides, message):
    file.write_text(MINIMAL + "seed: 1\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    assert message in str(caught.value)


def test_yes_and_no_are_words_and_true_and_false_are_not(file):
    file.write_text(MINIMAL + "optimizer: {distributed: no}\nstudent: {recompute: true}\n")
    assert load_config(file).optimizer.distributed == "no"
    assert load_config(file).student.recompute is True
    config = load_config(file, ["--optimizer.distributed", "yes", "--student.recompute=false"])
    assert (config.optimizer.distributed, config.student.recompute) == ("yes", False)


def test_missing_sections_and_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "absent.yaml")
    (tmp_path / "short.yaml").write_text("run_dir: x\n")
    with pytest.raises(ConfigError, match="teacher is missing"):
        load_config(tmp_path / "short.yaml")
    (tmp_path / "list.yaml").write_text("- a\n")
    with pytest.raises(ConfigError, match="mapping of sections"):
        load_config(tmp_path / "list.yaml")


def test_a_bad_configuration_ends_with_exit_code_2_and_one_message(file, capsys):
    with pytest.raises(SystemExit) as caught:
        config_from_command_line("a job", ["--config", str(file), "--train.setps", "3"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("error:") == 1


def test_every_field_is_documented():
    lines = [line.split() for line in describe_fields().splitlines()[1:]]
    undocumented = [words[0] for words in lines if len(words) < 2 or words[1].startswith("[")]
    assert undocumented == []


def test_a_file_says_what_differs_from_its_bases(tmp_path):
    """A later base is laid over an earlier one, the file over both; sections merge, lists and values replace."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "one.yaml").write_text(MINIMAL + "train: {steps: 7, global_batch: 4}\nstudent: {keep_layers: [1, 2]}\n")
    (tmp_path / "sub" / "two.yaml").write_text("train: {steps: 8}\n")
    top = tmp_path / "top.yaml"
    top.write_text("base: [one.yaml, sub/two.yaml]\nstudent: {keep_layers: [3]}\n")
    config = load_config(top, ["--train.micro_batch", "2"])
    assert (config.train.steps, config.train.global_batch, config.train.micro_batch) == (8, 4, 2)
    assert (config.student.keep_layers, config.teacher.model) == ((3,), "a")
    (tmp_path / "one.yaml").write_text("base: top.yaml\n")
    with pytest.raises(ConfigError, match="is its own base"):
        load_config(top)
    top.write_text("base: nowhere.yaml\n")
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file"):
        load_config(top)
