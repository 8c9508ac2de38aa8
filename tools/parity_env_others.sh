#!/usr/bin/env bash
# A second environment of the parity tests: PATH of a virtual environment in which liger, openrlhf, skyrl, areal, google-tunix,
# tinker_cookbook and torchtune run their arithmetic on a CPU beside this library. They ask for engines and clusters that their
# losses never touch; --no-deps leaves those out, and tests/parity/others_stubs.py puts hollow modules in their places.
set -euo pipefail
env=${1:?usage: parity_env_others.sh ENVIRONMENT}
root=$(cd "$(dirname "$0")/.." && pwd)
python3.11 -m venv "$env" # openrlhf's wheel is for CPython 3.11
. "$env/bin/activate"
python -m pip install -q --upgrade pip
pip install -q 'torch==2.13.0'
pip install -q --no-deps 'liger_kernel==0.8.5' 'openrlhf==0.11.2' 'skyrl==0.3.0' 'areal==1.0.4' 'google-tunix==0.1.7' \
  'tinker==0.38.0' 'tinker_cookbook==0.6.1' 'torchtune==0.6.1'
pip install -q 'jax==0.10.2' 'flax==0.12.8' pydantic omegaconf loguru jaxtyping
GRPO_FAST_NATIVE=1 pip install -q "$root[numba]" 'pytest>=8' pytest-benchmark hypothesis
