"""Scoring in other processes: a metric that hangs or crashes costs one answer its score and nothing else."""

from __future__ import annotations

import asyncio
import math
import os
import pickle
import queue
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING, Any, Self

from memjax import rewards
from memjax.own_code import is_own
from memjax.rewards import METRICS, Metric, check_metric
from memjax.rewards.transcript import Transcript, TranscriptTurn

if TYPE_CHECKING:
    from memjax.trajectory import Task

_START_SECONDS = 60.0  # for a worker to start, and for it to import a metric of the user's, on a loaded machine
_EXIT_SECONDS = 5.0  # for a worker to end by itself once its pipe is closed, on a loaded machine
# The workers are not made with multiprocessing: its children import the program's __main__ again, and with it jax.
_WORKER = "import sys; from memjax.rewards.pool import work; work(int(sys.argv[1]))"


@dataclass(frozen=True)
class Item:
    """One answer to score: `prediction` for a metric that reads no more, else `transcript`."""

    metric: str  # a name in memjax.rewards.METRICS, or a function of the user's as memjax.own_code names it
    prediction: str
    answers: tuple[str, ...]
    transcript: Transcript | None = None

    @classmethod
    def of(cls, metric: str, transcript: Transcript) -> Item:
        """What of a transcript the metric reads; all of it for one of the user's, which only a worker imports."""
        if metric not in METRICS:
            return cls(metric, transcript.answer, transcript.answers, transcript)
        text = transcript.reply if METRICS[metric].reads == "reply" else transcript.answer
        return cls(metric, text, transcript.answers)


@dataclass(frozen=True)
class Score:
    """What an answer is worth: 0 with the reason in `error` where the metric gave no number."""

    value: float
    error: str | None = None
    raised: bool = field(default=False, repr=False)  # the metric raised or died, which it may not do on another answer


