"""Reads documents for the server: every reading is a task of one event loop in a thread of its own.

So cutting a document, or writing a state, never holds up the loop that serves requests; the model's calls of all
readings meet in the scheduler and share its batch.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import JsonValue

from memjax.agents.memagent import MemAgent
from memjax.ask import AskState, Step, read_rest_and_answer, trace_records
from memjax.data.chunks import Chunk
from memjax.data.documents import Document, inspected
from memjax.rewards.answers import extract_answer
from memjax.rollout.client import ClientError
from memjax.serve.backend import Backend
from memjax.serve.errors import ApiError
from memjax.serve.memory_store import Part, RunRecord, RunStore, append_line, part_path

log = logging.getLogger(__name__)

Event = dict[str, Any]

_KEEP_ALIVE = 15.0  # seconds; proxies end a connection on which nothing comes for a minute


class MemoryReader:
    """Owns the reading thread from construction to `close`; its methods are called from the server's event loop."""

    def __init__(self, store: RunStore, client: Backend, *, fingerprint: str, max_runs: int):
        self.store, self.fingerprint = store, fingerprint
        self._client, self._max_runs = client, max_runs
        self._tasks: dict[str, asyncio.Task[bool] | None] = {}  # None until the loop has taken it on
        self._closing = False
        self._readers: dict[str, set[tuple[asyncio.AbstractEventLoop, asyncio.Queue[Event | None]]]] = {}
        self._lock = threading.Lock()  # guards the two above
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="memjax-reader", daemon=True)
        self._thread.start()

    @property
    def active(self) -> int:
        """Readings under way."""
        return len(self._tasks)

    def is_active(self, run_id: str) -> bool:
        """Whether this reading is under way."""
        return run_id in self._tasks

    def refuse_if_full(self) -> None:
        """ApiError 429 where no other reading can begin."""
        if len(self._tasks) >= self._max_runs:
            raise ApiError(
                429, f"{self._max_runs} documents are being read, which is the most", headers={"Retry-After": "30"}
            )

    def start(self, record: RunRecord) -> None:
        """Begin, or go on with, a reading; one that is under way stays so."""
        with self._lock:
            if record.id not in self._tasks and not self._closing:
                self._tasks[record.id] = None
                self._loop.call_soon_threadsafe(self._launch, record)

    def resume_all(self) -> None:
        """Go on with what was being read when the server ended."""
        for record in self.store.list():
            if record.status == "reading":
                self.start(record)

    async def stop(self, record: RunRecord) -> None:
        """End a reading before its next step; it can go on later."""
        await self._cancel(record.id)
        change = partial(_with_status, status="stopped")
        stopped = await asyncio.to_thread(self.store.update, record.owner, record.id, change)
        if stopped.status == "stopped":
            await asyncio.to_thread(self._publish, stopped, {"type": "stopped"})

    async def forget(self, record: RunRecord) -> None:
        """End a reading and delete what it kept."""
        await self._cancel(record.id)
        await asyncio.to_thread(self.store.delete, record.owner, record.id)

    async def follow(self, record: RunRecord, after: int = -1) -> AsyncIterator[Event | None]:
        """The events after the one with that id, as they come, to the end of the reading; None now and then."""
        queue: asyncio.Queue[Event | None] = asyncio.Queue()
        reader = asyncio.get_running_loop(), queue
        with self._lock:
            self._readers.setdefault(record.id, set()).add(reader)
        try:
            active = self.is_active(record.id)
            for event in await asyncio.to_thread(list, self.store.events(record, after)):
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
                self._readers[record.id].discard(reader)
                if not self._readers[record.id]:
                    del self._readers[record.id]

    async def finished(self, record: RunRecord) -> RunRecord:
        """The record, once the reading is over."""
        async for _ in self.follow(record):
            pass
        return await asyncio.to_thread(self.store.get, record.owner, record.id)

    def end_all(self) -> None:
        """End every reading where it is, and begin no other; a later server goes on."""
        self._closing = True
        for run_id in list(self._tasks):
            asyncio.run_coroutine_threadsafe(self._end_task(run_id), self._loop).result()

    def close(self) -> None:
        """`end_all`, and let go of the thread."""
        self.end_all()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _cancel(self, run_id: str) -> None:
        if self.is_active(run_id):
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._end_task(run_id), self._loop))

    # -- in the reading thread

    def _launch(self, record: RunRecord) -> None:
        task = self._loop.create_task(self._run(record))
        self._tasks[record.id] = task
        task.add_done_callback(partial(self._ended, record))

    async def _end_task(self, run_id: str) -> None:
        task = self._tasks.get(run_id)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _ended(self, record: RunRecord, task: asyncio.Task[bool]) -> None:
        with self._lock:
            self._tasks.pop(record.id, None)
        self._tell(record.id, None)
        if task.cancelled() or not task.result():
            return
        with suppress(ApiError):  # it was deleted
            record = self.store.get(record.owner, record.id)
            if record.status == "reading":  # a document was appended just after the last was read
                self.start(record)

    async def _run(self, record: RunRecord) -> bool:
        """Whether the reading came to its end."""
        failure = None
        try:
            await self._read(record)
        except (ValueError, ClientError, ApiError) as error:
            failure = str(error)
        except OSError as error:
            failure = f"the reading's state cannot be kept ({error.strerror})"
        except Exception as error:  # the boundary of a reading: it must not end in silence
            log.exception("reading %s failed", record.id)
            failure = f"an error of the server ({type(error).__name__}), which it has logged"
        if failure is not None:
            self._fail(record, failure)
        return failure is None

    async def _read(self, record: RunRecord) -> None:
        if record.fingerprint != self.fingerprint:
            raise ValueError("the reading was begun with another model: begin it again")
        agent = record.settings.memory_agent(self._client.tokenizer)
        while record.status == "reading":
            state = self.store.state(record) or _first_state(agent, record)
            state = state.model_copy(update={"answers": None})
            self._catch_up(record, state)
            on_step = partial(self._on_step, record)
            chunks = self._rest(agent, record, state.chunks_read)
            await read_rest_and_answer(agent, chunks, self._client, state, self.store.state_path(record), on_step)
            record = self.store.update(record.owner, record.id, _done_unless_unread)

    def _rest(self, agent: MemAgent, record: RunRecord, read: int) -> Iterator[Chunk]:
        """The chunks of all documents after the first `read`; documents that were appended meanwhile are among them."""
        number = chunks = tokens = 0
        directory = self.store.directory(record.owner, record.id)
        while number < len(parts := self.store.get(record.owner, record.id).parts):
            part = parts[number]
            if part.chunks is None:
                document = Document((inspected(part_path(directory, number), part.name),))
                count = length = 0
                for chunk in agent.chunks(document):
                    if chunks + chunk.index >= read:
                        yield _moved(chunk, chunks, tokens)
                    count, length = chunk.index + 1, chunk.start_token + len(chunk.ids)
                part = part.model_copy(update={"chunks": count, "tokens": length})
                self.store.update(record.owner, record.id, partial(_with_part, number=number, part=part))
            chunks, tokens, number = chunks + (part.chunks or 0), tokens + part.tokens, number + 1

    def _on_step(self, record: RunRecord, step: Step) -> None:
        for line in trace_records(step, self._client.tokenizer.decode):
            append_line(self.store.trace_path(record), line)
        chunk_tokens = record.settings.chunk_tokens
        if step.chunk is None:
            self._publish(record, answer_event(step.state))
            return
        event = chunk_event(step.state, max(step.chunk.document_tokens, step.state.document_tokens), chunk_tokens)
        seconds = max(turn.completion.seconds for turn in step.turns)
        event |= {
            "seconds": round(seconds, 3),
            "tokens_per_second": round(len(step.chunk.ids) / max(seconds, 1e-6), 1),
            "weights_version": step.turns[0].completion.weights_version,
        }
        self._publish(record, event)

    def _catch_up(self, record: RunRecord, state: AskState) -> None:
        """Tell of a chunk that was read just before the server was killed."""
        told = max((event.get("chunk", 0) for event in self.store.events(record)), default=0)
        if state.chunks_read > told:
            self._publish(record, chunk_event(state, state.document_tokens, record.settings.chunk_tokens))

    def _fail(self, record: RunRecord, failure: str) -> None:
        try:
            self.store.update(record.owner, record.id, partial(_with_status, status="failed", error=failure))
            self._publish(record, {"type": "failed", "error": failure})
        except (OSError, ApiError):  # the disk is full, or the reading was deleted: tell those who listen
            log.exception("the failure of reading %s cannot be kept: %s", record.id, failure)
            self._tell(record.id, {"id": 1 << 53, "type": "failed", "error": failure})

    def _publish(self, record: RunRecord, event: Event) -> None:
        event = {"id": self.store.next_event_id(record), **event}
        append_line(self.store.events_path(record), event)
        self._tell(record.id, event)

    def _tell(self, run_id: str, event: Event | None) -> None:
        with self._lock:
            for loop, queue in self._readers.get(run_id, ()):
                loop.call_soon_threadsafe(queue.put_nowait, event)


