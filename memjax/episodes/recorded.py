"""Reading a journal that is finished, or that somebody wrote by hand: episodes as turns to learn from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from memjax.episodes.episode import Key, Reply, Turn
from memjax.episodes.journal import Line, chunk_pieces, completion_of, read_line, read_lines
from memjax.episodes.packed import unpacked
from memjax.rollout.client import Message, Part, Prompt, ToolCall
from memjax.trajectory import Completion


@dataclass
class RecordedEpisode:
    """What the last drive of an episode left: how it began and ended, and its calls by key."""

    begin: Line = field(default_factory=dict)
    digests: dict[Key, str] = field(default_factory=dict)
    demonstrations: list[Line] = field(default_factory=list)
    end: Line | None = None
    score: Line | None = None

    @property
    def status(self) -> str:
        """How far it is."""
        if self.end is None:
            return "unfinished"
        return f"failed: {self.end['error']}" if self.end.get("error") else "answered"


class Recording:
    """The episodes of a journal by name, in the order in which they began. Holds where lines stand, not the lines.

    Only `turns` needs the tokenizer.
    """

    def __init__(self, path: Path, tokenizer: Any = None):
        self.episodes: dict[str, RecordedEpisode] = {}
        self._path, self._tokenizer = path, tokenizer
        self._calls: dict[str, int] = {}  # offsets by digest
        self._chunks: dict[int, int] = {}  # offsets by number
        for _, offset, line in read_lines(path):
            self._take(line, offset)

    def turns(self, name: str) -> list[Turn]:
        """The turns of an episode, with the ids of their prompts in the tokenizer's chat template."""
        episode = self.episodes[name]
        replies: dict[Key, Reply] = {}
        found = [self._demonstration(line, number) for number, line in enumerate(episode.demonstrations)]
        lines = {key: read_line(self._path, self._calls[digest]) for key, digest in episode.digests.items()}
        for key, line in lines.items():
            completion = completion_of(line, self._tokenizer)
            replies[key] = Reply.of(completion, key, self._tokenizer.eos_ids)
        for key, line in lines.items():
            prompt = self._prompt(line["prompt"], line, replies)
            found.append(self._turn(prompt, replies[key], line))
        return found

    def _take(self, line: Line, offset: int) -> None:
        if line["type"] == "chunk":
            self._chunks[line["n"]] = offset
        if "episode" not in line:
            return
        if line["type"] == "begin" and not line.get("mixed"):  # else the drive continues with other weights
            self.episodes[line["episode"]] = RecordedEpisode(line)
        episode = self.episodes.setdefault(line["episode"], RecordedEpisode())
        if line["type"] in ("call", "replay"):
            episode.digests[tuple(line["key"])] = line["digest"]
        if line["type"] == "call":
            self._calls[line["digest"]] = offset
        elif line["type"] == "demonstration":
            episode.demonstrations.append(line)
        elif line["type"] == "end":
            episode.end = line
        elif line["type"] == "score":
            episode.score = line

    def _turn(self, prompt: Prompt, reply: Reply, line: Line) -> Turn:
        ids = np.asarray(self._tokenizer.render(prompt.messages, tools=prompt.tools), np.int32)
        reply = replace(reply, completion=replace(reply.completion, prompt_ids=ids))
        return Turn(reply.key, line["kind"], prompt, reply, trained=line.get("trained", True))

    def _demonstration(self, line: Line, number: int) -> Turn:
        """A turn that was written as text, as if the model had drawn it with its end token."""
        ids = np.asarray([*self._tokenizer.encode_reply(line["reply"]), self._tokenizer.eos_ids[0]], np.int32)
        empty = np.zeros(0, np.int32)
        completion = Completion(empty, ids, np.zeros(len(ids), np.float32), line["reply"], "stop")
        prompt = self._prompt(line["messages"], line, {})
        reply = Reply.of(completion, (number + 1,), self._tokenizer.eos_ids)
        return self._turn(prompt, reply, {"kind": "turn", **line})

    def _prompt(self, messages: list[Line], line: Line, replies: dict[Key, Reply]) -> Prompt:
        found = tuple(self._message(message, replies) for message in messages)
        return Prompt(found, tools=tuple(line.get("tools", ())))

    def _message(self, message: Line, replies: dict[Key, Reply]) -> Message:
        content = message["content"]
        parts = [content] if isinstance(content, str) else content
        calls = tuple(ToolCall(**call) for call in message.get("tool_calls", ()))
        result_of = message.get("tool_call_id"), message.get("name")
        return Message(message["role"], tuple(self._parts(parts, replies)), calls, *result_of)

    def _parts(self, parts: list[str | Line], replies: dict[Key, Reply]) -> Iterator[Part]:
        for part in parts:
            if isinstance(part, str):
                yield part
            elif "reply" in part:
                yield replies[tuple(part["reply"])].whole() or ""
            elif "chunk" in part:
                yield tuple(self._tokenizer.ids_of(chunk_pieces(read_line(self._path, self._chunks[part["chunk"]]))))
            else:
                yield tuple(unpacked(part["ids"], np.int32).tolist())
