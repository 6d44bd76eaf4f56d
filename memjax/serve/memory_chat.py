"""The model name memory/MODEL in chat completions: what does not fit the window is read with the memory loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from memjax.serve.errors import ApiError
from memjax.serve.memory_service import MemoryService
from memjax.serve.memory_store import RunRecord
from memjax.serve.replies import ignored_headers
from memjax.serve.schemas import MAX_FILES, ChatRequest, MemoryRequest
from memjax.serve.service import CHARACTERS, off_loop
from memjax.serve.streaming import COMMENT, DONE, EventStream, sse, unless_gone


class MemoryChat:
    """Answers chats about texts of any length."""

    def __init__(self, memory: MemoryService):
        self._memory = memory
        self.name = memory.name
        self._forgetting: set[asyncio.Task[None]] = set()  # nobody else holds these tasks

    async def is_needed(self, body: ChatRequest) -> bool:
        """Whether a file is attached, or the messages do not fit the window beside a reply."""
        text, files = _contents(body)
        limit = body.max_completion_tokens or body.max_tokens or 1
        service = self._memory.service
        if files or len(text) > service.window * CHARACTERS:
            return True
        return await off_loop(len(text), service.tokenizer.count, text) + limit + 64 > service.window

    async def answer(self, body: ChatRequest, request: Request) -> Response:
        """Read, and answer as a chat completion. The run ends with the request."""
        record = await asyncio.to_thread(self._memory.begin, request.state.owner, self._request(body))
        headers = ignored_headers(body) | {"X-Memjax-Run": record.id}
        head = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time.time()), "model": body.model}
        if body.stream:
            events = self._events(record, head, body)
            return EventStream(events, lambda: self._forget(record), limit=None, headers=headers)
        try:
            await unless_gone(request, self._memory.reader.finished(record))
            text, spent = await self._outcome(record)
        finally:
            await self._memory.reader.forget(record)
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        whole = {"object": "chat.completion", "choices": [choice], "usage": spent, "ignored_fields": body.ignored}
        return JSONResponse(head | whole, headers=headers)

    def _request(self, body: ChatRequest) -> MemoryRequest:
        text, files = _contents(body)
        if body.n != 1:
            raise ApiError(400, f"n: {self.name} gives one answer, got {body.n}")
        if len(files) > MAX_FILES:
            raise ApiError(400, f"{len(files)} files are attached, {MAX_FILES} are the most")
        document, question = _split(body)
        if not files and not document.strip():
            document, question = _split_text(text)
        limit = body.max_completion_tokens or body.max_tokens
        asked = {"text": document or None, "file_ids": files, "question": question}
        drawn = {name: getattr(body, name) for name in ("temperature", "top_p") if name in body.model_fields_set}
        return MemoryRequest.model_validate(asked | drawn | {"answer_tokens": limit, "seed": body.seed})

    def _forget(self, record: RunRecord) -> None:
        task = asyncio.ensure_future(self._memory.reader.forget(record))
        self._forgetting.add(task)
        task.add_done_callback(self._forgetting.discard)

    async def _outcome(self, record: RunRecord) -> tuple[str, dict[str, Any]]:
        ended = await asyncio.to_thread(self._memory.store.get, record.owner, record.id)
        run = await asyncio.to_thread(self._memory.view, ended)
        if not run["answers"]:
            raise ApiError(503, run["error"] or f"the run was {ended.status} before its end")
        prompt, drawn = run["counters"]["prompt_tokens"], run["counters"]["generated_tokens"]
        spent = {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}
        return run["answers"][0]["reply"], spent

    async def _events(self, record: RunRecord, head: dict[str, Any], body: ChatRequest) -> AsyncIterator[bytes]:
        head = head | {"object": "chat.completion.chunk"}
        yield sse(head | {"choices": [_delta({"role": "assistant", "content": ""})]})
        async for event in self._memory.reader.follow(record):
            read = event and event.get("chunk")
            yield f": chunk {read['index'] + 1}\n\n".encode() if read else COMMENT
        try:
            text, spent = await self._outcome(record)
        except ApiError as error:
            yield sse(error.body())
            return
        yield sse(head | {"choices": [_delta({"content": text})]})
        yield sse(head | {"choices": [_delta({}, "stop")]})
        if body.usage_wanted:
            yield sse(head | {"choices": [], "usage": spent})
        yield DONE


def _delta(delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _contents(body: ChatRequest) -> tuple[str, list[str]]:
    """All text of the messages, and the ids of the files attached to them."""
    texts, files = [], []
    for message in body.messages:
        for part in message.parts:
            if part.type == "text" and part.text is not None:
                texts.append(part.text)
            elif part.type == "file" and isinstance(file_id := (part.file or {}).get("file_id"), str):
                files.append(file_id)
            else:
                raise ApiError(400, f"a message holds a part of type {part.type[:40]!r}: text and file ids can be read")
    return "\n\n".join(texts), files


def _split(body: ChatRequest) -> tuple[str, str]:
    """The document and the question: the last text of the user is the question."""
    texts: list[str] = []
    for message in body.messages:
        texts += [part.text for part in message.parts if part.text and message.role == "user"]
    if not texts:
        raise ApiError(400, "no question: the last text of the user's messages is asked about what stands before it")
    return "\n\n".join(texts[:-1]), texts[-1]


def _split_text(text: str) -> tuple[str, str]:
    """The document and the question in one text: the question is its last paragraph."""
    document, gap, question = text.rstrip().rpartition("\n\n")
    if not gap or not document.strip():
        raise ApiError(
            400, "no question found: put it in the last paragraph, after an empty line, or in a message of its own"
        )
    return document, question.strip()
