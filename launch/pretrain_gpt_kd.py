"""Distils into a GPT with Megatron-LM's own `pretrain()`: its arguments, and `--kd-*`.

    torchrun --nproc-per-node 8 launch/pretrain_gpt_kd.py --kd-cache URL --kd-kind ghost [Megatron-LM's arguments …]

Needs megatron-core 0.19, whose package holds `megatron.training`. `--help` lists every argument. Without a GPU add

    --distributed-backend gloo --transformer-impl local --use-cpu-initialization --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-rope-fusion --no-persist-layer-norm
"""

from megatron_kd import platform

if __name__ == "__main__":
    platform.enable_megatron_training_without_cuda()

    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    from megatron_kd.cache import CacheError
    from megatron_kd.entry import job
    from megatron_kd.plugin.megatron_dataset import gpt_datasets
    from megatron_kd.plugin.megatron_lm import Distillation, add_kd_arguments

    with job(CacheError):
        args = parse_and_validate_args(extra_args_provider=add_kd_arguments)
        kd = Distillation(args)
        model = gpt_config_from_args(args)
        model.pre_wrap_hooks.append(kd.pre_wrap_hook)
        config = pretrain_cfg_container_from_args(args, model)
        pretrain(config, kd.datasets(gpt_datasets), ModelType.encoder_or_decoder, kd.forward_step)
