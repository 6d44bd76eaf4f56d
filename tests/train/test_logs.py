"""What a run measured reaches every place that was asked for, also when the run goes on."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memjax.metrics import read_metrics
from memjax.train.config import TrainConfig
from memjax.train.logs import open_logs
from tests.train.tiny_run import tiny_run


def config(tmp_path: Path, *names: str) -> TrainConfig:
    made = tiny_run(tmp_path / "run", log=names)
    made.out.mkdir(exist_ok=True)
    return made


def write(config: TrainConfig, step: int, *rows: dict[str, Any]) -> None:
    logs = open_logs(config, step)
    for i, row in enumerate(rows, start=step + 1):
        for log in logs:
            log.write(i, row)
    for log in logs:
        log.close()


def events(directory: Path) -> list[tuple[str, int, float]]:
    """The scalars of a directory's event files: records of a length, its checksum, an Event and its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for file in sorted(directory.iterdir()):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            found += [(value.tag, event.step, round(value.simple_value, 6)) for value in event.summary.value]
            data = data[16 + length :]
    return found


def test_tensorboard_gets_the_numbers_that_are_some_under_their_steps(tmp_path: Path) -> None:
    run = config(tmp_path, "tensorboard")
    write(run, 0, {"stage": "rl", "a": 0.5, "b": float("nan")}, {"stage": "rl", "a": 1})
    write(run, 1, {"stage": "rl", "a": 2.5})
    assert events(run.out / "tensorboard") == [("a", 1, 0.5), ("a", 2, 1.0), ("a", 2, 2.5)]
    assert [row["a"] for row in read_metrics(run.out / "metrics.jsonl")] == [0.5, 2.5]


def test_wandb_goes_on_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, sent = [], []

    def init(**settings: Any) -> SimpleNamespace:
        opened.append(settings)
        return SimpleNamespace(log=lambda numbers, step: sent.append((step, numbers)), finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    run = config(tmp_path, "wandb")
    write(run, 0, {"stage": "rl", "a": 0.5})
    write(run, 1, {"stage": "rl", "a": 1.5})
    assert sent == [(1, {"a": 0.5}), (2, {"a": 1.5})]
    assert opened[0]["id"] == opened[1]["id"]
    assert opened[0]["config"]["seed"] == run.seed


def test_a_package_that_is_not_there_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"log: wandb needs a package .*uv sync --extra wandb"):
        open_logs(config(tmp_path, "wandb"), 0)
