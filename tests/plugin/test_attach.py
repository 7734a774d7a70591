"""The plugin trains a Megatron model on exactly the loss's definition, and without targets is not there at all."""

from importlib.metadata import version

import pytest
import torch

from megatron_kd.config import LossConfig, ParallelConfig
from megatron_kd.loss import KDObjective, TeacherTopK, reference
from tests.distributed import run_ranks
from tests.tiny import FAMILY, SIZES, megatron_twin, save_random_model

BATCH, LENGTH, K = 2, 24, 8
LOSS = LossConfig(kind="ghost", ce_weight=0.25, chunk_tokens=7)
OBJECTIVE = KDObjective(kind="ghost", ce_weight=0.25)
HAS_PROCESSOR = version("megatron-core") >= "0.18"


def _inputs(seed):
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, SIZES["vocab_size"], (BATCH, LENGTH + 1), generator=random)
    logits = torch.randn(BATCH, LENGTH, SIZES["vocab_size"], generator=random) * 2
    logprobs, ids = logits.log_softmax(-1).topk(K)
    mask = (torch.rand(BATCH, LENGTH, generator=random) > 0.2).float()
    return tokens, TeacherTopK(ids, logprobs), mask


def _batch(seed):
    from megatron_kd.data.attention import document_attention
    from megatron_kd.data.dataset import Batch

    tokens, teacher, mask = _inputs(seed)
    segment = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    return Batch(
        samples=tuple(range(BATCH)),
        tokens=tokens[:, :-1],
        labels=tokens[:, 1:],
        position_ids=torch.arange(LENGTH).expand(BATCH, -1),
        segment=segment,
        loss_mask=mask,
        teacher=teacher,
        label_logprob=None,
        attention=document_attention(segment, packed=False),
    )


def _build(folder, attached):
    """A GPTModel with the folder's weights; where there is no folder, a hybrid model with random ones."""
    from megatron_kd.plugin import attach

    chunks = [_hybrid_model() if folder is None else _gpt_model(folder)]
    return chunks[0], attach(chunks, LOSS, vocab_size=SIZES["vocab_size"]) if attached else None


def _gpt_model(folder):
    from megatron_kd.student.hf_weights import HfWeights

    weights = HfWeights(folder)
    (chunk,), _ = megatron_twin(weights.config, weights, LENGTH)
    return chunk


def _hybrid_model():
    """Attention and MLP layers as Megatron's hybrid models stack them: HybridModel, which 0.16 calls MambaModel."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    from megatron_kd.student.architecture import transformer_config

    try:
        from megatron.core.models.hybrid import hybrid_block as block
        from megatron.core.models.hybrid.hybrid_model import HybridModel as Model

        stack, submodules, pattern = block.HybridStack, block.HybridStackSubmodules, "hybrid_layer_pattern"
    except ImportError:
        from megatron.core.models.mamba import MambaModel as Model
        from megatron.core.ssm import mamba_block as block

        stack, submodules, pattern = block.MambaStack, block.MambaStackSubmodules, "hybrid_override_pattern"
    block.TENorm = WrappedTorchNorm  # the stack's last norm is Transformer Engine's, whatever its layers are made of
    layer = get_gpt_layer_local_spec(normalization="RMSNorm").submodules
    attention = TransformerLayerSubmodules(
        input_layernorm=layer.input_layernorm, self_attention=layer.self_attention, self_attn_bda=layer.self_attn_bda
    )
    mlp = TransformerLayerSubmodules(pre_mlp_layernorm=layer.pre_mlp_layernorm, mlp=layer.mlp, mlp_bda=layer.mlp_bda)
    spec = submodules(
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
        mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
    )
    config = transformer_config(FAMILY["llama 3, untied"], ParallelConfig(), dtype=torch.float32)
    model = Model(
        config,
        ModuleSpec(module=stack, submodules=spec),
        384,
        LENGTH,
        **{pattern: "*-*-"},
        position_embedding_type="rope",
    )
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1 if "norm" in name else 0, 0.3)
    return model


def _forward(model, tokens, labels=True, **options):
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None].expand(BATCH, -1, -1, -1)
    return model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:] if labels else None, **options)


def _defined(logits, teacher, tokens, mask, objective):
    """The loss's definition on logits [b·S, V], as the head of an identity projection."""
    return reference(
        logits,
        torch.eye(logits.shape[1]),
        TeacherTopK(teacher.ids.flatten(0, 1), teacher.logprobs.flatten(0, 1)),
        objective=objective,
        labels=tokens[:, 1:].flatten(),
        loss_mask=mask.flatten(),
    )