class ScoringPool(ABC):
    """Scores items side by side. Safe to call from several threads and from an event loop. A context manager."""

    @abstractmethod
    def submit(self, item: Item) -> Future[Score]:
        """Start scoring an item. ValueError at once for a metric that does not exist."""

    @abstractmethod
    def close(self) -> None:
        """End the workers; items that wait are cancelled, items under way fail."""

    def score(self, item: Item) -> Score:
        """Score one item and wait for it."""
        return self.submit(item).result()

    def map(self, items: Iterable[Item]) -> list[Score]:
        """Score all items and wait for them; results in the order of the items."""
        return [future.result() for future in [self.submit(item) for item in items]]

    async def score_async(self, item: Item, tries: int = 1) -> Score:
        """Score one item without blocking the event loop, if need be with several tries."""
        for _ in range(tries):
            score = await asyncio.wrap_future(self.submit(item))
            if score.error is None:
                break
        return score

    async def map_async(self, items: Iterable[Item]) -> list[Score]:
        """Score all items without blocking the event loop; results in the order of the items."""
        return await asyncio.gather(*[self.score_async(item) for item in items])

    def check(self, metric: str, task: Task | None = None) -> str | None:
        """Try a metric on a made-up answer to `task`, or to a made-up one; what is to be told if it raised or died.

        ValueError, in a sentence, where it can score no answer: it is missing or slow, or gives no number.
        """
        check_metric(metric)
        if not is_own(metric):
            return None
        score = self.score(Item.of(metric, _made_up(task)))
        if score.error is not None and not score.raised:
            raise ValueError(f"{score.error} (tried on a made-up answer)")
        return score.error and f"{score.error}, on a made-up answer; if it does so on real ones, they count for nothing"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class RewardPool(ScoringPool):
    """Processes that score answers, each one item at a time, for at most `timeout` seconds an item.

    Workers start when they are first needed, are replaced when an item kills them or outlives its time, and never
    import jax. A worker that cannot be started is no item's fault and raises RuntimeError. POSIX only: a worker
    inherits its end of a pipe.
    """

    def __init__(self, workers: int | None = None, timeout: float = 30.0):
        check_settings(workers, timeout)
        workers = workers or max(1, (os.cpu_count() or 1) // 2)
        self._timeout = timeout
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        self._workers = [_Worker() for _ in range(workers)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)

    def submit(self, item: Item) -> Future[Score]:
        """Start scoring an item. ValueError at once for a metric that does not exist."""
        check_metric(item.metric)
        return self._threads.submit(self._score, item)

    def close(self) -> None:
        """End the workers; items that wait are cancelled, items under way fail."""
        for worker in self._workers:
            worker.interrupt()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.stop()

    def _score(self, item: Item) -> Score:
        worker = self._idle.get()
        try:
            return worker.score(item, self._timeout)
        finally:
            self._idle.put(worker)


def check_settings(workers: int | None, timeout: float) -> None:
    """ValueError for a pool that could not work; `workers` None means as many as the machine suggests."""
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    if timeout <= 0:
        raise ValueError(f"timeout must be more than 0 seconds, got {timeout}")


def _made_up(task: Task | None) -> Transcript:
    answers = (task.answers if task else ()) or ("made up",)
    reply = f"\\boxed{{{answers[0]}}}"
    turns = (TranscriptTurn((1,), "memory", "A memory.", 4), TranscriptTurn((2,), "final", reply, 8))
    counters = {"document_tokens": 100, "truncated_tokens": 0, "model_calls": 2}
    question, extra = (task.question, task.extra) if task else ("Which one?", {})
    return Transcript(question, answers, answers[0], reply, turns, counters, {**extra})


def work(fd: int) -> None:
    """Score what comes through the pipe until its other end closes: the main function of a worker.

    Each item is answered twice: when its metric is imported, and with its score.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes the pipe
    with Connection(fd) as pipe:
        sys.path[:] = pipe.recv()
        pipe.send("ready")
        while True:
            try:
                item = pipe.recv()
            except EOFError:
                return
            metric = _imported(item.metric)
            pipe.send("imported")
            pipe.send((0.0, metric) if isinstance(metric, str) else _score_here(metric, item))


def _imported(name: str) -> Metric | str:
    """The metric, or why there is none."""
    try:
        return METRICS.get(name) or rewards.own_metric(name)
    except Exception as error:  # the boundary around a user's module, as below
        return str(error) if isinstance(error, ValueError) else f"metric {name!r}: {type(error).__name__}: {error}"


def _score_here(metric: Metric, item: Item) -> tuple[float, str | None, bool]:
    name = metric.name
    try:
        value = _called(metric, item)
        number = float("nan" if value is None or isinstance(value, str | bytes) else value)
    except Exception as error:  # the boundary around metrics: whatever they raise is recorded with the item
        return 0.0, f"metric {name!r} raised {type(error).__name__}: {error}", True
    if not math.isfinite(number):
        return 0.0, f"metric {name!r} gave {value!r}, which is not a finite number", False
    return number, None, False


def _called(metric: Metric, item: Item) -> Any:
    seen = item.transcript
    if metric.reads == "trajectory":
        if seen is None:
            raise ValueError("it reads the trajectory, and there is only an answer")
        return metric.function(seen)
    text = seen.reply if seen and metric.reads == "reply" else item.prediction
    if metric.name in METRICS:
        return rewards.score(metric.name, text, item.answers)
    return metric.function(text, item.answers)


class _Worker:
    """A place for one process: filled when it is first needed, and again after its process died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    def score(self, item: Item, timeout: float) -> Score:
        pipe = self._ready_pipe()
        try:
            pipe.send(item)
            for doing, limit in (("to import", _START_SECONDS), ("to score", timeout)):
                if not pipe.poll(limit):
                    self.interrupt()
                    self.stop()
                    return Score(0.0, f"metric {item.metric!r} took longer than {limit:g} s {doing}")
                answer = pipe.recv()
            return Score(*answer)
        except (EOFError, OSError):
            return Score(0.0, f"metric {item.metric!r} ended its process ({self.stop()})", raised=True)
        except (TypeError, AttributeError, pickle.PicklingError) as error:  # in a note, or in the task's extra
            return Score(0.0, f"metric {item.metric!r} cannot be given what the episode holds: {error}")

    def interrupt(self) -> None:
        """Kill the process; whoever waits for it finds out. Safe from any thread."""
        if self._process is not None:
            self._process.kill()

    def stop(self) -> str:
        """Empty the place and say how its process ended. Only for the thread that holds this worker."""
        code = None
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            try:
                code = self._process.wait(_EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                code = self._process.wait()
        self._process = self._pipe = None
        return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"

    def _ready_pipe(self) -> Connection:
        if self._process is not None and self._process.poll() is not None:
            self.stop()  # died while idle, which is not the fault of the item that comes
        return self._pipe or self._start()

    def _start(self) -> Connection:
        ours, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-c", _WORKER, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._pipe = ours
        try:
            ours.send(sys.path)
            started = ours.poll(_START_SECONDS) and ours.recv() == "ready"
        except (EOFError, OSError):
            started = False
        if not started:
            limit = f"{_START_SECONDS:g} s"
            raise RuntimeError(f"a reward process did not start within {limit} ({self.stop()}); its stderr says why")
        return ours
