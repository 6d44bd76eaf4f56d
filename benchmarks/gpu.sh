#!/usr/bin/env bash
# benchmarks/gpu.py in an environment of its own, with nothing but what it needs. --tiny runs it on a CPU.
#
#   benchmarks/gpu.sh               # installs jax[cuda13], flax, optax and numpy into a cache of uv
#   PYTHON=python3 benchmarks/gpu.sh    # with the packages of that Python
set -euo pipefail
cd "$(dirname "$0")/.."
if [[ -n "${PYTHON:-}" ]]; then
    exec "$PYTHON" benchmarks/gpu.py "$@"
fi
exec uv run --no-project --with 'jax[cuda13]>=0.10' --with 'flax>=0.12.8' --with 'optax>=0.2.8' --with 'numpy>=2' \
    python benchmarks/gpu.py "$@"