def _gradients(model):
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = None
    return gradients


def _relative(found, expected):
    return max(((found[name] - expected[name]).abs().max() / expected[name].abs().max()).item() for name in expected)


def _check(rank, world, folder):
    from megatron_kd import platform
    from megatron_kd.student.model import initialize_parallel

    platform.init_distributed()
    initialize_parallel(ParallelConfig(), seed=1)
    (stock, _), (model, handle) = _build(folder, False), _build(folder, True)
    found = {"keys": list(stock.state_dict()) == list(model.state_dict())}
    found["names"] = type(stock.output_layer).__name__ == type(model.output_layer).__name__

    # Stock behaviour, before, between and after distillation.
    tokens, teacher, mask = _inputs(1)
    _forward(stock, tokens).sum().backward()
    expected = _gradients(stock)
    for moment in ("before", "after"):
        loss = _forward(model, tokens)
        loss.sum().backward()
        gradients = _gradients(model)
        found[f"stock {moment}"] = all(torch.equal(gradients[name], expected[name]) for name in expected)
        found[f"logits {moment}"] = torch.equal(_forward(model, tokens, False), _forward(stock, tokens, False))
        if moment == "before":
            handle.set_targets(model, teacher, labels=tokens[:, 1:], loss_mask=mask)
            _forward(model, tokens)
            handle.pop_metrics()

    # Two micro-batches queued before either runs: first in, first out.
    batches = [_inputs(seed) for seed in (2, 3)]
    for tokens, teacher, mask in batches:
        handle.set_targets(model, teacher, labels=tokens[:, 1:], loss_mask=mask)
    for index, (tokens, teacher, mask) in enumerate(batches):
        loss = _forward(model, tokens)
        loss.sum().backward()
        gradients = _gradients(model)
        logits = _forward(stock, tokens, False).flatten(0, 1)[:, : SIZES["vocab_size"]]
        wanted = _defined(logits, teacher, tokens, mask, OBJECTIVE)
        wanted.sum().backward()
        found[f"loss {index}"] = (loss.flatten() - wanted).abs().max().item()
        found[f"gradient {index}"] = _relative(gradients, _gradients(stock))
        student = logits.softmax(-1).gather(1, teacher.ids.flatten(0, 1)).sum(1)
        sums = {
            "kd": _defined(logits, teacher, tokens, mask, KDObjective(kind="ghost")),
            "ce": _defined(logits, teacher, tokens, mask, KDObjective(kd_weight=0, ce_weight=1)),
            "tail": (1 - teacher.logprobs.exp().sum(-1)).flatten() * mask.flatten(),
            "support": student * mask.flatten(),
        }
        metrics = handle.pop_metrics()
        for name, value in sums.items():
            found[f"{name} {index}"] = abs(metrics[name].item() / value.sum().item() - 1)
        found[f"tokens {index}"] = metrics["tokens"].item() == mask.sum().item()
    found["queue"] = handle.pop_metrics() == {}
    return found


@pytest.mark.parametrize("name", ["llama, tied", "llama 3, untied", "hybrid"])
def test_loss_gradients_and_metrics_are_the_definitions(tmp_path, name):
    """fp32 through four layers: 1e-5 relative to each tensor's largest gradient; everything stock bit for bit."""
    folder = None if name == "hybrid" else save_random_model(tmp_path / "model", FAMILY[name])
    (found,) = run_ranks(_check, 1, folder)
    exact = {key: value for key, value in found.items() if isinstance(value, bool)}
    close = {key: value for key, value in found.items() if not isinstance(value, bool)}
    assert all(exact.values()), exact
    assert all(value < 1e-5 for value in close.values()), close


