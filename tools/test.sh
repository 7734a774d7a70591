#!/usr/bin/env bash
# The tests, in an environment of their own making.
#
#   bash tools/test.sh [--full] [PYTEST ARGUMENTS]     --full: whole grids and the slow ones, too
#
# PYTHON= and VENV= as in tools/setup_env.sh.
set -euo pipefail
cd "$(dirname "$0")/.."

selection=(-m "not full")
if [[ ${1:-} == --full ]]; then
  selection=()
  shift
fi

bash tools/setup_env.sh demo,plot,dev
bin=${VENV:-.venv}/bin
"$bin/ruff" check --quiet .
"$bin/ruff" format --quiet --check .
"$bin/mypy"

export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # ranks share the cores
# Two files at a time, as a file's tests share what is costly to set up, in the order of tests/conftest.py.
"$bin/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "${selection[@]}" "$@"
