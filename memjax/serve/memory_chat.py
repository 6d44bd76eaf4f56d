"""The model name memory/MODEL in chat completions: what does not fit the window is read with the memory loop."""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote
from uuid import uuid4

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from memjax.serve.errors import ApiError
from memjax.serve.memory_service import MemoryService
from memjax.serve.memory_store import RunRecord
from memjax.serve.memory_view import outcome_of
from memjax.serve.replies import ignored_headers
from memjax.serve.schemas import MAX_FILES, ChatRequest, ContentPart, MemoryRequest
from memjax.serve.service import CHARACTERS, off_loop
from memjax.serve.streaming import COMMENT, DONE, EventStream, sse, unless_gone
from memjax.serve.uploads import look_into

_SHORT = 400  # characters of a text that may be a question without asking
_DROPPED = ("stop", "logprobs", "top_logprobs", "top_k", "parallel_tool_calls")
"""Fields that mean something in other chats, and nothing to a reading."""


@dataclass(frozen=True)
class Asked:
    """A chat taken apart: its files are uploaded ones by id, and (name, content) of those that are within it."""

    document: str
    question: str
    file_ids: Sequence[str]
    inline: Sequence[tuple[str, bytes]]


class MemoryChat:
    """Answers chats about texts of any length."""

    def __init__(self, memory: MemoryService):
        self._memory = memory
        self.name = memory.name
        self._forgetting: set[asyncio.Task[None]] = set()  # nobody else holds these tasks

    async def is_needed(self, body: ChatRequest) -> bool:
        """Whether a file is attached, or the messages do not fit the window beside a reply."""
        text = "\n\n".join(part.text or "" for message in body.messages for part in message.parts)
        files = [part for message in body.messages for part in message.parts if part.type == "file"]
        limit = body.max_completion_tokens or body.max_tokens or 1
        service = self._memory.service
        if files or len(text) > service.window * CHARACTERS:
            return True
        return await off_loop(len(text), service.tokenizer.count, text) + limit + 64 > service.window

    async def answer(self, body: ChatRequest, request: Request) -> Response:
        """Read, and answer as a chat completion. The run ends with the request."""
        asked = await off_loop(sum(len(part.text or "") for m in body.messages for part in m.parts), taken_apart, body)
        record = await self._begin(asked, body, request)
        dropped = sorted({*body.ignored, *(name for name in _DROPPED if getattr(body, name))})
        shown = quote(asked.question[:200])
        headers = ignored_headers(body, dropped) | {"X-Memjax-Run": record.id, "X-Memjax-Question": shown}
        about = {"run": record.id, "question": asked.question}
        head = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time.time()), "model": body.model, "memjax": about}
        if body.stream:
            events = self._events(record, head, body)
            return EventStream(events, lambda: self._forget(record), limit=None, headers=headers)
        try:
            await unless_gone(request, self._memory.reader.finished(record))
            text, reason, spent = await self._outcome(record)
        finally:
            await self._memory.reader.forget(record)
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
        whole = {"object": "chat.completion", "choices": [choice], "usage": spent, "ignored_fields": dropped}
        return JSONResponse(head | whole, headers=headers)

    async def _begin(self, asked: Asked, body: ChatRequest, request: Request) -> RunRecord:
        if body.n != 1:
            raise ApiError(400, f"n: {self.name} gives one answer, got {body.n}")
        memory, owner = self._memory, request.state.owner
        limit = body.max_completion_tokens or body.max_tokens
        drawn = {name: getattr(body, name) for name in ("temperature", "top_p") if name in body.model_fields_set}
        given = {"text": asked.document or None, "file_ids": asked.file_ids, "question": asked.question}
        brought: list[str] = []
        try:
            for name, content in asked.inline:
                brought.append(await look_into(request, memory.bring, owner, name, io.BytesIO(content)))
        except BaseException:
            memory.drop(owner, brought)
            raise
        return await asyncio.to_thread(
            memory.begin,
            owner,
            MemoryRequest.model_validate(given | drawn | {"answer_tokens": limit, "seed": body.seed}),
            brought,
        )

    def _forget(self, record: RunRecord) -> None:
        task = asyncio.ensure_future(self._memory.reader.forget(record))
        self._forgetting.add(task)
        task.add_done_callback(self._forgetting.discard)

    async def _outcome(self, record: RunRecord) -> tuple[str, str, dict[str, Any]]:
        ended = await asyncio.to_thread(self._memory.store.get, record.owner, record.id)
        run = await asyncio.to_thread(self._memory.view, ended)
        if not run["answers"]:
            raise ApiError(503, run["error"] or f"the run was {ended.status} before its end")
        prompt, drawn = run["counters"]["prompt_tokens"], run["counters"]["generated_tokens"]
        spent = {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}
        outcome = await asyncio.to_thread(outcome_of, self._memory.store.journal_path(ended))
        last = list(outcome.drives["0"].calls.values())[-1]
        return run["answers"][0]["reply"], last["reply"]["finish"], spent

    async def _events(self, record: RunRecord, head: dict[str, Any], body: ChatRequest) -> AsyncIterator[bytes]:
        head = head | {"object": "chat.completion.chunk"}
        yield sse(head | {"choices": [_delta({"role": "assistant", "content": ""})]})
        async for event in self._memory.reader.follow(record):
            read = event and event.get("chunk")
            yield f": chunk {read['index'] + 1}\n\n".encode() if read else COMMENT
        try:
            text, reason, spent = await self._outcome(record)
        except ApiError as error:
            yield sse(error.body())
            return
        yield sse(head | {"choices": [_delta({"content": text})]})
        yield sse(head | {"choices": [_delta({}, reason)]})
        if body.usage_wanted:
            yield sse(head | {"choices": [], "usage": spent})
        yield DONE


