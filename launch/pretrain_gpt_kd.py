"""Distils into a GPT with Megatron-LM's own `pretrain()`: its arguments, and `--kd-*`.

    torchrun --nproc-per-node 8 launch/pretrain_gpt_kd.py --kd-cache URL --kd-kind ghost [Megatron-LM's arguments …]

Needs megatron-core 0.19, whose package holds `megatron.training`. `--help` lists every argument. Without a GPU add

    --distributed-backend gloo --transformer-impl local --use-cpu-initialization --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-rope-fusion --no-persist-layer-norm
"""

from megatron_kd import platform

if __name__ == "__main__":
    platform.enable_megatron_training_without_cuda()

    from megatron_kd.cache import CacheError
    from megatron_kd.entry import job
    from megatron_kd.plugin.megatron_lm import pretrain_gpt

    with job(CacheError):
        pretrain_gpt()
