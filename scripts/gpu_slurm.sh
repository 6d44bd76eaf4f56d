#!/usr/bin/env bash
# Train on GPU nodes under Slurm, a process for each node:
#
#   sbatch --nodes=8 scripts/gpu_slurm.sh --config configs/train/memagent_qwen2_5_7b.yaml out=/shared/runs/7b ...
#
# The words that follow are those of `python -m memjax.train`. Submit it from this source tree, after
# `uv sync --no-dev --extra cuda`, on a file system that all nodes share. Outside of sbatch, DRY_RUN=1 prints the command.
#SBATCH --job-name=memjax
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --exclusive
#SBATCH --signal=B:TERM@300
#SBATCH --output=memjax-%j.log
set -euo pipefail

[[ $# -ge 1 ]] || { sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2; }

# The processes find one another by Slurm's variables, of which jax would conclude that each has a single GPU: these are
# all of a node's. A process that dies takes the others with it, and started again the run goes on where it was.
gpus=${SLURM_GPUS_ON_NODE:-8}
export JAX_LOCAL_DEVICE_IDS=${JAX_LOCAL_DEVICE_IDS:-$(seq -s, 0 $((gpus - 1)))}
command=(srun --kill-on-bad-exit=1 --gpu-bind=none .venv/bin/python -m memjax.train "$@")
if [[ -n "${DRY_RUN:-}" ]]; then
    printf '%q ' "${command[@]}"
    echo
    exit
fi

"${command[@]}" &
steps=$!
# Slurm tells this script five minutes before the time is over: the run ends after its step, with its state kept.
trap 'scancel --signal=TERM "$SLURM_JOB_ID"; wait "$steps"' TERM
wait "$steps"
