"""`memjax ask`: questions about one document. What was read before is taken from a journal, one for each question."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue
from rich.console import Console

from memjax import __version__
from memjax.agents.registry import DEFAULT, AnyAgent, option_of
from memjax.ask_display import AskDisplay
from memjax.config import ConfigError, load_config
from memjax.data.documents import Document, is_copy, open_document
from memjax.data.lengths import measure
from memjax.data.token_estimate import EstimatedTokenizer
from memjax.episodes.episode import JournalMismatch, Turn
from memjax.episodes.feed import Feed
from memjax.episodes.journal import EpisodeJournal, Journal
from memjax.episodes.run import check_window, longest_turn, run_episode
from memjax.journals import expire, journal_directory, journal_path
from memjax.rewards.answers import extract_answer, without_thinking
from memjax.rollout.connect import (
    DeferredClient,
    LocalModel,
    ModelChoice,
    Service,
    choose_model,
    load_tokenizer,
    open_client,
)
from memjax.rollout.identity import ModelIdentity
from memjax.text import whole_characters
from memjax.tokenizer import Tokenizer
from memjax.trajectory import SamplingParams, Task, Trajectory

_ANY = 1 << 40  # tokens; only a service has a window that is not known, and no engine to size by it


class AskSettings(BaseModel):
    """What is asked, of what, and by whom it is read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    questions: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    model: str | None = None
    url: str | None = None
    tokenizer: str | None = None
    agent: AnyAgent = DEFAULT
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] | None = None
    slots: int | None = Field(default=None, ge=1)

    @property
    def sampling(self) -> SamplingParams:
        """How to draw, checked."""
        return SamplingParams(temperature=self.temperature, top_p=self.top_p, seed=self.seed)


@dataclass(frozen=True)
class Output:
    """What is shown beside the answer, and where the journal is kept."""

    json: bool = False
    show_memory: bool = False
    journal: Path | None = None  # default: one file per question in `journal_directory`
    fresh: bool = False


@dataclass
class Asked:
    """A question, and what is known of it so far."""

    question: str
    journal: Path
    chunks: int = 0
    memory: str = ""
    turns: Counter[str] = field(default_factory=Counter)  # by kind
    empty: dict[str, Counter[str]] = field(default_factory=dict)  # turns whose reply said nothing: kind, reason, number
    trajectory: Trajectory | None = None

    def add(self, turn: Turn) -> None:
        """Take a turn of its episode."""
        if turn.chunk is not None:
            self.chunks = max(self.chunks, turn.chunk.index + 1)
            said = without_thinking(turn.reply.text)
            self.memory = said if said.strip() else self.memory
        self.turns[turn.kind] += 1
        if turn.reply.part() is None:
            completion = turn.reply.completion
            reason = completion.error or f"finish_reason {completion.finish_reason}"
            self.empty.setdefault(turn.kind, Counter())[reason] += 1

    @property
    def notes(self) -> list[str]:
        """Which replies said nothing, and why, as sentences."""
        said = []
        for kind, reasons in self.empty.items():
            what, option = {"final": ("answers", "--answer-tokens")}.get(kind, ("memories", "--memory-tokens"))
            advice = f": raise {option}" if any("length" in reason for reason in reasons) else ""
            said.append(
                f"{reasons.total()} of {self.turns[kind]} {what} came back empty ({'; '.join(reasons)}){advice}"
                if kind in ("memory", "final")
                else f"{reasons.total()} of {self.turns[kind]} replies ({kind}) came back empty ({'; '.join(reasons)})"
            )
        return said

    def to_json(self) -> dict[str, JsonValue]:
        """The answer, and what it was made from."""
        assert self.trajectory is not None
        counted = {name: self.trajectory.counters.get(name, 0) for name in ("empty_updates", "truncated_memories")}
        answer = extract_answer(without_thinking(self.trajectory.answer))
        said = {"question": self.question, "answer": answer, "reply": self.trajectory.answer, "memory": self.memory}
        return {**said, **counted, "notes": [*self.notes], "journal": str(self.journal)}


@dataclass(frozen=True)
class Session:
    """Everything that is known before a model is loaded."""

    settings: AskSettings
    document: Document
    choice: ModelChoice
    tokenizer: Tokenizer | EstimatedTokenizer
    window: int | None
    length: int  # tokens of the longest turn, or of the window for an agent that cannot say
    identity: ModelIdentity


