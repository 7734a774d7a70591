"""The hf engine: hidden states, isolated documents, and heads it cannot represent."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Cohere2Config, Gemma2Config, GPT2Config, MambaConfig, MistralConfig

from megatron_kd.plan.allocator import measure
from megatron_kd.teacher.engine import positions_in_documents
from megatron_kd.teacher.hf import HfEngine, gpu_share
from megatron_kd.teacher.topk import topk_targets
from tests.teacher.models import llama_config, save_llama

CPU = torch.device("cpu")
SEGMENT = torch.tensor([[0] * 9 + [1] + [2] * 14, [0] * 24])


def load(folder, dtype=torch.float32):
    return HfEngine(folder, dtype, CPU)


def save(folder, config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return folder


def small(cls, **changes):
    """A configuration of two layers; weights large enough that attention matters."""
    settings = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    settings |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3}
    settings |= {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
    return cls(**settings | changes)


def test_positions_restart_with_each_document():
    assert positions_in_documents(torch.tensor([[0, 0, 0, 1, 2, 2]])).tolist() == [[0, 1, 2, 0, 0, 1]]


@pytest.mark.parametrize(
    "config",
    [
        small(MistralConfig, sliding_window=4),  # a window shorter than the documents
        GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3),
    ],
    ids=["sliding-window", "absolute-positions"],
)
def test_packed_documents_are_as_if_alone(tmp_path, config):
    """Against one document at a time without any mask of ours. fp32 rounding of hidden states of size 1–10."""
    engine = load(save(tmp_path, config))
    alone = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.manual_seed(1)
    tokens = torch.randint(300, SEGMENT.shape)
    hidden = engine.hidden_states(tokens, SEGMENT)
    assert not hidden.requires_grad
    logits = hidden @ engine.head.weight.T
    for sample, begin, end in [(0, 0, 9), (0, 9, 10), (0, 10, 24), (1, 0, 24)]:
        with torch.no_grad():
            expected = alone(tokens[sample : sample + 1, begin:end]).logits[0]
        torch.testing.assert_close(logits[sample, begin:end], expected, rtol=1e-4, atol=1e-4)


def test_what_an_engine_says_of_itself(tmp_path):
    engine = load(save_llama(tmp_path))
    assert engine.head.weight.shape == (300, 32)
    assert engine.head.bias is None
    assert (engine.vocabulary_rows, engine.dtype) == (300, torch.float32)
    assert engine.parameters == sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(tmp_path).parameters())


def test_a_model_placed_by_memory_is_the_same_model(tmp_path):
    """Through the placement that splits a model over GPUs; here the only device is the CPU."""
    folder = save_llama(tmp_path)
    tokens = torch.arange(24)[None].expand(2, -1) % 300
    placed = HfEngine(folder, torch.float32, CPU, max_memory={"cpu": 1 << 30})
    assert torch.equal(placed.hidden_states(tokens, SEGMENT), load(folder).hidden_states(tokens, SEGMENT))
    with pytest.raises(ValueError, match=str(folder)):
        HfEngine(folder, torch.float32, CPU, max_memory={"cpu": 1000})


def test_gpus_are_shared_out_among_the_local_ranks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (1000 * (gpu + 1), 10_000))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert gpu_share() == {4: 4000, 5: 4800, 6: 5600, 7: 6400}
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert gpu_share() is None


def test_no_tensor_of_sequence_times_vocabulary_exists(tmp_path):
    """128 positions in chunks of 8: the peak of engine and top-K together stays under a quarter of [S, V] floats."""
    vocab_size, length = 20_000, 128
    folder = save(tmp_path, llama_config(vocab_size))
    engine = load(folder)
    tokens = torch.arange(length + 1)[None]

    def targets():
        hidden = engine.hidden_states(tokens[:, :-1], torch.zeros(1, length).long())[0]
        return topk_targets(hidden, engine.head, tokens[0, 1:], k=10, vocab_size=vocab_size, chunk_tokens=8)

    targets()
    assert measure(targets, CPU).peak < length * vocab_size * 4 / 4


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (small(Gemma2Config, final_logit_softcapping=30.0), "Gemma2ForCausalLM has final_logit_softcapping=30.0"),
        (small(Cohere2Config, logit_scale=0.25), "Cohere2ForCausalLM has logit_scale=0.25"),
    ],
    ids=["soft-cap", "scale"],
)
def test_a_head_that_is_more_than_a_projection_is_refused_by_name(tmp_path, config, message):
    with pytest.raises(ValueError, match=message):
        load(save(tmp_path, config))


def test_a_model_that_sees_across_documents_is_refused(tmp_path):
    """A state-space model carries its state from one packed document into the next."""
    config = MambaConfig(vocab_size=300, hidden_size=32, num_hidden_layers=2, state_size=4, initializer_range=0.3)
    with pytest.raises(ValueError, match="documents are not isolated"):
        load(save(tmp_path, config))


def test_an_unknown_change_of_the_logits_is_found(tmp_path, monkeypatch):
    """No setting names it: the model's own logits give it away."""
    from transformers import LlamaForCausalLM

    stock = LlamaForCausalLM.forward

    def scaled(self, *args, **kwargs):
        output = stock(self, *args, **kwargs)
        output.logits *= 1.01
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", scaled)
    with pytest.raises(ValueError, match="logits are not hidden"):
        load(save_llama(tmp_path))


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot load it as a causal language model"):
        load(tmp_path)
