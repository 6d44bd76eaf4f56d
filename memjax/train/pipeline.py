"""The rollout pipeline: batches for the learner, sampled with its latest weights or, ahead of it, with those before."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace

from memjax.checkpoint.tensors import listing, not_finite
from memjax.models.qwen2 import Params
from memjax.rewards.pool import RewardPool
from memjax.train.learner import Learner, Model, make_client, on_own_part, rollout_weights
from memjax.train.rollouts import RolloutBatch, Sampler, TaskSource, batch_metrics
from memjax.train.run import Position, Run
from memjax.train.scored import from_bytes, to_bytes


class Rollouts:
    """Samples the batches of a run. Use as a context manager.

    A batch is sampled with the weights that it updates or, with `rollout_ahead`, while the batch before it updates
    them; its log-probabilities are those of the weights that sampled it either way. The learner is compared with the
    sampler on every batch. `lock` is held by whoever starts a program on the devices.
    """

    def __init__(
        self, run: Run, model: Model, learner: Learner, params: Params, position: Position, lock: threading.Lock
    ):
        config = run.config
        self._run, self._model, self._learner = run, model, learner
        self._weights_of = rollout_weights(model)
        self._weights = self._weights_of(params)
        with ExitStack() as stack:
            self._client = make_client(config, model, self._weights, lock)
            stack.enter_context(closing(self._client.scheduler))
            pool = stack.enter_context(RewardPool(timeout=config.reward_seconds))
            self._beside = stack.enter_context(ThreadPoolExecutor(1, "rollout"))
            source, judging = TaskSource(config.data, config.seed), config.validation
            self._judged_by = TaskSource(judging.data, config.seed).first(judging.tasks) if judging.data else []
            self._sampler = Sampler(config, self._client, model.tokenizer, pool, source, run.watcher.say, run.unwritten)
            self._sampler.check()
            self._client.warm_up()
            self._ahead: RolloutBatch | None = None
            if kept := run.pending(position):
                self._ahead = self._sampler.batch(*from_bytes(kept))
            if position.step == 0:
                run.note(position, self._sampler.validate(self._judged_by))
            self._steps = self._idle = 0  # the latter changed nothing
            self._started, self._tokens = time.perf_counter(), 0.0  # of the step under way
            self._open = stack.pop_all()

    def pending(self) -> bytes | None:
        """A batch that is sampled and not yet learned from, to be kept beside a checkpoint; None if there is none."""
        return to_bytes(self._ahead.sampled, self._ahead.metrics) if self._ahead else None

    def next_batch(self, position: Position) -> RolloutBatch:
        """The batch of the step after `position`."""
        self._started = time.perf_counter()
        batch, self._ahead = self._ahead, None
        if batch is None:
            dump = self._run.dump_file(position.step + 1)
            batch = self._measured(self._sampler.collect(position.tasks, dump=dump), self._started)
        self._steps += 1
        self._idle += not batch.kept
        self._tokens = batch.metrics["rollout/tokens"]
        return batch

    @contextmanager
    def sampling_ahead(self, position: Position) -> Iterator[None]:
        """Where the config wants it, sample the batch of the step after `position` beside what is done inside."""
        if not self._run.config.rollout_ahead or position.step == self._run.config.steps:
            yield
            return
        started, dump = time.perf_counter(), self._run.dump_file(position.step + 1)
        share = self._beside.submit(self._sampler.local_groups, position.tasks, dump=dump)
        yield
        self._ahead = self._measured(self._sampler.collect(position.tasks, share.result(), dump), started)

    def use(self, params: Params) -> dict[str, float]:
        """Sample with these weights from now on; what the step took until now."""
        self._weights = self._weights_of(params)
        if broken := not_finite(self._weights):
            raise ValueError(
                f"the update left NaN or infinity in {listing(broken)}: the run has diverged, and sampling with these "
                f"weights would mean nothing. The checkpoint before it is whole: go on with a lower learning rate in "
                "another directory"
            )
        asyncio.run(self._client.swap_weights(on_own_part(self._model, self._weights)))
        seconds = time.perf_counter() - self._started
        return {
            "timing_s/step": seconds,
            "perf/throughput": self._tokens / seconds,
            "rollout/compilations": self._client.engine.compilations,
        }

    def validate_at(self, position: Position) -> dict[str, float]:
        """The metrics of the validation, if one is due after the step at `position`."""
        is_due = position.step % self._run.config.validation.every == 0 or position.step == self._run.config.steps
        return self._sampler.validate(self._judged_by) if is_due else {}

    def _measured(self, batch: RolloutBatch, started: float) -> RolloutBatch:
        """The batch, sampled since `started`, with its metrics; says so where the learner disagrees."""
        metrics: Mapping[str, float] = batch_metrics(batch, time.perf_counter() - started)
        if batch.kept:
            found, alarm = self._learner.compare(self._weights, batch.trajectories)
            metrics = {**metrics, **found}
            if alarm:
                self._run.watcher.say(alarm)
        return replace(batch, metrics=metrics)

    def __enter__(self) -> Rollouts:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        self._open.close()
        if self._idle and failure is None:
            self._run.watcher.say(
                f"{self._idle} of {self._steps} steps changed nothing: all answers of each of their groups had the "
                "same reward. Harder or longer tasks, more rollout.samples or rollout.refills give something to learn"
            )