def _delta(delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def taken_apart(body: ChatRequest) -> Asked:
    """What is to be read and what is asked; ApiError for parts that cannot be read, and where no question stands out.

    System texts stand in front of the question. What the assistant said before belongs to what is read.
    """
    file_ids: list[str] = []
    inline: list[tuple[str, bytes]] = []
    texts: list[str] = []  # of the user, and of the assistant in its place
    rules: list[str] = []
    if body.messages[-1].role == "assistant":
        raise ApiError(400, "the last message is the assistant's: a text that is read is asked about, not continued")
    for message in body.messages:
        for part in message.parts:
            if part.type == "file":
                _take_file(part, file_ids, inline)
            elif part.type != "text" or part.text is None:
                raise ApiError(400, f"a message holds a part of type {part.type[:40]!r}: text and files can be read")
            elif part.text.strip():
                said = f"Assistant: {part.text}" if message.role == "assistant" else part.text
                (rules if message.role in ("system", "developer") else texts).append(said)
    if (files := len(file_ids) + len(inline)) > MAX_FILES:
        raise ApiError(400, f"{files} files are attached, {MAX_FILES} are the most")
    if not texts or texts[-1].startswith("Assistant: "):
        raise ApiError(400, "no question: the last text of the user's messages is asked about what stands before it")
    documents, question = _question_of(texts, has_files=bool(file_ids or inline))
    return Asked("\n\n".join(documents), "\n\n".join([*rules, question]), file_ids, inline)


def _take_file(part: ContentPart, file_ids: list[str], inline: list[tuple[str, bytes]]) -> None:
    file = part.file or {}
    file_id, data = file.get("file_id"), file.get("file_data")
    if isinstance(file_id, str) and data is None:
        file_ids.append(file_id)
    elif isinstance(data, str) and file_id is None:
        name = file.get("filename")
        try:
            content = base64.b64decode(data.partition(",")[2] if data.startswith("data:") else data, validate=True)
        except binascii.Error as error:
            raise ApiError(
                400, f"file.file_data is not base64 ({error}): send data:TYPE;base64,... or base64"
            ) from None
        inline.append((name if isinstance(name, str) else "document", content))
    else:
        raise ApiError(400, "a part of type 'file' needs file.file_id, of an upload, or file.file_data, in base64")


def _question_of(texts: list[str], *, has_files: bool) -> tuple[list[str], str]:
    """The texts that are read, and the question: the last text, or where that is long its last or the first paragraph.

    What is asked about costs a whole reading, so that nothing is guessed where both or neither look like a question.
    """
    *before, last = texts
    alone = len(last) <= _SHORT or (_asks(last) and "\n\n" not in last.strip())
    if has_files or (before and alone and (_asks(last) or not _asks(before[0]))):
        return before, last.strip()
    paragraphs = [*before, *(piece for piece in last.split("\n\n") if piece.strip())]
    first, end = paragraphs[0].strip(), paragraphs[-1].strip()
    if len(paragraphs) < 2:
        raise ApiError(
            400, "no question found: put it in the last paragraph, after an empty line, or in a message of its own"
        )
    likely = (_likeness(end), _likeness(first))
    if (first == end and _asks(end)) or likely[0] > likely[1]:
        return paragraphs[:-1], end
    if likely[1] > likely[0]:
        return paragraphs[1:], first
    raise ApiError(
        400,
        f"the first paragraph ({first[:60]!r}) or the last ({end[:60]!r}) may be the question: "
        "put it in a last message of its own",
    )


def _likeness(text: str) -> int:
    return 2 if _asks(text) else int(len(text) <= _SHORT)


def _asks(text: str) -> bool:
    return len(text) <= 10 * _SHORT and text.rstrip().rstrip("\"')*_»”’").endswith(("?", "？", "؟"))
