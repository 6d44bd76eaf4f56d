#!/usr/bin/env bash
# The evaluation of the real 0.5B model that docs/evaluation.md quotes. Killed or interrupted, it continues when started again.
#   benchmarks/eval_real.sh MODEL DATA OUT
# DATA is a directory with hotpotqa_dev_distractor_subset/ as in /work/shared/data; OUT gets one directory per run.
# A CPU core reads about 80 tokens a second: memories and answers have 128 tokens instead of 1024, and the runs stand in the
# order in which they are worth having, should there not be the two CPU-hours or more for all of them.
set -euo pipefail
model=$1 data=$2 out=$3
python=${PYTHON:-.venv/bin/python}
hotpotqa=$data/hotpotqa_dev_distractor_subset/hotpot_dev_distractor_subset.json.gz

evaluate() { # AGENT NAME SUITE...
  "$python" -m memjax.eval "${@:3}" --model "$model" --agent "$1" --out "$out/$2-$1" --answer-tokens 128 --concurrency 6
}
hotpotqa() { # AGENT SAMPLES OPTIONS...
  evaluate "$1" hotpotqa ruler-hotpotqa --data "hotpotqa=$hotpotqa" --lengths 7k --samples "$2" "${@:3}"
}
ruler() { # AGENT SAMPLES OPTIONS...
  evaluate "$1" ruler ruler --tasks niah_single_1,niah_multikey_1,vt --lengths 8k --samples "$2" "${@:3}"
}

hotpotqa memagent 12 --memory-tokens 128
hotpotqa no-context 12
ruler no-context 8
ruler memagent 8 --memory-tokens 128
hotpotqa single 12
ruler single 8

for suite in hotpotqa ruler; do
  "$python" -m memjax.eval report "$out/$suite"-{memagent,single,no-context} \
    --markdown "$out/$suite.md" --plot "$out/$suite.svg"
done
