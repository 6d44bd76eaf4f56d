"""One document for one or several episodes: cut once, read at their own pace.

The first pass of every episode over a feed is shared. The feed holds a bounded number of chunks past the slowest reader
of that pass; a later pass is the episode's own and waits for nobody.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from itertools import islice

from memjax.data.chunks import Chunk, ChunkTokenizer, read_chunks
from memjax.episodes.quotes import CHUNK, Quote
from memjax.trajectory import TextSource

AHEAD = 4
"""Chunks that the fastest reader of a pass may be past the slowest."""

_TOKENS_PER_CUT = 4096  # cut at one go: a thread is not worth a hop for every chunk of 24 tokens
_SMALL = 1 << 14  # characters that are cut on the spot, without a thread

Settings = tuple[int, tuple[str, ...], int | None]
"""Tokens of a chunk, tags to escape, and the most chunks."""


class Feed:
    """A document and who reads it.

    `readers` is the number of episodes that will read it. With `keep` every chunk is held and nobody waits: the samples
    of one training group share one list of chunks.
    """

    def __init__(self, source: str | TextSource, tokenizer: ChunkTokenizer, readers: int = 1, *, keep: bool = False):
        self._source, self._tokenizer, self._readers, self._keep = source, tokenizer, readers, keep
        self._begun: set[int] = set()  # ids of the readers that have begun a pass, or never will
        self._pass: _Pass | None = None
        self._ahead = AHEAD

    def read(
        self,
        reader: object,
        tokens: int,
        tags: tuple[str, ...],
        max_chunks: int | None,
        on_chunk: Callable[[Chunk], None] = lambda chunk: None,
    ) -> Reading:
        """One pass of `reader`, as an async iterator; `on_chunk` is called with each chunk before it is given out."""
        settings = (tokens, tags, max_chunks)
        if self._pass is None:
            self._pass = _Pass(self._cut(settings), settings, self._readers - len(self._begun), self._keep)
        is_first = id(reader) not in self._begun
        if self._pass.settings == settings and (is_first or self._keep):
            self._begun.add(id(reader))
            self._pass.join(id(reader))
            return Reading(self._pass, id(reader), on_chunk)
        if is_first:  # its pass is of another kind than the others'
            self.leave(reader)
        own = _Pass(self._cut(settings), settings, 0, keep=False)
        own.join(id(reader))
        return Reading(own, id(reader), on_chunk)

    def wait_for_each_other(self) -> None:
        """From now on no reader of the shared pass is a chunk ahead of another: their prompts share a prefill."""
        if self._pass:
            self._pass.ahead = 0

    def leave(self, reader: object) -> None:
        """Make nobody wait for this reader: it is done with the shared pass, or will never begin it."""
        if self._pass:
            self._pass.part(id(reader), was_expected=id(reader) not in self._begun)
        self._begun.add(id(reader))

    def _cut(self, settings: Settings) -> _Cut:
        tokens, tags, max_chunks = settings
        chunks = read_chunks(self._source, self._tokenizer, tokens, tags=tags, max_chunks=max_chunks)
        small = isinstance(self._source, str) and len(self._source) <= _SMALL
        return _Cut(chunks, tokens, in_thread=not small)


class Reading:
    """One reader's pass over a feed. It ends where its `async for` is left, for whatever reason."""

    def __init__(self, shared: _Pass, reader: int, on_chunk: Callable[[Chunk], None]):
        self._pass, self._reader, self._on_chunk = shared, reader, on_chunk
        self._number = 0

    def __aiter__(self) -> Reading:
        return self

    async def __anext__(self) -> Chunk:
        chunk = await self._pass.take(self._reader, self._number)
        if chunk is None:
            raise StopAsyncIteration
        self._number += 1
        self._on_chunk(chunk)
        return chunk

    def __del__(self) -> None:
        self._pass.part(self._reader)


class _Pass:
    """The chunks of one pass between its slowest and its fastest reader."""

    def __init__(self, cut: _Cut, settings: Settings, expected: int, keep: bool):
        self.settings, self.ahead = settings, AHEAD
        self._cut, self._keep = cut, keep
        self._expected = expected  # readers that have not begun: they stand at the first chunk
        self._taken: dict[int, int] = {}  # by reader: how many chunks
        self._moved = asyncio.Event()
        self._cutting = asyncio.Lock()

    def join(self, reader: int) -> None:
        self._expected = max(0, self._expected - 1)
        self._taken[reader] = 0

    def part(self, reader: int, *, was_expected: bool = False) -> None:
        self._expected = max(0, self._expected - was_expected)
        self._taken.pop(reader, None)
        self._moved.set()

    async def take(self, reader: int, number: int) -> Chunk | None:
        """The chunk of that number, once the slowest reader is close enough; None past the end."""
        while not self._keep and number - self._slowest() > self.ahead:
            self._moved.clear()
            await self._moved.wait()
        async with self._cutting:
            try:
                chunk = await self._cut.at(number)
            except BaseException:
                self.part(reader)
                raise
            if chunk is None:
                self.part(reader)
            elif reader in self._taken:
                self._taken[reader] = number + 1
                self._moved.set()
            if not self._keep:
                self._cut.forget(min(self._slowest(), number))
        return chunk

    def _slowest(self) -> int:
        return 0 if self._expected else min(self._taken.values(), default=1 << 62)


class _Cut:
    """A document as chunks by number, cut when they are asked for; errors of cutting come to whoever asks."""

    def __init__(self, chunks: Iterator[Chunk], tokens: int, *, in_thread: bool):
        self._chunks = chunks
        self._at_once = max(1, _TOKENS_PER_CUT // tokens)
        self._first = 0  # number of the first chunk that is held
        self._held: list[Chunk] = []
        self._ended = False
        self._failure: Exception | None = None
        self._mutex = threading.Lock()  # a cancelled reader leaves its thread cutting
        # A thread of its own: a document that takes long to cut keeps nobody from cutting another.
        self._thread = ThreadPoolExecutor(1, "memjax-cut") if in_thread else None

    async def at(self, number: int) -> Chunk | None:
        """The chunk of that number; None past the end."""
        if number - self._first >= len(self._held) and not self._ended:
            if self._thread:
                cut = copy_context().run  # in which parsers are told who waits for them
                await asyncio.get_running_loop().run_in_executor(self._thread, cut, self._cut_up_to, number)
            else:
                self._cut_up_to(number)
        place = number - self._first
        if place < 0:
            raise RuntimeError("a pass was continued after its reader had left it")
        if place >= len(self._held) and self._failure is not None:
            raise self._failure
        return self._held[place] if place < len(self._held) else None

    def __del__(self) -> None:
        if self._thread:
            self._thread.shutdown(wait=False)

    def forget(self, before: int) -> None:
        """Let go of the chunks before that number."""
        with self._mutex:
            if before > self._first:
                del self._held[: before - self._first]
                self._first = before

    def _cut_up_to(self, number: int) -> None:
        with self._mutex:
            while not self._ended and number - self._first >= len(self._held):
                try:
                    chunks = list(islice(self._chunks, self._at_once))
                except Exception as error:  # of a document that turns out to be damaged: every reader is told
                    chunks, self._failure = [], error
                self._ended = len(chunks) < self._at_once
                self._held += [replace(chunk, ids=Quote(chunk.ids, CHUNK)) for chunk in chunks]
