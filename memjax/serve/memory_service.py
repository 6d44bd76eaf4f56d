"""Runs as clients ask for them: what they may say, what is checked before anything is read, and what they see."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from memjax.agents.registry import AnyAgent
from memjax.episodes.run import check_window
from memjax.serve.errors import ApiError, sentence
from memjax.serve.file_store import FileStore
from memjax.serve.memory_reader import MemoryReader
from memjax.serve.memory_store import RunRecord, Status
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

    def __init__(
        self, service: ModelService, files: FileStore, brought: FileStore, reader: MemoryReader, agent: AnyAgent
    ):
        self.service, self.files, self.brought = service, files, brought
        self.reader, self.store = reader, reader.store
        self._agent = agent
        self.name = f"memory/{service.name}"

    def bring(self, owner: str, name: str, content: BinaryIO) -> str:
        """Take a document that came with a request. Its id is for `begin`, or `drop`: it goes with its run."""
        return self.brought.add(owner, name, content).id

    def drop(self, owner: str, brought: Sequence[str]) -> None:
        """Forget documents that came with a request."""
        for one in brought:
            with suppress(ApiError):  # a sweep may have been faster
                self.brought.delete(owner, one)

    def begin(self, owner: str, body: MemoryRequest, brought: Sequence[str] = ()) -> RunRecord:
        """Check everything that can be checked and begin to read. Whatever comes of it, what was `brought` goes."""
        try:
            return self._begin(owner, body, brought)
        finally:
            self.drop(owner, brought)

    def append(self, owner: str, run_id: str, body: AppendRequest) -> RunRecord:
        """Read on in other documents."""
        self.service.refuse_unless_ready()
        record = self.usable(owner, run_id)
        with self.reader.place(record), self._documents(owner, body.text, body.file_ids) as documents:
            record = self.store.resume(record, documents)
            self.reader.start(record)
        return record

    def resume(self, owner: str, run_id: str) -> RunRecord:
        """Continue a run that was stopped or failed."""
        self.service.refuse_unless_ready()
        record = self.usable(owner, run_id)
        with self.reader.place(record):
            if record.status in ("stopped", "failed"):
                record = self.store.resume(record)
            if record.status == "reading":
                self.reader.start(record)
        return record

    def usable(self, owner: str, run_id: str) -> RunRecord:
        """The run; ApiError 409 where it is damaged, 404 where it is not there."""
        record = self.store.get(owner, run_id)
        if damage := self.damage(record):
            raise ApiError(409, damage)
        return record

    def damage(self, record: RunRecord) -> str | None:
        """Why a run cannot be used any more; None where it can."""
        if record.status == "damaged":
            return record.error
        outcome = outcome_of(self.store.journal_path(record))
        if outcome.is_damaged:
            return "this run is damaged, its journal cannot be read: delete it and begin it again"
        if record.status == "done" and not outcome.answers(record.questions):
            return "this run is damaged, its journal lacks the answers: delete it and begin it again"
        return None

    def standing(self, record: RunRecord) -> tuple[Status, str | None]:
        """The status of a run as clients see it, and what is wrong with it."""
        damage = self.damage(record)
        return ("damaged", damage) if damage else (record.status, record.error)

    def problems(self) -> Iterator[str]:
        """A sentence for an operator about everything that is damaged."""
        for record in self.store.list():
            if damage := self.damage(record):
                yield f"{record.id} of the key {record.owner[:8]}: {damage}"
        for file in self.files.list():
            if file.damage:
                yield f"{file.id}: {file.damage}"

    def view(self, record: RunRecord) -> dict[str, Any]:
        """A run as clients see it."""
        agent, outcome = record.agent.model_dump(mode="json"), outcome_of(self.store.journal_path(record))
        status, error = self.standing(record)
        settings = {name: agent[field] for name, field in _AGENT_FIELDS.items() if field in agent}
        settings |= {name: getattr(record.sampling, name) for name in ("temperature", "top_p", "seed")}
        return {
            "id": record.id,
            "object": "memory.run",
            "status": status,
            **record.model_dump(include={"model", "created", "updated"}),
            "error": error,
            "documents": list(record.documents),
            "warnings": list(record.warnings),
            "questions": list(record.questions),
            "settings": settings if record.questions else {},  # of a damaged record nothing is known
            **outcome.view(record.questions, done=record.status == "done"),
        }

    def _begin(self, owner: str, body: MemoryRequest, brought: Sequence[str]) -> RunRecord:
        check_model(body.model or self.name, self.name, self.service.name)
        self.service.refuse_unless_ready()
        questions = body.all_questions
        if not questions:
            raise ApiError(400, "no question: give question or questions")
        if len(questions) > MAX_QUESTIONS:
            raise ApiError(400, f"{len(questions)} questions are too many: {MAX_QUESTIONS} are the most")
        agent, sampling = self._chosen(body, questions)
        with self.reader.place_for(owner), self._documents(owner, body.text, body.all_files, brought) as documents:
            asked = {"model": self.name, "questions": questions, "agent": agent, "sampling": sampling}
            record = self.store.create(owner, documents, **asked)
            self.reader.start(record)
        return record

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
    def _documents(
        self, owner: str, text: str | None, file_ids: Sequence[str], brought: Sequence[str] = ()
    ) -> Iterator[list[tuple[str, Path]]]:
        """Names and paths of what is to be read, while a run makes them its own: until then a text is a file too."""
        if self._agent.needs_document and not (text or file_ids or brought):
            raise ApiError(400, "no document: give text, file_id, or upload a file")
        texts = [self.bring(owner, "text", io.BytesIO(text.encode()))] if text else []
        stored = [(self.brought, one) for one in texts] + [(self.files, one) for one in file_ids]
        stored += [(self.brought, one) for one in brought]
        try:
            yield [(files.get(owner, one).name, files.content(owner, one)) for files, one in stored]
        finally:
            self.drop(owner, texts)