def _refusals(rank, world, folder):
    from megatron_kd import platform
    from megatron_kd.plugin import attach
    from megatron_kd.student.model import initialize_parallel

    platform.init_distributed()
    initialize_parallel(ParallelConfig(), seed=1)
    messages = {}

    def refused(what, model):
        try:
            attach([model], LOSS, vocab_size=SIZES["vocab_size"])
            messages[what] = "accepted"
        except ValueError as error:
            messages[what] = str(error)

    for what in (
        "use_mup",
        "final_logit_softcapping",
        "logit_dtype",
        "fp8_output_proj",
        "defer_embedding_wgrad_compute",
    ):
        model, _ = _build(folder, False)
        setattr(model.config, what, 1)
        refused(what, model)
    hybrid, _ = _build(None, False)  # has no output processor in any version
    hybrid.config.mtp_num_layers = 1
    refused("mtp_num_layers", hybrid)
    model, _ = _build(folder, False)
    for attribute, value, what in (
        ("gather_output", True, "parallel_output=False"),
        ("gtp_remat_size", 2, "gtp_remat_size = 2"),
    ):
        before = getattr(model.output_layer, attribute, None)
        setattr(model.output_layer, attribute, value)
        refused(what, model)
        setattr(model.output_layer, attribute, before or 0)
    attach([model], LOSS, vocab_size=SIZES["vocab_size"])
    refused("overridden already", model)
    model, _ = _build(folder, False)
    model.output_layer = torch.nn.Sequential(model.output_layer)  # as an adapter wraps it
    refused("Sequential", model)

    try:
        attach([], LossConfig(implementation="online"))
    except ValueError as error:
        messages["'online'"] = str(error)

    model, handle = _build(folder, True)
    tokens, teacher, mask = _inputs(1)
    handle.set_targets(model, teacher, loss_mask=mask)
    try:
        _forward(model, tokens, runtime_gather_output=True)
    except ValueError as error:
        messages["runtime_gather_output"] = str(error)
    return messages


def test_settings_under_which_the_loss_would_be_wrong_are_refused_by_name(tmp_path):
    folder = save_random_model(tmp_path / "model", FAMILY["llama 3, untied"])
    (messages,) = run_ranks(_refusals, 1, folder)
    assert len(messages) == 12
    assert all(what in message for what, message in messages.items()), messages


def _multi_token_prediction(rank, world):
    """How far the loss and the gradients of an attached model with such a head are from those of a stock one."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec

    from megatron_kd import platform
    from megatron_kd.plugin import attach
    from megatron_kd.student.architecture import transformer_config
    from megatron_kd.student.model import initialize_parallel
    from megatron_kd.train.step import forward_step

    platform.init_distributed()
    initialize_parallel(ParallelConfig(), seed=1)
    config = transformer_config(FAMILY["llama 3, untied"], ParallelConfig(), dtype=torch.float32)
    config.mtp_num_layers, config.mtp_loss_scaling_factor = 1, 0.5
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    results = []
    for attached in (True, False):
        model = GPTModel(
            config,
            spec,
            SIZES["vocab_size"],
            LENGTH,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False),
        )
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            parameter.data.normal_(1 if "norm" in name else 0, 0.3)
        batch = _batch(1)
        if attached:
            handle = attach([model], LossConfig(kd_weight=0, ce_weight=1), vocab_size=SIZES["vocab_size"])
            loss, _ = forward_step(handle, iter([batch]), model)
        else:
            inputs = batch.tokens, batch.position_ids, batch.attention.mask
            loss = model(*inputs, labels=batch.labels, loss_mask=batch.loss_mask) * batch.loss_mask
        loss.sum().backward()
        results.append((loss.detach(), _gradients(model)))
    (loss, gradients), (wanted_loss, wanted_gradients) = results
    return (loss - wanted_loss).abs().max().item(), _relative(gradients, wanted_gradients)


@pytest.mark.skipif(not HAS_PROCESSOR, reason="GPTModel takes an output processor from megatron-core 0.18 on")
def test_multi_token_prediction_heads_keep_their_own_loss():
    """Distilling with the weights 0·KD + 1·CE is training on labels, masked ones left out: fp32, 1e-5."""
    ((loss, gradient),) = run_ranks(_multi_token_prediction, 1)
    assert loss <= 1e-5
    assert gradient <= 1e-5
