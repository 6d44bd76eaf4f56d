"""The journal of a run: append-only JSON lines that are state, trace, events and trajectory at once (docs/journal.md).

One process writes a file. A line is written before the call that made it returns, so a killed process loses nothing but
the call under way; it is synced to disk before a listener sees it, else at most once a second.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from memjax import __version__
from memjax.config import flattened
from memjax.environments.environment import Step
from memjax.episodes.episode import EpisodeTokenizer, Key, Reply, Turn
from memjax.episodes.packed import packed, packed_lengths, pieces_in, unpacked
from memjax.episodes.quotes import CHUNK, Quote, QuotedText
from memjax.rollout.client import Message, Part, Prompt
from memjax.rollout.identity import ModelIdentity
from memjax.trajectory import Completion, SamplingParams
from memjax.whole_file import drop_torn_line

VERSION = 2
_MARK = b'{"type":"journal"'
_SYNC_SECONDS = 1.0
_NEEDED = {  # fields without which a line cannot be used
    "journal": ("version",),
    "chunk": ("n", "hash", "text", "tokens"),
    "begin": ("episode", "identity", "seed"),
    "call": ("episode", "key", "digest", "kind", "reply"),
    "replay": ("episode", "key", "digest"),
    "value": ("episode", "key", "digest"),
    "action": ("episode", "key", "digest"),
    "observation": ("episode", "key", "digest"),
    "end": ("episode",),
    "score": ("episode", "reward", "kept"),
    "demonstration": ("episode", "messages", "reply"),
}
_STEP = ("text", "reward", "terminated", "truncated", "actions")
_COUNTED = ("prompt_tokens", "completion_tokens", "cached_tokens", "weights_version")

Line = dict[str, Any]
OnLine = Callable[[int, Line], None]
"""Called with a line's number and the line, from another thread, once the line is on disk."""


class JournalError(OSError):
    """A journal could not be written; `cause` is the error of the system."""

    def __init__(self, message: str, cause: OSError | None = None):
        super().__init__(message)
        self.cause = cause or self


