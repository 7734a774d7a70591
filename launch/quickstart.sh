#!/usr/bin/env bash
# The main job from nothing: set-up, teacher, cache, student, evaluation, export. No GPU needed.
#
#   bash launch/quickstart.sh [--section.key value …]      overrides fields of configs/quickstart.yaml
#
# Every stage is a command of its own and can be run alone, or again: what is done already is not done twice.
set -euo pipefail
cd "$(dirname "$0")/.."
config=configs/quickstart.yaml
trap 'echo "quickstart stopped; the first error above is the cause. Run it again to go on from there." >&2' ERR

bash tools/setup_env.sh demo,plot
bin=${VENV:-.venv}/bin

# Nothing is downloaded: the teacher's weights come out of an installed package.
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

ranks=2
cores=$(nproc)
run() { # a distributed job: RANKS processes that share the cores
  OMP_NUM_THREADS=$((cores > ranks ? cores / ranks : 1)) "$bin/torchrun" --standalone --nproc-per-node $ranks "$@"
}

"$bin/megatron-kd" prepare --config $config "$@"
run launch/cache_teacher.py --config $config "$@"
run launch/distill.py --config $config "$@"
"$bin/megatron-kd" export --config $config "$@"
run -m megatron_kd.cli evaluate --config $config "$@"
"$bin/megatron-kd" report --config $config "$@"