def chunk_event(state: AskState, document_tokens: int, chunk_tokens: int) -> Event:
    """What the model remembers after a chunk; the number of chunks is estimated until the last."""
    left = max(0, document_tokens - state.document_tokens)
    return {
        "type": "chunk",
        "chunk": state.chunks_read,
        "chunks": state.chunks_read + -(-left // chunk_tokens),
        "tokens_read": state.document_tokens,
        "document_tokens": document_tokens,
        "memories": [{"question": reading.question, "memory": reading.memory_text} for reading in state.readings],
    }


def answer_event(state: AskState) -> Event:
    """The answers, and what they took."""
    return {
        "type": "answer",
        "answers": [
            {"question": reading.question, "answer": extract_answer(text), "reply": text, "memory": reading.memory_text}
            for reading, text in zip(state.readings, state.answers or (), strict=True)
        ],
        "chunks": state.chunks_read,
        "tokens_read": state.document_tokens,
        "seconds": round(state.seconds, 3),
        "counters": dict(state.counters),
    }


def _first_state(agent: MemAgent, record: RunRecord) -> AskState:
    readings = tuple(agent.start(question) for question in record.settings.questions)
    identity: dict[str, JsonValue] = {"prompts": agent.prompts.digest, "model": record.fingerprint}
    return AskState(settings=record.settings, identity=identity, readings=readings)


def _moved(chunk: Chunk, chunks: int, tokens: int) -> Chunk:
    """The chunk of a document as one of the reading, after so many others."""
    return replace(
        chunk,
        index=chunks + chunk.index,
        start_token=tokens + chunk.start_token,
        document_tokens=tokens + chunk.document_tokens,
    )


def _with_part(record: RunRecord, *, number: int, part: Part) -> RunRecord:
    parts = (*record.parts[:number], part, *record.parts[number + 1 :])
    return record.model_copy(update={"parts": parts})


def _with_status(record: RunRecord, *, status: str, error: str | None = None) -> RunRecord:
    if record.status != "reading":  # it came to its end by itself
        return record
    return record.model_copy(update={"status": status, "error": error})


def _done_unless_unread(record: RunRecord) -> RunRecord:
    return record if record.unread else record.model_copy(update={"status": "done"})
