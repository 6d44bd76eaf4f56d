"""With `rollout_ahead` a batch is one step old, is told from a fault, and survives a stop between the two."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from memjax.metrics import read_metrics
from memjax.train.config import TrainConfig
from memjax.train.display import Silent
from memjax.train.loop import train
from tests.train.test_resume import last_step, start, weights
from tests.train.tiny_run import Witness, sharing_compiled, tiny_run


@pytest.fixture(autouse=True)
def _compile_once(compiled: Path) -> Iterator[None]:
    with sharing_compiled(compiled):
        yield


def ahead(out: Path, **changes: Any) -> TrainConfig:
    # Fast enough that weights which are one step old are told from those that sampled.
    optimizer = {"learning_rate": 1e-2, "warmup_steps": 0}
    quick = {"supervised": [], "validation": {}, "optimizer": optimizer}
    return tiny_run(out, **{"rollout_ahead": 1, **quick, **changes})


class StopsAfter(Silent):
    """Asks a run to stop at a step."""

    def __init__(self, at: int, stop: threading.Event):
        self._at, self._stop = at, stop

    def step(self, stage: str, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        if step == self._at:
            self._stop.set()


def test_a_batch_ahead_agrees_with_what_sampled_it_and_goes_on_where_it_was_left(tmp_path: Path) -> None:
    witness, stop = Witness(), threading.Event()
    undisturbed = weights(train(ahead(tmp_path / "undisturbed"), witness))
    assert not witness.said, "the alarm is silent"
    rows = [row for row in read_metrics(tmp_path / "undisturbed" / "metrics.jsonl") if "actor/loss" in row]
    assert len(rows) == 3
    for row in rows:
        assert 0 < row["training/rollout_logprobs_diff_max"] < 1e-4
        assert row["actor/grad_norm"] > 0
        assert row["rollout/compilations"] == 0

    config = ahead(tmp_path / "stopped", checkpoint={"every": 100})
    assert train(config, StopsAfter(1, stop), stop) is None
    assert [path.name for path in (config.out / "pending").iterdir()] == ["1.npz"]
    assert weights(train(config)) == undisturbed


@pytest.mark.slow
def test_a_run_ahead_that_is_killed_ends_bit_for_bit_the_same(tmp_path: Path) -> None:
    undisturbed = weights(train(ahead(tmp_path / "undisturbed", steps=8)))
    config = ahead(tmp_path / "killed", steps=8, checkpoint={"every": 2})
    for at in (3, 6):
        process = start(config)
        deadline = time.monotonic() + 300
        while last_step(config) < at and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert weights(train(config)) == undisturbed


@pytest.mark.slow
def test_several_devices_that_sample_and_learn_side_by_side_do_not_wait_for_ever(tmp_path: Path) -> None:
    compute = {"dtype": "float32", "remat": False, "scan_layers": False, "data": 2, "fsdp": 2, "tensor": 2}
    assert train(ahead(tmp_path / "spread", steps=6, compute=compute)) is not None