def run_ask(given: Mapping[str, Any], agent: Mapping[str, Any], output: Output) -> None:
    """Read, and print the answers to standard output; what is None has its default. `agent` are `agent_keys`."""
    session, asked = ask(given, agent, output, Console(stderr=True))
    if output.json:
        print(json.dumps(report(session, asked), ensure_ascii=False))
        return
    for one in asked:
        answer = one.to_json()["answer"]
        print(f"{one.question}\n  {answer}" if len(asked) > 1 else answer)


def ask(
    given: Mapping[str, Any], agent: Mapping[str, Any], output: Output, console: Console
) -> tuple[Session, list[Asked]]:
    """Every question with its trajectory. Raises what an episode failed with, with a note on how to continue."""
    settings, chosen = _settings(given, agent), set(agent)
    expire()
    is_open = settings.files or settings.agent.needs_document
    document = open_document(settings.files, journal_directory()) if is_open else Document(())
    for note in document.notes:
        console.print(note, style="yellow", highlight=False, soft_wrap=True)
    with _spooled(document):
        session = prepare(settings, chosen, document, console)
        where = partial(journal_path, document, session.settings.agent.name, session.choice.model)
        asked = [Asked(question, output.journal or where(question)) for question in settings.questions]
        local = isinstance(session.choice, LocalModel)
        display = AskDisplay(console, [one.question for one in asked], show_memory=output.show_memory, compiles=local)
        with ExitStack() as open_journals:
            paths = dict.fromkeys(one.journal for one in asked)
            journals = {path: open_journals.enter_context(_kept(path, fresh=output.fresh)) for path in paths}
            for journal in journals.values():
                if journal.was_torn:
                    display.note(f"{journal.path}: the last line was written in half, and dropped")
            begun = [line for one in asked for line in journals[one.journal].begins(one.question)]
            if begun and settings.dtype is None:  # another machine may choose another one
                session = _in_dtype(session, begun[-1]["identity"]["dtype"])
            asyncio.run(_read(session, asked, journals, display))
    ended = [one.trajectory for one in asked if one.trajectory]
    display.summarise(ended, asked[0].chunks, [one.journal for one in asked])
    for note in dict.fromkeys(note for one in asked for note in one.notes):
        display.note(note)
    return session, asked


def prepare(settings: AskSettings, chosen: set[str], document: Document, console: Console) -> Session:
    """Check everything that can be checked without the model's weights."""
    choice = choose_model(settings.model, settings.url, os.environ)
    window, tokenizer = choice.trained_window(), load_tokenizer(choice, settings.tokenizer)
    if isinstance(tokenizer, EstimatedTokenizer):
        console.print("No --tokenizer: tokens are estimated on the high side.", style="dim")
    longest = max(settings.questions, key=tokenizer.count)
    agent = settings.agent.fitted(chosen, longest, tokenizer, window)
    if agent != settings.agent:
        budgets = ", ".join(f"{name} {n}" for name, n in agent if isinstance(n, int) and name not in chosen)
        console.print(f"To fit the window of {window} tokens: {budgets}.", style="dim")
    tokens = measure(document.pieces(), tokenizer) if longest_turn(agent, longest, tokenizer, 1).get("text") else 0
    check_window(agent, longest, tokenizer, window, choice.model)
    settings = settings.model_copy(update={"agent": agent, "model": choice.model})
    turn = longest_turn(agent, longest, tokenizer, tokens)
    length = min(sum(turn.values()) or _ANY, window or _ANY)
    identity = choice.identity(settings.dtype)
    if isinstance(choice, Service) and isinstance(tokenizer, Tokenizer):
        identity = replace(identity, tokenizer=None)
    return Session(settings, document, choice, tokenizer, window, length, identity)


def _in_dtype(session: Session, dtype: Any) -> Session:
    settings, identity = session.settings.model_copy(update={"dtype": dtype}), replace(session.identity, dtype=dtype)
    return replace(session, settings=settings, identity=identity)


