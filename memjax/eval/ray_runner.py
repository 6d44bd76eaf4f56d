"""Samples spread over engine replicas on a Ray cluster: one replica per node, with all of that node's accelerators.

Only the driver writes results, and only once a sample's row has arrived: a replica that dies takes nothing with it but
the samples it was reading, which go to the others. Nothing can be scored twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from memjax.data.corpus import Documents
from memjax.eval.results import Row
from memjax.eval.run import Evaluate
from memjax.eval.tasks import Job
from memjax.trajectory import TextSource

MakeEvaluate = Callable[[], Evaluate]
"""Builds, on the node where it is called, what turns jobs into rows. Ray pickles it."""


class _Replica:
    """The actor: one evaluator and whatever engine it holds."""

    def __init__(self, make_evaluate: MakeEvaluate) -> None:
        self._evaluate = make_evaluate()

    async def ready(self) -> None:
        """Answers once the evaluator is there."""

    async def evaluate(self, job: Job) -> Row:
        """The job's row."""
        return await self._evaluate(job)


@dataclass
class _Place:
    """A living replica, and how many samples it is reading."""

    node: str
    actor: Any
    reading: int = 0


@dataclass
class RayEvaluator:
    """`await evaluator(job)` on the least busy of the replicas. A context manager."""

    make_evaluate: MakeEvaluate
    concurrency: int  # samples at a time per replica
    on_loss: Callable[[str], None] = lambda message: None
    _places: list[_Place] = field(default_factory=list)

    def __enter__(self) -> RayEvaluator:
        ray.init(ignore_reinit_error=True, log_to_driver=False)
        nodes = [node for node in ray.nodes() if node["Alive"]]
        # A head without accelerators beside nodes that have them is there to coordinate.
        nodes = [node for node in nodes if _accelerators(node)] or nodes
        for node in nodes:
            self._places.append(_Place(node["NodeID"], self._start(node)))
        # Waited for, so that a model that one node cannot load is told before the first sample.
        starts = [(place, place.actor.ready.remote()) for place in self._places]
        for place, start in starts:
            try:
                ray.get(start)
            except RayError as error:
                self._lose(place, str(error).strip())
        if not self._places:
            raise RuntimeError("no replica could be started; what each of them said is told above")
        return self

    def __exit__(self, *_: object) -> None:
        for place in self._places:
            ray.kill(place.actor)

    @property
    def replicas(self) -> int:
        """How many replicas are alive."""
        return len(self._places)

    async def __call__(self, job: Job) -> Row:
        """The job's row, from whichever replica lives long enough. RuntimeError when none is left."""
        job = _movable(job)
        while self._places:
            place = min(self._places, key=lambda place: place.reading)
            place.reading += 1
            try:
                return await place.actor.evaluate.remote(job)
            except RayTaskError:
                # The replica lives: its code failed, as it would anywhere.
                raise
            except RayError as error:
                self._lose(place, str(error).strip())
            finally:
                place.reading -= 1
        raise RuntimeError(
            "every replica has died (why is told above); finished samples are kept: run the same command to continue"
        )

    def _start(self, node: dict[str, Any]) -> Any:
        resources = node["Resources"]
        return (
            ray.remote(_Replica)
            .options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
                num_cpus=0,
                num_gpus=resources.get("GPU", 0),
                resources={"TPU": resources["TPU"]} if resources.get("TPU") else None,
                max_concurrency=self.concurrency,
            )
            .remote(self.make_evaluate)
        )

    def _lose(self, place: _Place, reason: str) -> None:
        """Forget a replica; each of its samples comes here and is read again elsewhere."""
        if place in self._places:
            self._places.remove(place)
            self.on_loss(f"lost the replica on node {place.node[:8]}, {len(self._places)} left: {reason}")


@dataclass(frozen=True)
class _Texts:
    """A corpus whose documents are held."""

    path: Path
    texts: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, number: int) -> str:
        return self.texts[number]


def _movable(job: Job) -> Job:
    """The job with its text in it: the files that a streamed context is made from are the driver's."""
    context = job.task.context
    if isinstance(context, str):
        return job
    if isinstance(context, Documents):  # which an agent may take apart again
        held = _Texts(context.corpus.path, tuple(context.corpus[number] for number in context.numbers))
        moved: str | TextSource = Documents(held, tuple(range(len(held))))  # type: ignore[arg-type]
    else:
        moved = "".join(context.pieces())
    return replace(job, task=replace(job.task, context=moved))


def _accelerators(node: dict[str, Any]) -> float:
    return node["Resources"].get("GPU", 0) + node["Resources"].get("TPU", 0)
