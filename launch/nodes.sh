#!/usr/bin/env bash
# A distributed job on one node or several: start it on each of them with the same arguments.
#
#   bash launch/nodes.sh --nodes N --config FILE [options] [--section.key value …]
#
#   --nodes N         nodes that take part; one_node.sh and four_nodes.sh say it for you
#   --job NAME        distill (default) or cache_teacher: the program launch/NAME.py
#   --node-rank R     which of the nodes this is, from 0        default: SLURM_NODEID, or 0 of one
#   --master HOST     node 0, as the others can reach it        default: MASTER_ADDR, the first of Slurm's nodes, or
#                                                               127.0.0.1 for one
#   --port P          of the rendezvous on node 0; the next one serves the pre-flight
#                                                               default: MASTER_PORT, or 29500
#   --gpus G          GPUs of a node, a rank each; 0: one rank on the CPU
#                                                               default: SLURM_GPUS_ON_NODE, or 8
#   --max-restarts R  how often the ranks are started again after a failure (3)
#   --log-dir DIR     a log of every rank (runs/logs)
#   --no-preflight    do not examine the nodes first
#   --dry-run         show what would be run
#
# Everything else belongs to the program: its configuration, and fields of it. A rank that fails, a killed one too, has
# all nodes start theirs again and go on from the newest checkpoint, whatever it failed of; when node 0 itself is lost,
# the job ends. What a run writes, metrics and checkpoints, must lie where all nodes see it. PYTHON= chooses the
# interpreter.
set -euo pipefail

fail() {
  echo "error: $*" >&2
  exit 2
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}

# Slurm writes several hosts as n[03-06,09],m1; the first of these is n03.
first_host() {
  local hosts=$1
  while [[ $hosts =~ ^([^,[]*)\[([0-9]+)[^]]*\](.*)$ ]]; do
    hosts=${BASH_REMATCH[1]}${BASH_REMATCH[2]}${BASH_REMATCH[3]}
  done
  echo "${hosts%%,*}"
}

nodes='' config='' dry_run='' preflight=yes
job=distill
node_rank=${SLURM_NODEID:-}
master=${MASTER_ADDR:-$(first_host "${SLURM_STEP_NODELIST:-${SLURM_JOB_NODELIST:-}}")}
port=${MASTER_PORT:-29500}
gpus=${SLURM_GPUS_ON_NODE:-8}
max_restarts=3
log_dir=runs/logs
program_arguments=()
while (($#)); do
  case $1 in
    --dry-run) dry_run=yes && shift && continue ;;
    --no-preflight) preflight='' && shift && continue ;;
    --*=*) program_arguments+=("$1") && shift && continue ;;
  esac
  (($# > 1)) || fail "$1: a value is missing"
  case $1 in
    --nodes) nodes=$2 ;;
    --job) job=$2 ;;
    --node-rank) node_rank=$2 ;;
    --master) master=$2 ;;
    --port) port=$2 ;;
    --gpus) gpus=$2 ;;
    --max-restarts) max_restarts=$2 ;;
    --log-dir) log_dir=$2 ;;
    --config) config=$2 ;;
    *) program_arguments+=("$1" "$2") ;;
  esac
  shift 2
done

[[ -n $nodes ]] || fail "--nodes is missing"
[[ -n $config ]] || fail "--config is missing"
[[ -f $config ]] || fail "--config $config: no such file"
[[ $job =~ ^(distill|cache_teacher)$ ]] || fail "--job is $job: distill or cache_teacher is needed"
for number in nodes port gpus max_restarts; do
  [[ ${!number} =~ ^[0-9]+$ ]] || fail "--${number//_/-} is ${!number}: a number is needed"
done
[[ ${SLURM_NNODES:-$nodes} == "$nodes" ]] || fail "--nodes is $nodes, but Slurm gave ${SLURM_NNODES} nodes"
if ((nodes == 1)); then
  node_rank=${node_rank:-0} master=${master:-127.0.0.1}
