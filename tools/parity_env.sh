#!/usr/bin/env bash
# The environment of the parity tests: PATH of a virtual environment, in which trl and verl run on a CPU beside this library.
# verl's own dependencies ask for a GPU's worth of packages; the list below is what importing the functions takes.
set -euo pipefail
env=${1:?usage: parity_env.sh ENVIRONMENT [WHEEL]}
root=$(cd "$(dirname "$0")/.." && pwd)
python3 -m venv "$env"
. "$env/bin/activate"
python -m pip install -q --upgrade pip
pip install -q 'torch==2.13.0'
pip install -q 'trl==1.16.0'
pip install -q --no-deps 'verl==0.9.1'
pip install -q 'ray[data]' tensordict omegaconf hydra-core codetiming orjson peft pybind11 pylatexenc \
  pillow torchdata cachetools aiohttp fastapi uvicorn
GRPO_FAST_NATIVE=1 pip install -q "${2:-$root}[test]"
