"""Drives the episodes of runs: every run is a task of one event loop in a thread of its own.

So cutting a document, or writing a journal, never holds up the loop that serves requests; the model's calls of all runs
meet in the scheduler and share its batch. A run that was stopped or killed is driven again: its journal answers every
call that was made before.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from memjax.data.parsing import ended_with_block
from memjax.episodes.acting import EnvironmentFailure
from memjax.episodes.feed import Feed
from memjax.episodes.journal import EpisodeJournal, Journal, JournalError, Line
from memjax.episodes.run import AgentError, run_episode
from memjax.rollout.client import ClientError
from memjax.rollout.identity import ModelIdentity
from memjax.serve.backend import Backend
from memjax.serve.disk import disk_problem
from memjax.serve.errors import ApiError
from memjax.serve.memory_store import RunRecord, RunStore, Status
from memjax.serve.memory_view import Event, event_of, events_of, outcome_of
from memjax.trajectory import Task, Trajectory

log = logging.getLogger(__name__)

_KEEP_ALIVE = 15.0  # seconds; proxies end a connection on which nothing comes for a minute


class MemoryReader:
    """Owns the reading thread from construction to `close`; its methods are called from the server's event loop.

    `tasks` are the runs under way, by id.
    """

    def __init__(
        self, store: RunStore, client: Backend, *, identity: ModelIdentity, max_runs: int, max_runs_per_owner: int
    ):
        self.store = store
        self.tasks: dict[str, asyncio.Task[None] | None] = {}  # None until the loop has taken it on
        self._client, self._identity = client, identity
        self._max_runs, self._max_runs_per_owner = max_runs, max_runs_per_owner
        self._owners: dict[str, str] = {}  # of the tasks
        self._places: list[str] = []  # owners of runs that are about to begin
        self._followers: set[tuple[str, asyncio.AbstractEventLoop, asyncio.Queue[Event | None]]] = set()
        self._lock = threading.Lock()  # guards all above
        self._closing = False
        self._journals: set[EpisodeJournal] = set()  # of the episodes under way
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(max_runs + 8, "memjax-reader"))  # none waits for another
        self._thread = threading.Thread(target=self._loop.run_forever, name="memjax-reader", daemon=True)
        self._thread.start()

    @contextmanager
    def place_for(self, owner: str) -> Iterator[None]:
        """Hold a place for another run until the end of the block; ApiError 429 where there is none."""
        with self._lock:
            all_owners = [*self._owners.values(), *self._places]
            most = None
            if len(all_owners) >= self._max_runs:
                most = f"{self._max_runs} documents are being read, which is the most (max_runs)"
            elif all_owners.count(owner) >= self._max_runs_per_owner:
                most = (
                    f"{self._max_runs_per_owner} documents of this key are being read, which is its share (max_share)"
                )
            if most:
                raise ApiError(429, f"{most}: wait until one is done, or stop one", headers={"Retry-After": "30"})
            self._places.append(owner)
        try:
            yield
        finally:
            with self._lock:
                self._places.remove(owner)

    def place(self, record: RunRecord) -> AbstractContextManager[None]:
        """`place_for` a run that is to continue, which needs none where it is under way."""
        return nullcontext() if record.id in self.tasks else self.place_for(record.owner)

    def start(self, record: RunRecord) -> None:
        """Begin, or continue, a run; one that is under way stays so."""
        with self._lock:
            if record.id not in self.tasks and not self._closing:
                self.tasks[record.id], self._owners[record.id] = None, record.owner
                self._loop.call_soon_threadsafe(self._launch, record)

    def resume_all(self) -> None:
        """Continue what was being read when the server ended, and stop what only another model can continue."""
        for record in self.store.list():
            if record.status != "reading":
                continue
            if outcome_of(self.store.journal_path(record)).is_of(self._identity):
                self.start(record)
            else:
                why = "it was begun with another model than the one that is served: serve that one, then resume it"
                self._keep(record, status="stopped", error=why)

    async def stop(self, record: RunRecord) -> None:
        """Stop a run where it is; it can continue later. ApiError 507 where only this process knows that it stopped."""
        await self._halt(record)
        if self.store.is_held(record):
            raise ApiError(
                507, "the server's state directory is full: the run reads no more, but does again after a restart"
            )

    async def forget(self, record: RunRecord) -> None:
        """Stop a run and delete what it kept."""
        await self._halt(record)
        await asyncio.to_thread(self.store.delete, record)

    async def _halt(self, record: RunRecord) -> None:
        await asyncio.to_thread(self._keep, record, status="stopped")
        if record.id in self.tasks:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._end_task(record.id), self._loop))

    def _keep(self, record: RunRecord, **changes: Any) -> None:
        """Change how a run under way stands, unless it was deleted or damaged meanwhile."""
        with suppress(ApiError):
            self.store.update(record, partial(_with_status, **changes), hold=True)

    def change_model(self, identity: ModelIdentity) -> None:
        """Other weights were loaded: the calls of all runs are theirs from now on."""

        def change() -> None:
            self._identity = identity
            for journal in self._journals:
                with suppress(JournalError):  # which its run meets at its next line
                    journal.change_model(identity)

        self._loop.call_soon_threadsafe(change)

    async def follow(self, record: RunRecord, after: int = -1) -> AsyncIterator[Event | None]:
        """The events after the one with that id, as they come, to the end of the run; None now and then."""
        queue: asyncio.Queue[Event | None] = asyncio.Queue()
        follower = record.id, asyncio.get_running_loop(), queue
        with self._lock:
            self._followers.add(follower)
            active = record.id in self.tasks
        try:
            for event in await asyncio.to_thread(events_of, self.store.journal_path(record), after):
                after = event["id"]
                yield event
            while active:
                try:
                    next_event = await asyncio.wait_for(queue.get(), _KEEP_ALIVE)
                except TimeoutError:
                    yield None
                    continue
                if next_event is None:
                    return
                if next_event["id"] > after:
                    yield next_event
        finally:
            with self._lock:
                self._followers.discard(follower)

    async def finished(self, record: RunRecord) -> RunRecord:
        """The record, once the run is over."""
        async for _ in self.follow(record):
            pass
        return await asyncio.to_thread(self.store.get, record.owner, record.id)

    def end_all(self) -> None:
        """End every run where it is, and begin no other; a later server continues them."""
        self._closing = True
        for run_id in list(self.tasks):
            asyncio.run_coroutine_threadsafe(self._end_task(run_id), self._loop).result()

    def close(self) -> None:
        """`end_all`, and let go of the thread."""
        self.end_all()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # -- in the reading thread

    def _launch(self, record: RunRecord) -> None:
        task = self.tasks[record.id] = self._loop.create_task(self._run(record))
        task.add_done_callback(lambda _: self._ended(record))

    async def _end_task(self, run_id: str) -> None:
        if task := self.tasks.get(run_id):
            if not task.cancelling():  # a second time would interrupt the closing of its journal
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _ended(self, record: RunRecord) -> None:
        with self._lock:
            self.tasks.pop(record.id, None)
            self._owners.pop(record.id, None)
        self._tell(record.id, None)
        with suppress(ApiError):  # it was deleted
            record = self.store.get(record.owner, record.id)
            if record.status == "reading":  # a document was appended just after the last was read
                self.start(record)

    async def _run(self, record: RunRecord) -> None:
        status = 503
        try:
            with ended_with_block():  # a parser that is busy with a document of this run
                while record.status == "reading":
                    await self._drive(record)
                    record = self.store.update(record, partial(_done_if_read, documents=record.documents), hold=True)
            return
        except AgentError as error:  # whose place is nothing for a client
            log.exception("run %s failed in its agent", record.id)
            failure = f"the agent failed ({type(error.__cause__).__name__}), which the server has logged"
        except (ValueError, ClientError, ApiError, EnvironmentFailure) as error:
            failure = self._told(str(error), record)
        except OSError as error:
            problem = disk_problem(error.cause if isinstance(error, JournalError) else error)
            failure, status = f"{problem}: what was read is kept; resume the run when there is room", 507
        except Exception as error:  # the boundary of a run: it must not end in silence
            log.exception("run %s failed", record.id)
            failure = f"an error of the server ({type(error).__name__}), which it has logged"
        self._keep(record, status="failed", error=failure, failed_with=status)

    def _told(self, error: str, record: RunRecord) -> str:
        """An error as clients see it: of a file of the server neither its path nor what to do at a command line."""
        directory = f"{self.store.journal_path(record).parent}/"
        return error.replace(directory, "").rpartition(": ")[0] if directory in error else error

    async def _drive(self, record: RunRecord) -> None:
        """Work all questions side by side; raises what failed one of them, once the others are done."""
        tokenizer = self._client.tokenizer
        documents = await asyncio.to_thread(self.store.documents, record)
        if documents.notes != record.warnings:
            self.store.update(record, lambda now: now.model_copy(update={"warnings": documents.notes}), hold=True)
        feed = Feed(documents, tokenizer, len(record.questions))

        async def answer(episode: str, question: str) -> Trajectory:
            journal = EpisodeJournal(opened, episode, self._identity, tokenizer)
            task = Task(record.id, question, documents)
            self._journals.add(journal)
            try:
                return await run_episode(
                    record.agent, task, self._client, tokenizer, record.sampling,
                    journal=journal, feed=feed, keep_turns=False,
                )  # fmt: skip
            finally:
                self._journals.discard(journal)

        async with _opened(self.store.journal_path(record)) as opened:
            opened.listen(partial(self._publish, record.id))
            asked = enumerate(record.questions)
            ended = await asyncio.gather(*(answer(str(number), question) for number, question in asked))
        for trajectory in ended:
            if trajectory.failure is not None:
                raise trajectory.failure

    # -- in a journal's thread

    def _publish(self, run_id: str, number: int, line: Line) -> None:
        if event := event_of(number, line):
            self._tell(run_id, event)

    def _tell(self, run_id: str, event: Event | None) -> None:
        with self._lock:
            for followed, loop, queue in self._followers:
                if followed == run_id:
                    with suppress(RuntimeError):  # the loop of the follower is closed
                        loop.call_soon_threadsafe(queue.put_nowait, event)


@asynccontextmanager
async def _opened(path: Path) -> AsyncIterator[Journal]:
    """The journal, opened and closed in a thread: it may be long. A cancelled opening is waited for, and closed."""
    opening = asyncio.ensure_future(asyncio.to_thread(Journal, path))
    try:
        yield await asyncio.shield(opening)
    finally:
        await asyncio.to_thread((await opening).close)


def _with_status(record: RunRecord, *, status: Status, error: str | None = None, failed_with: int = 503) -> RunRecord:
    if record.status != "reading":  # it came to its end by itself
        return record
    return record.model_copy(update={"status": status, "error": error, "failed_with": failed_with})


def _done_if_read(record: RunRecord, *, documents: tuple[str, ...]) -> RunRecord:
    """Done, unless it was stopped, or documents were appended while these were read."""
    return _with_status(record, status="done") if record.documents == documents else record
