#!/usr/bin/env bash
# What only a GPU can show, in one go: under five minutes on one H200.
#
#   PYTHON=python3 bash tools/gpu_check.sh
#
# Needs torch ≥ 2.11, triton and pytest; the last part also the package itself (bash tools/setup_env.sh), and uses
# Transformer Engine's layers where it is installed. In order:
#   1. the GPU tests: numbers against fp64, Triton against torch, 64-bit offsets at 16,384 × 151,936, memory,
#      no waiting for the device
#   2. one rank's share of the paper's head (D 4096, 65,536 of 131,072 columns, K 100) at 32K, 64K and 256K positions:
#      measured peaks, time beside the bare GEMMs
#   3. peers, where installed
#   4. twenty steps of a small student in bf16 through the launchers, tensor-parallel over the GPUs
# and one table of all figures last. Without a GPU the same is run with tiny sizes, to check the script.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${OUT:-runs/gpu_check}
mkdir -p "$out"

if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  positions=(32768 65536 262144) peer_positions=(8192)
  shape=(--hidden 4096 --vocab 65536 --chunk 4096 --dtype bfloat16 --main-grad --repeats 3)
else
  echo "no CUDA device: a dry run with tiny sizes"
  positions=(64 128) peer_positions=(64)
  shape=(--hidden 32 --vocab 512 --topk 16 --chunk 32 --repeats 1)
fi

failed=0
echo "== GPU tests"
"$python" -m pytest -q -p no:cacheprovider -m gpu tests/loss || failed=1
echo "== the paper's head, one rank's share"
"$python" tools/bench_head.py --positions "${positions[@]}" "${shape[@]}" --out "$out/paper" --timeout 120 || failed=1
echo "== peers"
"$python" tools/bench_head.py --positions "${peer_positions[@]}" "${shape[@]}" --peers --out "$out/peers" --timeout 120 ||
  failed=1

echo "== twenty steps of a student"
if "$python" -c 'import megatron.core, transformers, zarr' 2>/dev/null; then
  rm -rf "$out/train"
  "$python" tools/train_check.py "$out/train" || failed=1
else
  echo "left out: megatron-core, transformers or zarr is not installed for $python"
fi

echo "== all figures ($out)"
"$python" tools/bench_head.py --show "$out/paper/head.csv" "$out/peers/head.csv"
exit "$failed"
