"""Several processes are one run: the same gradients, the same files, and an end in common."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from memjax.checkpoint import load_model
from memjax.metrics import read_metrics
from memjax.train.config import TrainConfig, as_json
from memjax.train.loop import train
from tests.train.tiny_run import sharing_compiled, tiny_run

ROOT = Path(__file__).parents[2]
_MINUTE = 60.0


def free_port() -> int:
    """A port below those that the system lends to connections: nobody takes it while a process starts."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as probe:
            if probe.connect_ex(("localhost", port)) != 0:
                return port


def start_two(arguments: list[str], devices: int, environment: Mapping[str, str]) -> list[subprocess.Popen[str]]:
    """Two processes of a job, each with so many simulated devices; what they say goes to one pipe each."""
    port = free_port()
    processes = []
    for index in range(2):
        job = {
            "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": str(index),
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "train")]),
        }
        command = [sys.executable, "-m", *arguments]
        processes.append(
            subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **environment, **job},
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    return processes


def ends(processes: list[subprocess.Popen[str]], timeout: float = 600) -> list[tuple[int, str]]:
    """Exit code and output of each; none may outlive the timeout."""
    try:
        said = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, text) for process, text in zip(processes, said, strict=True)]


def test_two_processes_have_the_gradients_of_one_device(tmp_path: Path) -> None:
    from tests.train.test_step import ONE_DEVICE, batch_of, gradient_function, packed_step, parameters

    for code, said in ends(start_two(["tests.train.team_worker", "gradients", str(tmp_path / "found.npz")], 4, {})):
        assert code == 0, said
    grads, metrics = gradient_function(ONE_DEVICE)(parameters(ONE_DEVICE), batch_of(packed_step()))
    found = np.load(tmp_path / "found.npz")
    for name, value in metrics.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
    leaves = jax.tree.leaves(grads)
    scale = max(float(np.abs(leaf).max()) for leaf in leaves)
    for i, leaf in enumerate(leaves):
        np.testing.assert_allclose(found[f"grad{i}"], leaf, atol=1e-5 * scale)


def shared_run(out: Path, **changes: Any) -> TrainConfig:
    """The tiny run over all devices of all processes."""
    compute = {"dtype": "float32", "remat": False, "scan_layers": False, "fsdp": -1}
    return tiny_run(out, **{"compute": compute, **changes})


def start_run(config: TrainConfig, compiled: Path) -> list[subprocess.Popen[str]]:
    file = config.out.with_suffix(".yaml")
    file.write_text(json.dumps(as_json(config)))  # JSON is YAML
    keep = {"JAX_COMPILATION_CACHE_DIR": str(compiled), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return start_two(["memjax.train", "--config", str(file)], 2, keep)


def wait_for_step(config: TrainConfig, step: int) -> None:
    deadline = time.monotonic() + 10 * _MINUTE
    while not any(row["step"] >= step for row in read_metrics(config.out / "metrics.jsonl")):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_two_processes_end_with_the_files_of_one_also_when_stopped_on_the_way(tmp_path: Path, compiled: Path) -> None:
    together, alone = shared_run(tmp_path / "together"), tiny_run(tmp_path / "alone")
    processes = start_run(together, compiled)
    wait_for_step(together, 3)
    processes[1].send_signal(signal.SIGTERM)
    for code, said in ends(processes):
        assert code == 0, said
        assert "stopped; start it again" in said
    for code, said in ends(start_run(together, compiled)):
        assert code == 0, said
    with sharing_compiled(compiled):
        train(alone)
    files = [{str(p.relative_to(run.out)) for p in run.out.glob("*/*")} for run in (together, alone)]
    assert files[0] - files[1] == {f"rollouts/step_{step}.process_1.jsonl" for step in (1, 2, 3)}
    assert files[1] <= files[0]
    rows = [list(read_metrics(run.out / "metrics.jsonl")) for run in (together, alone)]
    assert [row["step"] for row in rows[0]] == [row["step"] for row in rows[1]]
    for ours, theirs in zip(*rows, strict=True):
        for name in ("critic/rewards/mean", "val/reward/mean@2", "rollout/tokens", "actor/loss"):
            assert ours.get(name, 0.0) == pytest.approx(theirs.get(name, 0.0), rel=1e-4, abs=1e-5)
    models = [jax.tree.leaves(load_model(run.out / "model").params) for run in (together, alone)]
    for ours, theirs in zip(*models, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_when_one_process_is_killed_the_other_ends_within_a_minute(tmp_path: Path, compiled: Path, killed: int) -> None:
    config = shared_run(tmp_path / "killed", steps=1000)
    processes = start_run(config, compiled)
    wait_for_step(config, 3)
    processes[killed].kill()
    died = time.monotonic()
    (code, said) = ends(processes)[1 - killed]
    assert time.monotonic() - died < _MINUTE
    assert code not in (0, -signal.SIGKILL)
    assert "another task died" in said or "process of this run" in said, said
