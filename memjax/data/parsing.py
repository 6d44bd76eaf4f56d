"""PDF and HTML parsed in a process of its own, which may take only so much and can be killed.

A parser may need time and memory out of all proportion to a file that was made to do so, and no thread can be stopped.
The process sends lines of JSON: {"text": ..., "share": ...}, at the end {"notes": [...], "has_text": ...}, or
{"error": ...}.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict
from pathlib import Path
from typing import Any

from memjax.data.html_text import HtmlText
from memjax.data.input_files import InputFile, decoded
from memjax.data.pdf_text import PdfText

CPU_SECONDS = 5
"""What a file may take, and as much again for each MB: a hundred times what an ordinary one needs."""

MEMORY = 1 << 30
"""Bytes of the process beside the file."""

_NICENESS = 10  # a server's other requests go first


class Ending:
    """Kills the parsers that were started on somebody's behalf, now and from now on, when that one leaves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self.over = False

    @property
    def running(self) -> tuple[subprocess.Popen[bytes], ...]:
        """The parsers that run."""
        with self._lock:
            return tuple(self._running)

    def end(self) -> None:
        """Kill them, and those that are started from now on."""
        self.over = True
        self.kill()

    def kill(self) -> None:
        """Kill those that run."""
        with self._lock:
            for process in self._running:
                process.kill()

    def add(self, process: subprocess.Popen[bytes]) -> None:
        """A parser was started."""
        with self._lock:
            self._running.add(process)
            if self.over:
                process.kill()

    def discard(self, process: subprocess.Popen[bytes]) -> None:
        """It ended."""
        with self._lock:
            self._running.discard(process)


ENDING: ContextVar[Ending | None] = ContextVar("memjax_parsing_ending", default=None)
"""On whose behalf the files of this context are parsed."""

EVERYBODY = Ending()
"""All parsers of this process: a server kills them when it is told to stop."""


@contextmanager
def ended_with_block() -> Iterator[Ending]:
    """Whatever is parsed in the block, in this context or in threads that carry it, ends with it."""
    ending = Ending()
    token = ENDING.set(ending)
    try:
        yield ending
    finally:
        ENDING.reset(token)
        ending.end()


def checked(file: InputFile) -> tuple[bool, tuple[str, ...]]:
    """Parse a file from end to end: whether it holds text, and what a person should know of it."""
    for message in _messages(file, only_check=True):
        if "notes" in message:
            return message["has_text"], tuple(message["notes"])
    raise _broken_off(file)


def parsed(file: InputFile) -> Iterator[tuple[str, float]]:
    """Yield the text of a PDF or an HTML file, each piece with the share (0 to 1) of the file that was read by then."""
    for message in _messages(file, only_check=False):
        if "notes" in message:
            return
        yield message["text"], message["share"]
    raise _broken_off(file)


def _messages(file: InputFile, *, only_check: bool) -> Iterator[dict[str, Any]]:
    seconds = math.ceil(CPU_SECONDS * (1 + (file.size >> 20)))
    job = asdict(file) | {"path": str(file.path.absolute()), "only_check": only_check, "cpu_seconds": seconds}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "memjax.data.parsing", json.dumps(job)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    assert process.stdout is not None
    watchers = [watcher for watcher in (ENDING.get(), EVERYBODY) if watcher is not None]
    for watcher in watchers:
        watcher.add(process)
    try:
        for line in process.stdout:
            if not line.endswith(b"\n"):  # it was killed while it wrote
                break
            message = json.loads(line)
            if "error" in message:
                raise ValueError(message["error"])
            yield message
        if process.wait() == -signal.SIGXCPU:
            raise ValueError(
                f"{file.name} takes too long to read (more than {seconds} CPU-seconds): is it damaged? Save "
                "it as plain text"
            )
    finally:
        for watcher in watchers:
            watcher.discard(process)
        process.kill()
        process.wait()
        process.stdout.close()


def _broken_off(file: InputFile) -> ValueError:
    return ValueError(f"{file.name} was not read to its end: its parser was stopped; try again, or save it as text")


# -- in the process of its own


def _main(job: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the parent decides
    only_check, seconds = job.pop("only_check"), job.pop("cpu_seconds")
    file = InputFile(**job | {"path": Path(job["path"]), "notes": ()})
    os.nice(_NICENESS)
    memory = MEMORY + 4 * file.size
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))  # the first is told by a signal of its own
    if sys.platform != "darwin":  # which does not keep it
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    try:
        source = PdfText(file) if file.kind == "pdf" else _Html(file)
        has_text = False
        for text, share in source.pages():
            has_text = has_text or bool(text.strip())
            if not only_check:
                _send({"text": text, "share": share})
        _send({"notes": source.notes, "has_text": has_text})
    except ValueError as error:
        _send({"error": str(error)})
    except MemoryError:
        _send({"error": f"{file.name} needs more than {memory >> 20} MB to read: is it damaged? Save it as plain text"})


class _Html:
    """An HTML file in the shape of `PdfText`."""

    def __init__(self, file: InputFile):
        self._file, self._text = file, HtmlText()

    def pages(self) -> Iterator[tuple[str, float]]:
        share = 0.0
        for text, share in decoded(self._file):
            self._text.feed(text)
            yield self._text.take(), share
        self._text.close()
        yield self._text.take(), share

    @property
    def notes(self) -> list[str]:
        return [self._text.note] if self._text.note else []


def _send(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        _main(json.loads(sys.argv[1]))
