"""Runs as clients ask for them: what they may say, what is checked before anything is read, and what they see."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from memjax.agents.registry import AnyAgent
from memjax.episodes.run import check_window
from memjax.serve.errors import ApiError, sentence
from memjax.serve.file_store import FileStore
from memjax.serve.memory_reader import MemoryReader
from memjax.serve.memory_store import RunRecord
from memjax.serve.memory_view import outcome_of
from memjax.serve.replies import check_model
from memjax.serve.schemas import MAX_QUESTIONS, AppendRequest, MemoryRequest, drawable
from memjax.serve.service import ModelService
from memjax.trajectory import SamplingParams

_AGENT_FIELDS = {  # by the name that a request gives them
    name: name.removesuffix("_tokens")
    for name in ("chunk_tokens", "memory_tokens", "answer_tokens", "question_tokens", "layout")
}


class MemoryService:
    """Documents and runs of the served model, by owner. Its methods block on the disk: call them in a thread.

    Every run is of the `agent` that the server was started with, with the budgets that its client chose.
    """

    def __init__(self, service: ModelService, files: FileStore, reader: MemoryReader, agent: AnyAgent):
        self.service, self.files, self.reader, self.store = service, files, reader, reader.store
        self._agent = agent
        self.name = f"memory/{service.name}"

    def begin(self, owner: str, body: MemoryRequest) -> RunRecord:
        """Check everything that can be checked and begin to read."""
        check_model(body.model or self.name, self.name, self.service.name)
        self.service.refuse_unless_ready()
        self.reader.refuse_if_full()
        questions = body.all_questions
        if not questions:
            raise ApiError(400, "no question: give question or questions")
        if len(questions) > MAX_QUESTIONS:
            raise ApiError(400, f"{len(questions)} questions are too many: {MAX_QUESTIONS} are the most")
        agent, sampling = self._chosen(body, questions)
        with self._documents(owner, body.text, body.all_files) as documents:
            asked = {"model": self.name, "questions": questions, "agent": agent, "sampling": sampling}
            record = self.store.create(owner, documents, **asked)
        self.reader.start(record)
        return record

    def append(self, owner: str, run_id: str, body: AppendRequest) -> RunRecord:
        """Read on in other documents."""
        self.service.refuse_unless_ready()
        record = self.store.get(owner, run_id)
        if run_id not in self.reader.tasks:
            self.reader.refuse_if_full()
        with self._documents(owner, body.text, body.file_ids) as documents:
            record = self.store.resume(record, documents)
        self.reader.start(record)
        return record

    def resume(self, owner: str, run_id: str) -> RunRecord:
        """Continue a run that was stopped or failed."""
        self.service.refuse_unless_ready()
        self.reader.refuse_if_full()
        record = self.store.get(owner, run_id)
        if record.status in ("stopped", "failed"):
            record = self.store.resume(record)
        if record.status == "reading":
            self.reader.start(record)
        return record

    def view(self, record: RunRecord) -> dict[str, Any]:
        """A run as clients see it."""
        agent, outcome = record.agent.model_dump(mode="json"), outcome_of(self.store.journal_path(record))
        settings = {name: agent[field] for name, field in _AGENT_FIELDS.items() if field in agent}
        return {
            "id": record.id,
            "object": "memory.run",
            **record.model_dump(include={"status", "model", "created", "updated"}),
            "error": record.error or outcome.damage,
            "documents": list(record.documents),
            "questions": list(record.questions),
            "settings": settings | {name: getattr(record.sampling, name) for name in ("temperature", "top_p", "seed")},
            **outcome.view(record.questions, done=record.status == "done"),
        }

    def _chosen(self, body: MemoryRequest, questions: Sequence[str]) -> tuple[AnyAgent, SamplingParams]:
        """The agent with what the request says of it, fitted to the window, and how to draw; ApiError 400."""
        given = {name: value for name in _AGENT_FIELDS if (value := getattr(body, name)) is not None}
        served, tokenizer, window = self._agent, self.service.tokenizer, self.service.window
        for name in given:
            if _AGENT_FIELDS[name] not in type(served).model_fields:
                raise ApiError(400, f"{name}: the agent {served.name}, which is served here, has nothing of the kind")
        chosen = {_AGENT_FIELDS[name]: value for name, value in given.items()}
        try:
            agent = type(served).model_validate(served.model_dump() | chosen)
            longest = max(questions, key=tokenizer.count)
            agent = agent.fitted(served.model_fields_set | chosen.keys(), longest, tokenizer, window)
            for question in questions:
                check_window(agent, question, tokenizer, window, self.service.name)
            temperature, top_p = drawable(body.temperature or 0.0), body.top_p or 1.0
            return agent, SamplingParams(temperature=temperature, top_p=top_p, seed=body.seed or 0)
        except ValidationError as error:
            first = dict(error.errors()[0])
            asked = next((name for name, field in _AGENT_FIELDS.items() if first["loc"] == (field,)), None)
            raise ApiError(400, sentence(first | ({"loc": (asked,)} if asked else {}))) from None
        except ValueError as error:
            raise ApiError(400, str(error)) from None

    @contextmanager
    def _documents(self, owner: str, text: str | None, file_ids: Sequence[str]) -> Iterator[list[tuple[str, Path]]]:
        """Names and paths of what is to be read, while a run makes them its own: until then a text is a file too."""
        if self._agent.needs_document and not text and not file_ids:
            raise ApiError(400, "no document: give text, file_id, or upload a file")
        kept = [self.files.add(owner, "text", io.BytesIO(text.encode())).id] if text else []
        try:
            yield [(self.files.get(owner, one).name, self.files.content(owner, one)) for one in (*kept, *file_ids)]
        finally:
            for one in kept:
                self.files.delete(owner, one)
