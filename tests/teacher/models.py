"""Tiny random teachers on disk, made from a configuration; nothing is downloaded."""

from pathlib import Path

import torch
import yaml
from transformers import GptOssConfig, LlamaConfig, LlamaForCausalLM

from tests.data.texts import small_tokenizer, write_jsonl
from tests.tiny import SIZES, YARN_ROPE, save_random_model


def llama_config(vocab_size: int, **changes) -> LlamaConfig:
    """Grouped-query attention, tied embeddings; weights large enough that attention matters."""
    settings = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,
    }
    return LlamaConfig(**{**settings, **changes})


def save_llama(folder: Path, seed: int = 0, **changes) -> Path:
    """A Llama of two layers over the small tokenizer, as a Hugging Face folder."""
    tokenizer = small_tokenizer()
    torch.manual_seed(seed)
    LlamaForCausalLM(llama_config(len(tokenizer), **changes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_gpt_oss(folder: Path) -> Path:
    """A GPT-OSS of four layers over the small tokenizer, with windows that documents are longer than."""
    tokenizer = small_tokenizer()
    config = GptOssConfig(
        **{**SIZES, "vocab_size": len(tokenizer)}, num_local_experts=4, num_experts_per_tok=2, sliding_window=5,
        swiglu_limit=2.0, rope_parameters=YARN_ROPE, bos_token_id=None, eos_token_id=0, pad_token_id=None,
    )  # fmt: skip
    save_random_model(folder, config)
    tokenizer.save_pretrained(folder)
    return folder


def write_run(folder: Path, documents: int, *, micro_batch: int, data: dict, cache: dict) -> Path:
    """A tiny teacher, some text, and the configuration of a run over them: folder/run.yaml."""
    config = {
        "run_dir": str(folder / "run"),
        "teacher": {"model": str(save_llama(folder / "llama")), "micro_batch": micro_batch, "dtype": "float32"},
        "data": {"source": str(write_jsonl(folder / "text.jsonl", documents)), **data},
        "cache": cache,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return folder / "run.yaml"