class Journal:
    """A file open for writing. Close it, or use it in `with`.

    `fresh` empties it. `was_torn` says that a half-written last line was dropped. ValueError for a file that is not a
    journal, of another version, damaged, or in use by another process.
    """

    def __init__(self, path: Path, *, fresh: bool = False):
        self.path = path
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is not a file: name one to keep the journal in")
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file = open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+b", buffering=0)  # noqa: SIM115
        self._lock = threading.Lock()  # of what the syncing thread reads too
        self._syncing = ThreadPoolExecutor(1, "journal-sync")
        self._sync_is_due = False
        self._closing = threading.Event()
        self._listeners: list[OnLine] = []
        self._unpublished: list[tuple[int, Line]] = []
        self._lines = self._end = 0
        self._offsets: dict[str, int] = {}  # of calls and values, by digest
        self._chunks: dict[str, int] = {}  # numbers, by hash of the tokens
        self._begins: dict[str, list[Line]] = {}
        self._called: set[str] = set()  # episodes that have a call
        self._failure: JournalError | None = None
        self._is_told = False  # of the failure, to whoever writes
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            refuse_other_files(path)
            if fresh:
                self._file.truncate(0)
            self.was_torn = _mended(path)
            for number, offset, line in read_lines(path):
                self._index(line, offset)
                self._lines = number + 1
            self._end = path.stat().st_size
            self.write({"type": "journal", "version": VERSION, "memjax": __version__, "pid": os.getpid()})
        except BlockingIOError:
            self._file.close()
            raise ValueError(_in_use(path)) from None
        except BaseException:
            self._file.close()
            raise

    def listen(self, on_line: OnLine) -> None:
        """Call `on_line` with every line from now on."""
        self._listeners.append(on_line)

    def begins(self, episode: str) -> list[Line]:
        """The begin lines of an episode's drives so far."""
        return self._begins.get(episode, [])

    @property
    def has_calls(self) -> bool:
        """Whether anything was asked of a model or of the outside."""
        return bool(self._offsets)

    def was_called(self, episode: str) -> bool:
        """Whether a call of the episode is there, which a drive could replay."""
        return episode in self._called

    def find(self, digest: str) -> Line | None:
        """The line of the model call or outside call with this digest."""
        if (offset := self._offsets.get(digest)) is None:
            return None
        return read_line(self.path, offset)

    def write(self, line: Line) -> None:
        """Add a line; JournalError where the disk does not take it."""
        if self._failure:
            self._is_told = True
            raise self._failure
        data = memoryview(json.dumps(line, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace") + b"\n")
        self._index(line, self._end)
        self._end += len(data)
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            self._is_told = True
            raise self._failed(error) from None
        with self._lock:
            if self._listeners:
                self._unpublished.append((self._lines, line))
            self._lines += 1
        if self._listeners:
            self._syncing.submit(self._sync)
        elif not self._sync_is_due:
            self._sync_is_due = True
            self._syncing.submit(self._sync_soon)

    async def synced(self) -> None:
        """Return when every line so far is on disk; JournalError where it does not take them."""
        if self._listeners:  # who are told in order, by one thread
            await asyncio.wrap_future(self._syncing.submit(self._sync))
        else:  # that thread may be waiting until a second has passed
            await asyncio.to_thread(self._sync)
        if self._failure:
            self._is_told = True
            raise self._failure

    def chunk_number(self, pieces: Sequence[bytes]) -> int:
        """The number of the chunk with these tokens in this file, to which it is written where it is new."""
        text = b"".join(pieces)
        lengths = np.array([len(piece) for piece in pieces], np.uint16)
        content = hashlib.sha256(text + lengths.tobytes()).hexdigest()[:24]
        if (number := self._chunks.get(content)) is None:
            number = max(self._chunks.values(), default=-1) + 1  # one may have been removed by hand
            line = {"type": "chunk", "n": number, "hash": content, "text": packed(text)}
            self.write({**line, "tokens": packed_lengths(pieces)})
        return number

    def close(self) -> None:
        """Sync and let go of the file; JournalError where the disk did not take the last lines."""
        self._closing.set()
        self._syncing.submit(self._sync)
        self._syncing.shutdown(wait=True)
        self._file.close()
        if self._failure and not self._is_told:
            raise self._failure

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, raised: object, *_: object) -> None:
        try:
            self.close()
        except JournalError:
            if raised is None:  # else what was raised is the reason
                raise

    def _index(self, line: Line, offset: int) -> None:
        if line["type"] == "call" or "value" in line or "step" in line:
            self._offsets[line["digest"]] = offset
            self._called.add(line["episode"])
        elif line["type"] == "begin":
            self._begins.setdefault(line["episode"], []).append(line)
        elif line["type"] == "chunk":
            self._chunks[line["hash"]] = line["n"]

    def _sync_soon(self) -> None:
        self._closing.wait(_SYNC_SECONDS)
        self._sync_is_due = False  # before the sync: what is written from here on asks for another
        self._sync()

    def _sync(self) -> None:
        with self._lock:
            ready, self._unpublished = self._unpublished, []
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            self._failed(error)
            return
        for number, line in ready:
            for on_line in self._listeners:
                on_line(number, line)

    def _failed(self, error: OSError) -> JournalError:
        message = (
            f"the journal {self.path} cannot be written ({error.strerror}): what was read is kept; make room, then run "
            "the same again to continue"
        )
        self._failure = JournalError(message, error)
        return self._failure


class EpisodeJournal:
    """What one episode writes into a journal, and what it takes from it when it is driven again."""

    def __init__(self, journal: Journal, episode: str, identity: ModelIdentity, tokenizer: EpisodeTokenizer):
        self._journal, self._episode, self._tokenizer = journal, episode, tokenizer
        self._identity = identity
        before = journal.begins(episode)
        self._before = before[-1] if before else None
        of_drives = [_identity_of(line).digest for line in before]
        # Weights may change under a run, but only those that it was driven with before may take it up again.
        self._digests = list(dict.fromkeys([identity.digest, *(of_drives if identity.digest in of_drives else [])]))
        self._begin: Line | None = None  # until it is written, before the first call

    def begin(self, seed: int | None, fields: Mapping[str, Any]) -> int:
        """Begin a drive, which is written with its first call. Its seed, by default that of the last drive."""
        if seed is None:
            seed = self._before["seed"] if self._before else int.from_bytes(os.urandom(4), "big") >> 1
        head = {"type": "begin", "episode": self._episode, "time": round(time.time(), 3)}
        self._begin = {**head, **fields, "seed": seed, "identity": asdict(self._identity)}
        return seed

    def change_model(self, identity: ModelIdentity) -> None:
        """From now on calls are of other weights."""
        if identity != self._identity:
            self._identity = identity
            self._digests = list(dict.fromkeys([identity.digest, *self._digests]))
            self._write({**self._begun(), "identity": asdict(identity), "mixed": True})

    def digests(self, key: Key, kind: str, prompt: Prompt, sampling: SamplingParams) -> tuple[list[str], str]:
        """The digests under which a call may be known, that of the weights of now first, and the prompt's hash."""
        prompt_hash = self._hash_of_prompt(prompt)
        drawn = [float(sampling.temperature), float(sampling.top_p), sampling.top_k, sampling.seed]
        drawn = drawn if sampling.temperature else []  # greedy: nothing is drawn
        call = json.dumps([key, kind, sampling.max_tokens, sampling.stop, drawn, prompt_hash])
        return [_digest(call, identity) for identity in self._digests], prompt_hash

    def value_digest(self, key: Key, name: str, args: Sequence[Any]) -> str:
        """The digest of an outside call."""
        return _digest(json.dumps([key, name, args], sort_keys=True), self._episode)

    def find(self, digest: str) -> Completion | None:
        """The reply to the model call with this digest, without the ids of its prompt."""
        line = self._journal.find(digest)
        return None if line is None else completion_of(line, self._tokenizer)

    def find_value(self, digest: str) -> tuple[Any] | None:
        """The value of the outside call with this digest, in a tuple of one."""
        line = self._journal.find(digest)
        return None if line is None else (line["value"],)

    def differs(self) -> str | None:
        """How this drive differs from the last one, as long as nothing was replayed; None where it does not."""
        if self._begin is None or self._before is None or not self._journal.was_called(self._episode):
            return None
        if not (told := _differences(self._before, self._begin)):
            return None
        advice = "run it as it was to continue, or name another journal to keep both"
        return f"{self._journal.path} holds another run ({told}): {advice}"

    def add_turn(self, turn: Turn) -> None:
        """Write a call, or that it was replayed."""
        head = {"episode": self._episode, "key": turn.key, "digest": turn.digest}
        if turn.replayed:
            self._write({"type": "replay", **head})
            return
        completion = turn.reply.completion
        line: Line = {"type": "call", **head, "kind": turn.kind, "prompt": self._prompt(turn.prompt)}
        if (chunk := turn.chunk) is not None:
            number = self._journal.chunk_number(self._tokenizer.pieces_of(chunk.ids))
            shown = {"start": chunk.start_token, "tokens": len(chunk.ids), "document": chunk.document_tokens}
            line["chunk"] = {"n": number, "index": chunk.index, **shown}
        line |= {"tools": list(turn.prompt.tools)} if turn.prompt.tools else {}
        line |= {} if turn.trained else {"trained": False}
        line |= {"notes": turn.notes} if turn.notes else {}
        reply: Line = {"text": completion.text, "finish": completion.finish_reason}
        reply |= {name: value for name in _COUNTED if (value := getattr(completion, name))}
        if len(completion.token_ids):
            reply |= self._drawn(turn.reply)
        self._write({**line, "reply": {**reply, "seconds": round(completion.seconds, 3)}})

    def add_value(self, key: Key, digest: str, name: str, value: Any, *, replayed: bool) -> None:
        """Write the value of an outside call, or that it was replayed."""
        line: Line = {"type": "value", "episode": self._episode, "key": key, "digest": digest, "name": name}
        self._write(line if replayed else {**line, "value": value})

    async def add_action(self, key: Key, digest: str, environment: str, action: str | None) -> None:
        """Write what an environment is about to do, None for its reset, and wait until it is on disk."""
        head = {"type": "action", "episode": self._episode, "key": key, "digest": digest}
        self._write({**head, "environment": environment, "action": action})
        await self._journal.synced()

    def add_observation(self, key: Key, digest: str, step: Step, *, replayed: bool) -> None:
        """Write what came back for an action, or that it was replayed."""
        line: Line = {"type": "observation", "episode": self._episode, "key": key, "digest": digest}
        self._write(line if replayed else {**line, "step": {name: getattr(step, name) for name in _STEP}})

    def find_observation(self, digest: str) -> Step | None:
        """What came back for the action with this digest."""
        if (line := self._journal.find(digest)) is None:
            return None
        return Step(**{**line["step"], "actions": tuple(line["step"]["actions"])})

    def end(self, fields: Mapping[str, Any]) -> None:
        """Write what came of a drive; nothing of one that failed before its first call."""
        if self._begin is None or fields.get("error") is None:
            self._write({"type": "end", "episode": self._episode, "time": round(time.time(), 3), **fields})

    def score(self, fields: Mapping[str, Any]) -> None:
        """Write what the episode is worth (`reward`), and whether it is to be learned from (`kept`)."""
        self._journal.write({"type": "score", "episode": self._episode, **fields})

    def _drawn(self, reply: Reply) -> Line:
        """The ids and log-probabilities of a reply. Ids that its text spells are told by where they begin in it."""
        ids, logprobs = reply.completion.token_ids, reply.completion.logprobs
        pieces = self._spelling(reply)
        line: Line = {"tokens": packed_lengths(pieces)} if pieces else {}
        left, drawn = np.asarray(ids[len(pieces) :], np.int32), np.asarray(logprobs, np.float32)
        return {**line, "ids": packed(left), "logprobs": packed(drawn)}

    def _spelling(self, reply: Reply) -> Sequence[bytes]:
        """The text of a reply as the bytes of its ids; empty where it would not give these very ids again."""
        if not self._identity.tokenizer:
            return ()
        pieces = self._tokenizer.pieces_of(reply.ids)
        if not all(pieces) or b"".join(pieces) != reply.text.encode("utf-8", "replace"):
            return ()
        try:
            return pieces if tuple(self._tokenizer.ids_of(pieces)) == reply.ids else ()
        except ValueError:  # one of them is no token of plain text, such as <tool_call>
            return ()

    def _write(self, line: Line) -> None:
        if self._begin is not None:
            begin, self._begin = self._begin, None
            self._journal.write(begin)
        self._journal.write(line)

    def _begun(self) -> Line:
        return self._begin or self._journal.begins(self._episode)[-1]

    def _hash_of_prompt(self, prompt: Prompt) -> str:
        found = hashlib.sha256()
        for message in prompt.messages:
            found.update(f"\0{message.role}\0{len(message.content)}".encode())
            for part in message.content:
                if isinstance(part, str) or self._identity.tokenizer is None:
                    text = part if isinstance(part, str) else self._tokenizer.decode(part)
                    kind, data = "t", text.encode("utf-8", "replace")
                else:
                    kind, data = "i", np.asarray(part, np.int32).tobytes()
                found.update(f"{kind}{len(data)} ".encode() + data)
            if extra := _beyond_content(message):
                found.update(json.dumps(extra).encode())
        if prompt.tools:
            found.update(f"\0tools\0{json.dumps(prompt.tools)}".encode())
        return found.hexdigest()[:32]

    def _prompt(self, prompt: Prompt) -> list[Line]:
        return [
            {"role": message.role, "content": [*map(self._part, message.content)], **_beyond_content(message)}
            for message in prompt.messages
        ]

    def _part(self, part: Part) -> str | Line:
        if isinstance(part, Quote | QuotedText) and part.source != CHUNK:
            return {"reply": part.source}
        if isinstance(part, str):
            return part
        if isinstance(part, Quote):
            return {"chunk": self._journal.chunk_number(self._tokenizer.pieces_of(part))}
        return {"ids": packed(np.asarray(part, np.int32))}


def read_lines(path: Path) -> Iterator[tuple[int, int, Line]]:
    """Every line with its number and offset. ValueError, naming the line, for what is not a journal or is damaged."""
    with open(path, "rb") as file:
        offset = 0
        for number, data in enumerate(file):
            if not data.endswith(b"\n") and not _is_whole(data):
                return  # torn, or being written
            try:
                line = json.loads(data)
                missing = [name for name in _NEEDED[line["type"]] if name not in line]
            except (ValueError, KeyError, TypeError):
                missing = ["type that is known"]
            if missing:
                if number == 0:
                    raise ValueError(_not_a_journal(path, data))
                raise ValueError(
                    f"{path}:{number + 1} is not a journal line (it has no {missing[0]}): remove the line to continue "
                    "without it"
                )
            if number == 0 and (line["type"] != "journal" or line["version"] != VERSION):
                raise ValueError(_not_a_journal(path, data))
            yield number, offset, line
            offset += len(data)


def read_line(path: Path, offset: int) -> Line:
    """The line that begins at that offset."""
    with open(path, "rb") as file:
        file.seek(offset)
        return json.loads(file.readline())


def _is_whole(line: bytes) -> bool:
    """Whether a last line lacks nothing but its end, as in a file that somebody wrote by hand."""
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _mended(path: Path) -> bool:
    """End the last line where only that is missing, else drop it; whether it was dropped."""
    with open(path, "rb+") as file:
        last = b""
        for line in file:
            last = line
        if last and not last.endswith(b"\n") and _is_whole(last):
            file.write(b"\n")
    return drop_torn_line(path)


def completion_of(line: Line, tokenizer: EpisodeTokenizer) -> Completion:
    """The reply of a call line, without the ids of its prompt; the tokenizer is the one that it was written with."""
    reply = line["reply"]
    ids = unpacked(reply.get("ids"), np.int32)
    if "tokens" in reply:
        pieces = pieces_in(reply["text"].encode("utf-8", "replace"), reply["tokens"])
        ids = np.concatenate([np.asarray(tokenizer.ids_of(pieces), np.int32), ids])
    return Completion(
        prompt_ids=np.zeros(0, np.int32),
        token_ids=ids,
        logprobs=unpacked(reply.get("logprobs"), np.float32),
        text=reply["text"],
        finish_reason=reply["finish"],
        seconds=reply["seconds"],
        **{name: reply.get(name, 0) for name in _COUNTED},
    )


def chunk_pieces(line: Line) -> list[bytes]:
    """The bytes of each token of a chunk line."""
    return pieces_in(unpacked(line["text"], np.uint8).tobytes(), line["tokens"])


def refuse_other_files(path: Path) -> None:
    """ValueError for a file that does not begin like a journal: it must be neither emptied nor mended."""
    with open(path, "rb") as file:
        first = file.readline()
    squeezed = first.replace(b" ", b"")
    if not (squeezed.startswith(_MARK) or _MARK.startswith(squeezed)):  # a journal's own first line may be torn
        raise ValueError(_not_a_journal(path, first))


def _not_a_journal(path: Path, first: bytes) -> str:
    is_older = any(
        mark in first for mark in (b'"readings"', b'"made_with"', b'"conversations"', b'"memory"', b'"version"')
    )
    is_older = is_older or first.strip() == b"{"  # the state files of old were indented
    if is_older:
        return f"{path} was written by another version of memjax (version {VERSION} is read here): name another file"
    return f"{path} is not a journal of memjax: name another file"


def _identity_of(line: Line) -> ModelIdentity:
    return ModelIdentity(**line["identity"])


def _differences(before: Line, now: Line) -> str:
    was, is_ = flattened(before), flattened(now)
    names = [name for name in was | is_ if was.get(name) != is_.get(name) and name != "time"]
    told = [f"{name} was {_short(was.get(name))}, is {_short(is_.get(name))}" for name in names]
    return "; ".join(told)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def refuse_if_in_use(path: Path) -> None:
    """ValueError, naming the process, for a journal that one writes."""
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(_in_use(path)) from None


def _in_use(path: Path) -> str:
    writers = [line["pid"] for _, _, line in read_lines(path) if "pid" in line]
    return f"{path} is in use by process {writers[-1] if writers else '?'}: wait until it is done, or stop it"


def _beyond_content(message: Message) -> Line:
    calls = [{"id": call.id, "name": call.name, "arguments": call.json} for call in message.tool_calls]
    fields = {"tool_calls": calls, "tool_call_id": message.tool_call_id, "name": message.name}
    return {name: value for name, value in fields.items() if value}


def _digest(call: str, identity: str) -> str:
    return hashlib.sha256(f"{call}\n{identity}".encode()).hexdigest()[:24]