fi
if ! [[ $node_rank =~ ^[0-9]+$ ]] || ((node_rank >= nodes)); then
  fail "--node-rank is '$node_rank': of $nodes node(s), a number from 0 to $((nodes - 1)) is needed"
fi
[[ -n $master ]] || fail "--master is missing: name node 0, on every node the same"

ranks=$((gpus > 0 ? gpus : 1)) # on this node
run_id=${SLURM_JOB_ID:-megatron_kd}
is_host=$([[ $node_rank == 0 ]] && echo true || echo false)

# --- settings; each can be chosen otherwise from outside -------------------------------------------------------------

# The project is imported from this checkout, on all nodes the same.
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
# Memory. Long sequences ask for few large blocks of changing size, for which fixed segments fragment: a segment grows.
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
# Kernels start in the order in which they were issued: tensor parallelism overlaps its communication with the GEMM
# that was issued after it, and Megatron-Core counts on that up to Hopper.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
# NCCL says what is wrong with the network, and which version it is, and nothing else.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# A collective that hangs is given up by torch's watchdog after its time-out. What each rank was waiting for is then
# left on disk: its last so many collectives, where these files say.
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000}
export TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}
export TORCH_FR_DUMP_TEMP_FILE=${TORCH_FR_DUMP_TEMP_FILE:-$log_dir/collectives_of_rank_}
# Every start of the ranks meets in a new store. torchrun would otherwise keep one, in which a restarted rank finds the
# addresses of the ranks before it (pytorch issue 135712).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}
# After SIGTERM the ranks finish their step and write a checkpoint; torchrun kills what still runs after so many seconds.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-240}

torchrun=("$python" -m torch.distributed.run --nnodes "$nodes" --rdzv-backend c10d --rdzv-conf "is_host=$is_host"
  --log-dir "$log_dir/node_$node_rank" --tee 3)
examine=("${torchrun[@]}" --rdzv-id "$run_id-preflight" --rdzv-endpoint "$master:$((port + 1))" --nproc-per-node 1
  --role preflight -m megatron_kd.cli preflight --config "$config" --job "$job" --gpus-per-node "$gpus"
  "${program_arguments[@]}")
start=("${torchrun[@]}" --rdzv-id "$run_id" --rdzv-endpoint "$master:$port" --nproc-per-node "$ranks"
  --max-restarts "$max_restarts" --role "$job" "$root/launch/$job.py" --config "$config" "${program_arguments[@]}")

# --- what comes of all that ------------------------------------------------------------------------------------------

quantity() { printf '  %-24s %-20s %s\n' "$@" >&2; }
echo "== Launch" >&2
quantity "job" "$job" "launch/$job.py --config $config ${program_arguments[*]}"
quantity "nodes" "$nodes" "this is node $node_rank of 0 to $((nodes - 1))"
quantity "ranks" "$((nodes * ranks))" "$ranks a node, on $( ((gpus)) && echo GPUs || echo the CPU)"
quantity "rendezvous" "$master:$port" "$run_id; pre-flight at port $((port + 1))"
quantity "restarts" "$max_restarts" "of the ranks of a node, by its torchrun"
quantity "logs" "$log_dir" "node_$node_rank/…/attempt_N/LOCAL_RANK/{stdout,stderr}.log"
quantity "interpreter" "$python" ""
# What a site sets for its network is not ours to choose, but belongs in the log.
for variable in "${!NCCL_@}" "${!TORCH_@}" "${!GLOO_@}" PYTORCH_ALLOC_CONF CUDA_DEVICE_MAX_CONNECTIONS; do
  echo "  $variable=${!variable}" >&2
done

if [[ -n $dry_run ]]; then
  [[ -z $preflight ]] || { printf '%q ' "${examine[@]}" && echo; }
  printf '%q ' "${start[@]}" && echo
  exit
fi
mkdir -p "$log_dir/node_$node_rank"
if [[ -n $preflight ]] && ! "${examine[@]}"; then
  echo "error: the pre-flight failed; its table says where and why, in the log of one node (--no-preflight starts anyway)" >&2
  exit 1
fi
exec "${start[@]}" # a signal for this script is one for torchrun
