"""A run that is killed or stopped, and started again, ends with the very parameters of one that was left alone."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from rich.console import Console

from memjax.metrics import read_metrics
from memjax.train.__main__ import _stop_on_signals
from memjax.train.config import TrainConfig, as_json
from memjax.train.display import Silent
from memjax.train.loop import train
from memjax.train.run import Run
from tests.train.tiny_run import FinishedRun, sharing_compiled, tiny_run

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _compile_once(compiled: Path) -> Iterator[None]:
    with sharing_compiled(compiled):
        yield


@pytest.fixture
def runs(finished: FinishedRun) -> Path:
    """Where the finished run and its tasks are."""
    return finished.config.out.parent


@pytest.fixture
def undisturbed(finished: FinishedRun) -> bytes:
    return weights(finished.model)


def weights(model: Path | None) -> bytes:
    assert model is not None
    return (model / "model.safetensors").read_bytes()


def start(config: TrainConfig) -> subprocess.Popen[bytes]:
    file = config.out.with_suffix(".yaml")
    file.write_text(json.dumps(as_json(config)))  # JSON is YAML
    command = [sys.executable, "-m", "memjax.train", "--config", str(file)]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})


def last_step(config: TrainConfig) -> int:
    return max((row["step"] for row in read_metrics(config.out / "metrics.jsonl")), default=0)


def test_a_killed_run_that_goes_on_ends_bit_for_bit_the_same(runs: Path, undisturbed: bytes) -> None:
    config = tiny_run(runs / "killed", checkpoint={"every": 2})
    process = start(config)
    deadline = time.monotonic() + 300
    while last_step(config) < 3 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert weights(train(config)) == undisturbed
    steps = [row["step"] for row in read_metrics(config.out / "metrics.jsonl")]
    assert sorted(set(steps)) == list(range(1, 6))
    assert steps == sorted(steps)


def test_a_run_that_is_asked_to_stop_keeps_its_state(runs: Path, undisturbed: bytes) -> None:
    config, stop = tiny_run(runs / "stopped", checkpoint={"every": 100}), threading.Event()

    class StopsInTheMiddle(Silent):
        def step(self, stage: str, step: int, steps: int, metrics: Mapping[str, float]) -> None:
            if (stage, step) == ("rl", 1):
                stop.set()

    assert train(config, StopsInTheMiddle(), stop) is None
    assert not (config.out / "model").exists()
    assert weights(train(config)) == undisturbed


def test_the_second_ctrl_c_stops_at_once(runs: Path) -> None:
    data = {"path": runs / "tasks.jsonl", "metric": "tests.train.odd_rewards:slow"}
    process = start(tiny_run(runs / "impatient", supervised=[], validation={}, data=data, dump_every=1))
    deadline = time.monotonic() + 300
    while not (runs / "impatient" / "rollouts").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)  # a step takes at least three seconds
    assert process.poll() is None, "the first one waits for the step"
    process.send_signal(signal.SIGINT)
    assert process.wait(5) == 128 + signal.SIGINT


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_ask_for_a_stop(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with _stop_on_signals(Console()) as stop:
        assert not stop.is_set()
        signal.raise_signal(number)
        assert stop.is_set()
    assert signal.getsignal(number) is before


def test_a_directory_has_one_run_at_a_time(runs: Path) -> None:
    config = tiny_run(runs / "taken")
    refused = pytest.raises(ValueError, match=rf"taken is in use by process {os.getpid()} on .*out=DIR")
    with Run(config, Silent(), threading.Event()), refused:
        train(config)
    Run(config, Silent(), threading.Event()).close()


def test_a_finished_run_started_again_changes_nothing(runs: Path, undisturbed: bytes) -> None:
    assert weights(train(tiny_run(runs / "finished"))) == undisturbed


def test_what_is_dumped_changes_nothing(runs: Path, undisturbed: bytes) -> None:
    config = tiny_run(runs / "silent", dump_every=2)
    assert weights(train(config)) == undisturbed
    assert [path.name for path in (config.out / "rollouts").iterdir()] == ["step_2.jsonl"]


@pytest.mark.slow
def test_twenty_kills_at_random_moments_change_nothing(runs: Path) -> None:
    undisturbed = weights(train(tiny_run(runs / "twenty_steps", steps=22)))
    config, rng = tiny_run(runs / "twenty_kills", steps=22), random.Random(0)
    for _ in range(20):
        process = start(config)
        before, deadline = last_step(config), time.monotonic() + 300
        if rng.random() < 0.2:
            time.sleep(10 * rng.random())  # while it starts
        else:
            # Soon after a step was logged: in the writing of its checkpoint, or in the next step.
            while last_step(config) <= before and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
            time.sleep(rng.random() / 2)
        process.kill()
        process.wait()
    assert weights(train(config)) == undisturbed
