"""Scoring on a Ray cluster: one actor per node, each with a pool of processes. Needs the `ray` extra."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from memjax.rewards import check_metric
from memjax.rewards.pool import Item, RewardPool, Score, ScoringPool, check_settings

log = logging.getLogger(__name__)


class _Scorer:
    """The actor: a node's processes."""

    def __init__(self, workers: int, timeout: float) -> None:
        self._pool = RewardPool(workers, timeout)

    async def score(self, item: Item) -> Score:
        """The item's score."""
        return await self._pool.score_async(item)


@dataclass
class _Place:
    """A living actor, and how many items it is scoring of the `workers` it can."""

    node: str
    actor: Any
    workers: int
    scoring: int = 0


class RayRewardPool(ScoringPool):
    """A `RewardPool` on every node of the cluster that `ray.init` has connected to; `workers` are those of a node.

    An item that breaks its metric costs its own score and nothing else, as in `RewardPool`. What a node was scoring
    when it died is scored on another one. RuntimeError when there is no cluster, or no node of it is left.
    """

    def __init__(self, workers: int | None = None, timeout: float = 30.0):
        check_settings(workers, timeout)
        if not ray.is_initialized():
            raise RuntimeError("there is no Ray cluster: call ray.init() first, with its address")
        self._change = threading.Lock()
        self._closed = False
        self._places = [_start(node, workers, timeout) for node in ray.nodes() if node["Alive"]]
        # As many items are sent as there are processes: an item waits here, where another node can still take it.
        places = sum(place.workers for place in self._places)
        self._threads = ThreadPoolExecutor(places, thread_name_prefix="ray-reward")

    @property
    def nodes(self) -> int:
        """How many nodes are scoring."""
        return len(self._places)

    def submit(self, item: Item) -> Future[Score]:
        """Start scoring an item. ValueError at once for a metric that does not exist."""
        check_metric(item.metric)
        return self._threads.submit(self._score, item)

    def close(self) -> None:
        """End the actors; items that wait are cancelled, items under way fail."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for place in self._places:
            ray.kill(place.actor)
        self._threads.shutdown()

    def _score(self, item: Item) -> Score:
        while place := self._take():
            try:
                score: Score = ray.get(place.actor.score.remote(item))
                return score
            except RayTaskError:  # the actor lives: what failed there would fail anywhere
                raise
            except RayError as error:
                self._lose(place, str(error).strip())
            finally:
                with self._change:
                    place.scoring -= 1
        if self._closed:
            return Score(0.0, "the reward pool was closed")
        raise RuntimeError("no node is left that scores: every one of the Ray cluster has died")

    def _take(self) -> _Place | None:
        """The place with the largest share of idle processes, with one of them taken."""
        with self._change:
            if self._closed or not self._places:
                return None
            place = min(self._places, key=lambda place: place.scoring / place.workers)
            place.scoring += 1
            return place

    def _lose(self, place: _Place, reason: str) -> None:
        with self._change:
            if place in self._places and not self._closed:
                self._places.remove(place)
                log.warning("lost the scoring node %s, %d left: %s", place.node[:8], len(self._places), reason)


def _start(node: dict[str, Any], workers: int | None, timeout: float) -> _Place:
    workers = workers or max(1, int(node["Resources"].get("CPU", 1)) // 2)
    actor = (
        ray.remote(_Scorer)
        .options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            num_cpus=0,
            max_concurrency=2 * workers,  # after a node died, more than its own items may come
        )
        .remote(workers, timeout)
    )
    return _Place(node["NodeID"], actor, workers)
