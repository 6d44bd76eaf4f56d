#!/usr/bin/env bash
# The evaluation of the real 0.5B model that docs/evaluation.md quotes. Killed or interrupted, it goes on when started again.
#   benchmarks/eval_real.sh MODEL.gguf DATA OUT
# DATA is a directory with hotpotqa_dev_distractor_subset/ as in /work/shared/data; OUT gets one directory per run.
set -euo pipefail
model=$1 data=$2 out=$3
python=${PYTHON:-.venv/bin/python}
hotpotqa=$data/hotpotqa_dev_distractor_subset/hotpot_dev_distractor_subset.json.gz

for agent in memagent single no-context; do
  "$python" -m memjax.eval ruler-hotpotqa --data "hotpotqa=$hotpotqa" --lengths 7k --samples 12 \
    --model "$model" --agent "$agent" --concurrency 4 --memory-tokens 512 --answer-tokens 256 --out "$out/hotpotqa-$agent"
  "$python" -m memjax.eval ruler --tasks niah_single_1,niah_multikey_1,vt --lengths 8k --samples 8 \
    --model "$model" --agent "$agent" --concurrency 4 --memory-tokens 512 --answer-tokens 256 --out "$out/ruler-$agent"
done

"$python" -m memjax.eval report "$out"/hotpotqa-{memagent,single,no-context} \
  --markdown "$out/hotpotqa.md" --plot "$out/hotpotqa.png"
"$python" -m memjax.eval report "$out"/ruler-{memagent,single,no-context} --markdown "$out/ruler.md" --plot "$out/ruler.png"
