"""lm-eval against the server: a generation task and a log-likelihood task, with data of our own.

python -m venv /tmp/lmeval && /tmp/lmeval/bin/pip install "lm-eval[api]"
MEMJAX_LM_EVAL=/tmp/lmeval/bin/python pytest -m lm_eval
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.lm_eval

TASKS = Path(__file__).parent / "lm_eval_tasks"
ROWS = [
    {"question": "The gardener kept the", "choices": [" key", " lamp"]},
    {"question": "The keeper lit the", "choices": [" lamp", " small wooden boat"]},
]


def test_a_generation_and_a_log_likelihood_task_run(server, model_directory, tmp_path):
    python = os.environ.get("MEMJAX_LM_EVAL")
    if not python:
        pytest.skip("MEMJAX_LM_EVAL is not set: the first lines of this file say how to make it")
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for task in TASKS.glob("*.yaml"):
        (tmp_path / task.name).write_text(task.read_text().replace("DATA", str(data)))
    model = f"model=tiny,base_url={server.url}/v1/completions,tokenizer={model_directory},tokenizer_backend=huggingface"
    command = [python, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args", model]
    command += ["--include_path", tmp_path, "--tasks", "memjax_choice,memjax_generate"]
    command += ["--output_path", tmp_path / "out", "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (samples,) = (tmp_path / "out").rglob("samples_memjax_choice_*.jsonl")
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        told = [float(one[0][0]) for one in sample["resps"]]
        encode = server.parts.service.tokenizer.encode
        before = len(encode(sample["doc"]["question"]))
        for choice, total in zip(sample["doc"]["choices"], told, strict=True):
            body = {"model": "tiny", "prompt": sample["doc"]["question"] + choice, "max_tokens": 0}
            scored = server.post("/v1/completions", body | {"echo": True, "logprobs": 1}).json()
            assert total == pytest.approx(sum(scored["choices"][0]["logprobs"]["token_logprobs"][before:]), abs=1e-3)
    assert list((tmp_path / "out").rglob("samples_memjax_generate_*.jsonl"))
