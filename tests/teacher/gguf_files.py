"""A tiny GGUF file written tensor by tensor, to convert back."""

from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import LlamaForCausalLM

from tests.data.texts import small_tokenizer
from tests.teacher.models import llama_config

_Q4_1 = gguf.GGMLQuantizationType.Q4_1


def write_gguf(path: Path) -> LlamaForCausalLM:
    """Writes a random Llama in Q4_1 and returns the same model with its weights as the file holds them."""
    tokenizer = small_tokenizer()
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_config(len(tokenizer), rope_parameters={"rope_type": "default", "rope_theta": 1e5}))
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(1e5)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, tokenizer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    weights = dict(model.named_parameters())  # the tied head is not among them
    for name, parameter in weights.items():
        stem = name.removesuffix(".weight")
        values = parameter.detach().numpy()
        if parameter.dim() == 1 or values.shape[1] % 32:  # a norm, or rows that are no whole blocks
            writer.add_tensor(names.get_name(stem) + ".weight", values)
            continue
        quantized = gguf.quants.quantize(values, _Q4_1)
        restored = gguf.quants.dequantize(quantized, _Q4_1)
        for projection, count in heads.items():
            if stem.endswith(projection):
                quantized = gguf.quants.quantize(_interleaved(values, count), _Q4_1)
        writer.add_tensor(names.get_name(stem) + ".weight", quantized, raw_dtype=_Q4_1)
        parameter.data = torch.from_numpy(restored.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model.eval()


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from (first half, second half) to pairs: the other of the two rotary layouts."""
    rows = weight.shape[0] // heads
    return weight.reshape(heads, 2, rows // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer) -> None:
    import json

    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (len(tokens) - 1))
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    writer.add_unk_token_id(0)
