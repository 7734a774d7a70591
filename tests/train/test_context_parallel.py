"""Two context-parallel ranks compute what one does: the data they are given, the loss, and the step's sums.

Attention over context-parallel ranks is Transformer Engine's, so the model here has none: embedding, a linear layer,
output layer. Everything else is the trainer's: batches, plugin, schedule, DDP, finalize. Bound: fp32 sums in another
order, 1e-5 of the largest gradient.
"""

import pytest
import torch

from megatron_kd.config import LossConfig, ParallelConfig
from tests.distributed import run_ranks
from tests.tiny import FAMILY

LENGTH, K, VOCAB = 16, 4, 40
# Two micro-batches' masks: one valid token in all, on the last position; tokens of one half only; every other one.
MASKS = {
    "one token": ([0] * 15 + [1], [0] * 16),
    "one half": ([1] * 8 + [0] * 8, [0] * 4 + [1] * 12),
    "every other": ([1, 0] * 8, [1] * 16),
}


def _model(config):
    from megatron.core.enums import ModelType
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.module import MegatronModule

    class Model(MegatronModule):
        """What the plugin needs of a model, around a map of each position for itself."""

        model_type, post_process = ModelType.encoder_or_decoder, True

        def __init__(self):
            super().__init__(config)
            self.embedding = torch.nn.Embedding(VOCAB, config.hidden_size)
            self.middle = torch.nn.Linear(config.hidden_size, config.hidden_size)
            self.output_layer = ColumnParallelLinear(
                config.hidden_size, VOCAB, config=config, init_method=config.init_method, bias=False
            )

        def forward(self, tokens, position_ids, attention_mask, labels=None):
            hidden = self.middle(self.embedding(tokens)).transpose(0, 1).contiguous()
            return self.compute_language_model_loss(labels, self.output_layer(hidden)[0])

        def compute_language_model_loss(self, labels, logits):
            raise AssertionError("the plugin passes the loss through")

        def set_input_tensor(self, tensor):
            pass

    torch.manual_seed(0)
    model = Model()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    return model


def _batches(masks, rank, ranks):
    from megatron_kd.data.attention import document_attention
    from megatron_kd.data.dataset import Batch, take_context
    from megatron_kd.loss import TeacherTopK

    g = torch.Generator().manual_seed(3)
    for number, mask in enumerate(masks):
        tokens = torch.randint(0, VOCAB, (1, LENGTH + 1), generator=g)
        logprobs, ids = (torch.randn(1, LENGTH, VOCAB, generator=g) * 2).log_softmax(-1).topk(K)
        segment = (torch.arange(LENGTH) >= 8).long()[None]
        batch = Batch(
            samples=(number,),
            tokens=tokens[:, :-1],
            labels=tokens[:, 1:],
            position_ids=torch.arange(LENGTH)[None],
            segment=segment,
            loss_mask=torch.tensor([mask]).float(),
            teacher=TeacherTopK(ids, logprobs),
            label_logprob=None,
            attention=document_attention(segment, packed=False),
        )
        yield take_context(batch, rank, ranks) if ranks > 1 else batch


def _steps(rank, world):
    """{masks: (loss sum and tokens over all ranks, gradients, sums of the plugin's metrics)}."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    from megatron_kd import platform
    from megatron_kd.plugin import attach
    from megatron_kd.student.architecture import transformer_config
    from megatron_kd.student.model import initialize_parallel
    from megatron_kd.train.metrics import sum_over_ranks
    from megatron_kd.train.step import run_forward_backward

    platform.init_distributed()
    initialize_parallel(ParallelConfig(context=world), seed=1)
    config = transformer_config(FAMILY["llama 3, untied"], ParallelConfig(context=world), dtype=torch.float32)
    config.finalize_model_grads_func = finalize_model_grads
    model = _model(config)
    handle = attach([model], LossConfig(ce_weight=0.3, chunk_tokens=3))
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    found = {}
    for name, masks in MASKS.items():
        wrapped.zero_grad_buffer()
        context = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
        logged = run_forward_backward(
            [wrapped], handle, [_batches(masks, *context)], micro_batches=2, shape=(1, LENGTH // world)
        )
        gradients = {name: p.main_grad.tolist() for name, p in model.named_parameters()}
        found[name] = sum_over_ranks(handle, logged, memory=100 + rank), gradients
    return found


@pytest.fixture(scope="module")
def whole():
    return run_ranks(_steps, 1)[0]


def test_two_ranks_compute_what_one_does(whole):
    for found in run_ranks(_steps, 2):
        for name, (sums, gradients) in found.items():
            wanted_sums, wanted = whole[name]
            assert sums.pop("memory") == 101  # the larger of the two
            assert sums == pytest.approx({key: wanted_sums[key] for key in sums}, rel=1e-5), name
            assert sums["loss_tokens"] == sum(map(sum, MASKS[name]))
            for parameter, values in wanted.items():
                expected = torch.tensor(values)
                difference = (torch.tensor(gradients[parameter]) - expected).abs().max()
                assert difference <= 1e-5 * expected.abs().max(), (name, parameter)
