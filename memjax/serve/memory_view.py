"""What a run's journal tells: the events that its followers get, and how the run stands."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from memjax.episodes.journal import Line, read_lines
from memjax.rewards.answers import extract_answer, without_thinking
from memjax.rollout.identity import ModelIdentity

log = logging.getLogger(__name__)

Event = dict[str, Any]

_TOLD = frozenset({"begin", "call", "end"})
_HEAVY = frozenset({"prompt", "tokens", "ids", "logprobs"})
_SPENT = {"prompt_tokens": "prompt_tokens", "cached_tokens": "cached_tokens", "generated_tokens": "completion_tokens"}


@dataclass
class Drive:
    """What the last drive of a question's episode has done."""

    calls: dict[str, Event] = field(default_factory=dict)  # the last of every key
    replayed: int = 0
    end: Line | None = None

    def view(self, question: str) -> dict[str, Any]:
        """How far it is, its memory and its answer; an empty update keeps the memory."""
        read = [call for call in self.calls.values() if "chunk" in call]
        read.sort(key=lambda call: call["chunk"]["index"])
        written = [call["reply"]["text"] for call in read if call["kind"] == "memory"]
        reply = self.end["answer"] if self.end and self.end["error"] is None else None
        return {
            "question": question,
            "chunks": len(read),
            "tokens": max((call["chunk"]["start"] + call["chunk"]["tokens"] for call in read), default=0),
            "memory": next((said for text in reversed(written) if (said := without_thinking(text)).strip()), ""),
            "reply": reply,
            "answer": None if reply is None else extract_answer(without_thinking(reply)),
        }


@dataclass
class Outcome:
    """A whole journal: the last drive of every episode, and what all calls ever made took."""

    drives: dict[str, Drive] = field(default_factory=dict)
    counters: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(("model_calls", *_SPENT), 0)))
    seconds: dict[str, float] = field(default_factory=dict)  # of model calls, by episode
    models: set[str] = field(default_factory=set)
    is_damaged: bool = False  # then nothing else is told

    def answers(self, questions: Sequence[str]) -> bool:
        """Whether the last drive of every question came to its answer."""
        drives = [self.drives.get(str(number), Drive()) for number in range(len(questions))]
        return all(drive.end is not None and drive.end.get("error") is None for drive in drives)

    def is_of(self, identity: ModelIdentity) -> bool:
        """Whether a model can continue the run."""
        return not self.models or _told_apart(asdict(identity)) in self.models

    def view(self, questions: Sequence[str], *, done: bool) -> dict[str, Any]:
        """Progress, memories and answers by question, as clients see them."""
        drives = [self.drives.get(str(number), Drive()) for number in range(len(questions))]
        views = [drive.view(question) for drive, question in zip(drives, questions, strict=True)]
        answered = done and self.answers(questions)
        shown = ("question", "answer", "reply", "memory")
        return {
            "chunks_read": min((view["chunks"] for view in views), default=0),
            "tokens_read": min((view["tokens"] for view in views), default=0),
            "seconds": round(max(self.seconds.values(), default=0), 3),
            "counters": dict(self.counters) | {"replayed_calls": sum(drive.replayed for drive in drives)},
            "mixed": len(self.models) > 1,
            "memories": [{name: view[name] for name in ("question", "memory")} for view in views],
            "answers": [{name: view[name] for name in shown} for view in views] if answered else None,
        }

    def add(self, line: Line, made: dict[str, Event]) -> None:
        """Take a line of an episode; `made` are the calls by digest."""
        kind, episode = line["type"], line["episode"]
        if kind == "begin":
            self.models.add(_told_apart(line["identity"]))
            if not line.get("mixed"):  # else the drive under way continues with other weights
                self.drives[episode] = Drive()
        drive = self.drives.setdefault(episode, Drive())
        if kind == "call":
            reply, made[line["digest"]] = line["reply"], _light(line)
            self.counters.update(model_calls=1, **{name: reply.get(key, 0) for name, key in _SPENT.items()})
            self.seconds[episode] = self.seconds.get(episode, 0.0) + reply["seconds"]
        if kind in ("call", "replay") and line["digest"] in made:
            drive.calls[str(line["key"])] = made[line["digest"]]
            drive.replayed += kind == "replay"
        elif kind == "end":
            drive.end = line


def outcome_of(journal: Path) -> Outcome:
    """How the run of a journal stands. A file is read again only where it changed."""
    try:
        stat = journal.stat()
    except FileNotFoundError:
        return Outcome()
    return _read(journal, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=32)  # a long run holds a megabyte of memories
def _read(journal: Path, size: int, changed: int) -> Outcome:
    outcome, made = Outcome(), dict[str, Event]()
    try:
        for _, _, line in read_lines(journal):
            if "episode" in line:
                outcome.add(line, made)
        for drive in outcome.drives.values():
            drive.view("")  # what a client sees of it can be made
    except Exception as error:  # a line can be JSON of any shape, and must not cost another run anything
        log.warning("the journal %s is damaged: %s: %s", journal, type(error).__name__, error)
        return Outcome(is_damaged=True)
    return outcome


def event_of(number: int, line: Line) -> Event | None:
    """The event that a line is: all of it but prompts and ids. None for a line that followers are not told of."""
    return {"id": number, **_light(line)} if line["type"] in _TOLD else None


def events_of(journal: Path, after: int) -> list[Event]:
    """The events past the line with that number; none of a damaged journal."""
    if outcome_of(journal).is_damaged:
        return []
    try:
        with open(journal, "rb") as file:
            found = [event_of(number, line) for number, _, line in read_lines(journal) if number > after]
            with suppress(OSError):  # of a disk that is full, on which nothing is written any more
                os.fsync(file.fileno())  # what is told must survive a power cut
    except FileNotFoundError:
        return []
    return [event for event in found if event]


def _told_apart(identity: Line) -> str:
    return str(sorted({**identity, "model": None}.items()))  # a model may be moved


def _light(line: Line) -> Event:
    light = {name: value for name, value in line.items() if name not in _HEAVY}
    if "reply" in light:
        light["reply"] = {name: value for name, value in line["reply"].items() if name not in _HEAVY}
    return light