async def _read(session: Session, asked: list[Asked], journals: Mapping[Path, Journal], display: AskDisplay) -> None:
    settings = session.settings

    def open_model() -> Any:
        local = isinstance(session.choice, LocalModel)
        with display.waiting(f"{'loading' if local else 'asking'} {session.choice.model}"):
            return open_client(
                session.choice,
                session.tokenizer,
                length=session.length,
                slots=settings.slots or len(asked),
                dtype=settings.dtype,
                on_retry=display.note,
            )

    client = DeferredClient(open_model, session.choice.model, session.window)
    feed = Feed(session.document, session.tokenizer, len(asked))

    async def read(number: int, one: Asked) -> None:
        file, is_first = journals[one.journal], True
        had_calls = file.was_called(one.question)

        def on_turn(turn: Turn) -> None:
            nonlocal is_first
            if is_first and had_calls and not turn.replayed:
                display.note(f"{file.path}: none of its calls is among those of this run, so all is read again")
            is_first = False
            one.add(turn)
            display.turn(number, turn, one.memory)

        journal = EpisodeJournal(file, one.question, session.identity, session.tokenizer)
        task = Task(id="ask", question=one.question, context=session.document)
        one.trajectory = await run_episode(
            settings.agent,
            task,
            client,
            session.tokenizer,
            settings.sampling,
            journal=journal,
            feed=feed,
            on_turn=on_turn,
            keep_turns=False,
        )
        if one.trajectory.failure is not None:
            raise one.trajectory.failure

    try:
        with display.reading():
            async with asyncio.TaskGroup() as group:
                for number, one in enumerate(asked):
                    group.create_task(read(number, one))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    finally:
        await client.close()


def report(session: Session, asked: list[Asked]) -> dict[str, Any]:
    """The outcome of a finished run, for --json."""
    counters: dict[str, float] = {}
    for one in asked:
        assert one.trajectory is not None
        for name, value in one.trajectory.counters.items():
            counters[name] = counters.get(name, 0) + value
    return {
        "answers": [one.to_json() for one in asked],
        "warnings": list(session.document.notes),
        "document_tokens": int(counters["document_tokens"]) // len(asked),
        "chunks": asked[0].chunks,
        "seconds": round(max(one.trajectory.seconds for one in asked if one.trajectory), 3),
        "counters": counters,
        "settings": session.settings.model_dump(mode="json"),
        "identity": asdict(session.identity),
        "memjax": __version__,
    }


def _settings(given: Mapping[str, Any], agent: Mapping[str, Any]) -> AskSettings:
    """What was typed over the defaults; paths made absolute."""
    values = {name: value for name, value in given.items() if value is not None}
    if agent:
        values["agent"] = agent
    try:
        settings = load_config(AskSettings, given=values)
    except ConfigError as error:
        raise ValueError(f"{option_of(error.key)}: {error.problem}") from None
    if not settings.questions:
        raise ValueError('no question given: memjax ask "QUESTION" FILE')
    questions = tuple(dict.fromkeys(map(whole_characters, settings.questions)))
    files = tuple(name if name == "-" else str(Path(name).absolute()) for name in settings.files)
    _ = settings.sampling
    return settings.model_copy(update={"files": files, "questions": questions})


@contextmanager
def _spooled(document: Document) -> Iterator[None]:
    """Copies of what can be read only once go when everything is answered, and stay for a run that breaks off.

    Another process may read the same copy: the last one removes it.
    """
    copies = [file for file in document.files if is_copy(file.path, journal_directory())]
    with ExitStack() as open_copies:
        held = [(file, open_copies.enter_context(open(file.path, "rb"))) for file in copies]
        for _, opened in held:
            fcntl.flock(opened, fcntl.LOCK_SH)
        try:
            yield
        except BaseException as error:
            for copy in copies:
                error.add_note(f"memjax: {copy.name} is kept as {copy.path}; ask about that file to continue")
            raise
        for copy, opened in held:
            with suppress(BlockingIOError):
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                copy.path.unlink(missing_ok=True)


@contextmanager
def _kept(path: Path, *, fresh: bool) -> Iterator[Journal]:
    """An open journal. A run that breaks off says how to continue; one without a single call leaves no new file."""
    was_there = path.exists() and path.stat().st_size > 0
    with Journal(path, fresh=fresh) as journal:
        try:
            yield journal
        except BaseException as error:
            if isinstance(error, JournalMismatch):
                error.add_note("memjax: --journal FILE names another one; --fresh empties this one and starts over")
            elif journal.has_calls:
                error.add_note(f"memjax: what was read is kept in {path}: run the same command to continue")
            raise
        finally:
            if not journal.has_calls and not was_there:
                path.unlink(missing_ok=True)
