"""Where the numbers of a run go: its JSON lines always, TensorBoard and Weights & Biases on request."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from memjax.metrics import MetricsLog
from memjax.train.config import LogName, TrainConfig, as_json


class Log(Protocol):
    """Takes the numbers of one step after another."""

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add what was measured at a step."""
        ...

    def close(self) -> None:
        """End the log."""
        ...


class Unwritten:
    """What the disk did not take: it is counted, each kind is said once, and the run goes on."""

    def __init__(self, say: Callable[[str], None] = lambda message: None):
        self.count = 0
        self._say, self._said = say, set[str]()

    def add(self, what: str, error: Exception) -> None:
        """Count one more failure to write `what`."""
        self.count += 1
        if what not in self._said:
            self._said.add(what)
            self._say(f"{what} COULD NOT BE WRITTEN ({error}): is the disk full? Training goes on without")

    @contextmanager
    def guarding(self, what: str) -> Iterator[None]:
        """Let no failure of the disk out."""
        try:
            yield
        except OSError as error:
            self.add(what, error)


def open_logs(config: TrainConfig, step: int) -> list[Log]:
    """The logs of a run that goes on from `step`. ValueError where one needs a package that is not installed."""
    return [*(_OPENED[name](config, step) for name in config.log), MetricsLog(config.out / "metrics.jsonl", step)]


class TensorBoardLog:
    """Event files under `tensorboard/`. What was logged after `step` is hidden, for it will be logged again."""

    def __init__(self, config: TrainConfig, step: int):
        writer = _package("tensorboardX", "tensorboard").SummaryWriter
        directory = str(config.out / "tensorboard")
        self._writer = writer(logdir=directory, purge_step=step + 1, filename_suffix=f".{step}")

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add the numbers as scalars."""
        for name, value in _numbers(metrics).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """End the file."""
        self._writer.close()


class WandbLog:
    """A run of Weights & Biases, which a run that goes on goes on with."""

    def __init__(self, config: TrainConfig, step: int):
        wandb = _package("wandb", "wandb")
        self._run = wandb.init(
            project="memjax",
            name=config.out.name,
            id=_run_id(config.out / "wandb_id"),
            resume="allow",
            dir=str(config.out),
            config=as_json(config),
        )

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Send the numbers."""
        self._run.log(_numbers(metrics), step=step)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


_OPENED: Mapping[LogName, Callable[[TrainConfig, int], Log]] = {"tensorboard": TensorBoardLog, "wandb": WandbLog}


def _package(name: str, extra: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise ValueError(f"log: {extra} needs a package that is not installed: `uv sync --extra {extra}`") from None


def _run_id(path: Path) -> str:
    if not path.exists():
        path.write_text(secrets.token_hex(8))
    return path.read_text()


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """What can be drawn: numbers that are some."""
    numbers = {name: float(value) for name, value in metrics.items() if not isinstance(value, str)}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}
