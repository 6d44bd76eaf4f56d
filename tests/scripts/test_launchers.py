"""The scripts that start a run on several hosts, as far as they can be followed without hosts."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def dry_run(script: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DRY_RUN": "1", **variables}
    return subprocess.run([SCRIPTS / script, *words], env=environment, capture_output=True, text=True, check=False)


def test_a_pod_runs_the_same_command_on_every_host() -> None:
    words = ["--config", "my config.yaml", "data={path: tasks.jsonl}"]
    said = dry_run("tpu_pod.sh", "train", *words, TPU="pod", ZONE="zone").stdout
    gcloud = shlex.split(said)
    assert gcloud[:6] == ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "pod"]
    assert "--worker=all" in gcloud
    on_host = shlex.split(next(word for word in gcloud if word.startswith("--command=")).removeprefix("--command="))
    assert "MEMJAX_DISTRIBUTED=auto" in on_host
    start = on_host.index("memjax.train") + 1
    assert on_host[start : start + 3] == words


def test_slurm_gives_a_process_all_gpus_of_its_node() -> None:
    said = dry_run("gpu_slurm.sh", "--config", "x.yaml", "steps=3").stdout
    assert shlex.split(said)[0] == "srun"
    assert shlex.split(said)[-4:] == ["memjax.train", "--config", "x.yaml", "steps=3"]


@pytest.mark.parametrize(("script", "words"), [("tpu_pod.sh", []), ("tpu_pod.sh", ["go"]), ("gpu_slurm.sh", [])])
def test_a_launcher_without_its_words_says_how_it_is_called(script: str, words: list[str]) -> None:
    found = dry_run(script, *words, TPU="pod", ZONE="zone")
    assert found.returncode == 2
    assert f"scripts/{script}" in found.stderr
    assert "#!" not in found.stderr
