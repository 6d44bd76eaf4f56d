"""The state of a training run on disk, through Orbax: written behind the run's back, the last few kept."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

log = logging.getLogger(__name__)

State = TypeVar("State")


class TrainStore:
    """The checkpoints of one run, each a tree of arrays and a position: named whole numbers. Close it when done.

    A checkpoint appears under its step only when it is whole; what a killed process left unfinished is passed over, and
    with `clean` removed, which only the run itself may do. `failures` counts checkpoints that could not be written,
    which costs the run nothing but them. With `best`, the name of a metric, the checkpoint of its highest value stays
    besides the last `keep`. Of several processes, each makes every call.
    """

    def __init__(self, directory: Path, keep: int = 2, *, best: str | None = None, clean: bool = True):
        self.failures = 0
        self._saving: tuple[int, Any] | None = None
        self._directory, self._keep, self._best, self._clean = directory.absolute(), keep, best, clean
        self._checkpointer = self._open()

    @property
    def latest(self) -> int | None:
        """The step of the last whole checkpoint."""
        return max(self.steps, default=None)

    @property
    def steps(self) -> list[int]:
        """The steps of the whole checkpoints, and of the one that is being written, in order."""
        return [one.step for one in self._checkpointer.checkpoints if self._is_there(one.step)]

    @property
    def best(self) -> int | None:
        """The step of the checkpoint with the highest value, the last of several; None where none has one."""
        values = {step: value for step, value in self._values().items() if value is not None}
        return max(values, key=lambda step: (values[step], step), default=None)

    def is_best(self, value: float | None) -> bool:
        """Whether the value is above those of all checkpoints."""
        return value is not None and all(other is None or value > other for other in self._values().values())

    def save(
        self, step: int, state: Any, position: Mapping[str, int], value: float | None = None, *, wait: bool = False
    ) -> None:
        """Begin to write a checkpoint, once the one before is written; the state may be donated right away.

        `value` is what `best` was measured to be. With `wait` the checkpoint is written when the call returns.
        """
        self.wait()
        # On CPU the writer would read the very buffers that the next update takes over.
        copy = jax.tree.map(jnp.copy, state) if jax.default_backend() == "cpu" and not wait else state
        tree = {"state": copy, "position": {name: np.asarray(value, np.int64) for name, value in position.items()}}
        try:
            metrics = None if value is None or self._best is None else {self._best: value}
            self._saving = step, self._checkpointer.save_async(step, tree, metrics=metrics)
        except Exception as error:  # the boundary to the disk: a run must not end because it is full
            self._failed(step, error)
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._saving is None:
            return
        step, written = self._saving
        self._saving = None
        try:
            if written is None or not written.result():
                raise OSError("Orbax did not take it")
        except Exception as error:  # the boundary to the disk, as above
            self._failed(step, error)

    def restore(
        self, abstract: State, position: Mapping[str, int], step: int | None = None
    ) -> tuple[State, dict[str, int]] | None:
        """A checkpoint, placed as `abstract` says, and its position with the names of `position`; None if none.

        By default the last. Raises ValueError for a damaged checkpoint, and for one of another model or optimiser.
        """
        self.wait()
        step = self.latest if step is None else step
        if step is None:
            return None
        tree = {"state": abstract, "position": {name: np.asarray(0, np.int64) for name in position}}
        try:
            found: Any = self._checkpointer.load(step, tree)
        except Exception as error:  # the boundary to the disk: each file that is damaged raises something else
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            raise ValueError(
                f"the checkpoint {self._directory / str(step)} does not hold this run's state ({reason})"
            ) from error
        return found["state"], {name: int(value) for name, value in found["position"].items()}

    def set_aside(self, step: int, where: Path) -> None:
        """Move a checkpoint out of the way of those to come, to the directory `where`."""
        where.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(where / str(step), ignore_errors=True)
        (self._directory / str(step)).rename(where / str(step))

    def reopen(self) -> None:
        """See the directory as it is now, after something was set aside."""
        self._checkpointer.close()
        self._checkpointer = self._open()

    def close(self) -> None:
        """Finish what is being written."""
        self.wait()
        self._checkpointer.close()

    def __enter__(self) -> TrainStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _is_there(self, step: int) -> bool:
        """Whether a directory with a number for a name is more than that."""
        if self._saving is not None and self._saving[0] == step:
            return True
        place = self._directory / str(step)
        return place.is_dir() and any(place.iterdir())

    def _values(self) -> dict[int, float | None]:
        found: Any = self._checkpointer.checkpoints
        return {one.step: (one.metrics or {}).get(self._best) for one in found}

    def _open(self) -> ocp.training.Checkpointer:
        policies = ocp.training.preservation_policies
        keep: Any = policies.LatestN(self._keep)
        if (best := self._best) is not None:
            highest = policies.BestN(
                n=1,
                get_metric_fn=lambda metrics: metrics.get(best, -math.inf),
                keep_checkpoints_without_metrics=False,
            )
            keep = policies.AnyPreservationPolicy([keep, highest])
        return ocp.training.Checkpointer(
            self._directory,
            # Orbax's own choice skips a step while another is being written.
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=keep,
            cleanup_tmp_directories=self._clean,
        )

    def _failed(self, step: int, error: Exception) -> None:
        if jax.process_count() > 1:
            raise error  # to open the store anew takes all processes, and only this one may have failed
        self.failures += 1
        self._checkpointer = self._open()  # one that has failed raises the same error at every later save
        log.error("the checkpoint of step %d could not be written (%s); the one before stays the last", step, error)
