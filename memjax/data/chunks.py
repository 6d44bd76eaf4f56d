"""Cutting a streamed document into chunks of a bounded number of tokens."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

from memjax.data.documents import Document, Series
from memjax.trajectory import TextSource

MIN_CHUNK_TOKENS = 16
"""A character is at most 4 byte-level tokens, so a chunk of this size always ends at a character."""


class ChunkTokenizer(Protocol):
    """What cutting needs of a tokenizer."""

    def encode_stream(self, pieces: Iterable[str]) -> Iterator[int]:
        """The ids of the joined pieces, in bounded memory."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids."""
        ...

    def char_boundary(self, ids: Sequence[int], n: int) -> int:
        """The largest k <= n such that ids[:k] does not end inside a character."""
        ...


@dataclass(frozen=True)
class Chunk:
    """A run of document tokens."""

    index: int
    ids: tuple[int, ...]
    start_token: int  # where it starts in the whole document
    document_tokens: int  # of the whole document: estimated, exact with the last chunk and when truncating


def read_chunks(
    source: str | TextSource,
    tokenizer: ChunkTokenizer,
    size: int,
    *,
    tags: Sequence[str] = (),
    max_chunks: int | None = None,
) -> Iterator[Chunk]:
    """Yield the document in chunks of at most `size` tokens that never end inside a character.

    `tags` are the tag names of the prompt; the document's own use of them is escaped. With `max_chunks` a longer
    document loses its middle: `start_token` then jumps, and the tokens lost are `document_tokens` less those yielded.
    Without it memory use does not depend on the length of the document. Each document of a `Series` is then cut by
    itself, so its last chunk may be short; numbers and start tokens run on.
    """
    if size < MIN_CHUNK_TOKENS:
        raise ValueError(f"a chunk must hold at least {MIN_CHUNK_TOKENS} tokens, got {size}")
    if isinstance(source, Series) and max_chunks is None:
        yield from _cut_each(source.documents, tokenizer, size, tags)
        return
    extent = _Extent()
    ids = tokenizer.encode_stream(escaped_tags(extent.watch(source), tags))
    if max_chunks is None:
        yield from _cut(ids, tokenizer, size, extent)
    else:
        yield from _cut_without_middle(ids, tokenizer, size, max_chunks)


class _Extent:
    """How much text a source will have given in the end, estimated from what it gave so far."""

    def __init__(self) -> None:
        self.chars = 0
        self.share = 0.0

    def watch(self, source: str | TextSource) -> Iterator[str]:
        for text, share in _pieces_with_share(source):
            self.chars += len(text)
            self.share = share
            yield text

    def tokens(self, tokens_done: int, chars_done: int) -> int:
        """The tokens of the whole, at the density of what was cut so far; there is at least one more."""
        chars = self.chars / max(self.share, 1e-9)
        return max(tokens_done + 1, round(tokens_done * chars / max(1, chars_done)))


def _pieces_with_share(source: str | TextSource) -> Iterator[tuple[str, float]]:
    if isinstance(source, str):
        # Tokenising a long string at one go would hold all its ids at once.
        step = 1 << 16
        yield from ((source[i : i + step], min(1.0, (i + step) / len(source))) for i in range(0, len(source), step))
    elif isinstance(source, Document):
        yield from source.pieces_with_share()
    else:
        yield from ((text, 1.0) for text in source.pieces())


def _cut(ids: Iterator[int], tokenizer: ChunkTokenizer, size: int, extent: _Extent) -> Iterator[Chunk]:
    buffer: list[int] = []
    index = start = chars = 0
    while True:
        buffer.extend(islice(ids, size + 1 - len(buffer)))
        if not buffer:
            return
        if len(buffer) <= size:
            yield Chunk(index, tuple(buffer), start, start + len(buffer))
            return
        cut = tokenizer.char_boundary(buffer, size)
        chunk, buffer = tuple(buffer[:cut]), buffer[cut:]
        chars += len(tokenizer.decode(chunk))
        yield Chunk(index, chunk, start, extent.tokens(start + cut, chars))
        index, start = index + 1, start + cut


def _cut_each(
    documents: Sequence[Document], tokenizer: ChunkTokenizer, size: int, tags: Sequence[str]
) -> Iterator[Chunk]:
    chunks = tokens = read = 0
    for document in documents:
        read += document.size
        all_of_read = sum(other.size for other in documents) / read  # what is still to be cut, by its bytes
        count = length = 0
        for chunk in read_chunks(document, tokenizer, size, tags=tags):
            count, length = chunk.index + 1, chunk.start_token + len(chunk.ids)
            yield replace(
                chunk,
                index=chunks + chunk.index,
                start_token=tokens + chunk.start_token,
                document_tokens=round((tokens + chunk.document_tokens) * all_of_read),
            )
        chunks, tokens = chunks + count, tokens + length


def _cut_without_middle(ids: Iterator[int], tokenizer: ChunkTokenizer, size: int, max_chunks: int) -> Iterator[Chunk]:
    limit = size * max_chunks
    kept = list(islice(ids, limit // 2))
    tail: deque[int] = deque(maxlen=limit - len(kept))
    total = len(kept)
    for token in ids:
        tail.append(token)
        total += 1
    if total > limit:
        del kept[tokenizer.char_boundary(kept, len(kept)) :]
        # A character has at most 4 tokens, so 3 of them may have been left on the other side of the cut.
        for _ in range(3):
            if tokenizer.decode(list(islice(tail, 4))).startswith("\ufffd"):
                tail.popleft()
    seam = len(kept)
    jump = total - seam - len(tail)
    kept.extend(tail)
    start = 0
    for index in range(max_chunks):
        if start == len(kept):
            return
        end = min(start + size, len(kept))
        if end < len(kept):
            end = start + tokenizer.char_boundary(kept[start:end], end - start)
        yield Chunk(index, tuple(kept[start:end]), start + (jump if start >= seam else 0), total)
        start = end


def escaped_tags(pieces: Iterable[str], tags: Sequence[str]) -> Iterator[str]:
    """Yield the text with the opening bracket of every use of the given tags replaced by a look-alike.

    So a document cannot close the section of the prompt that it stands in. The result does not depend on how the text
    is cut into pieces.
    """
    if not tags:
        yield from pieces
        return
    pattern = _tag_pattern(tags)
    longest = max(map(len, tags)) + 6  # bracket, two spaces, slash, two spaces, name
    held = ""
    for piece in pieces:
        text = held + piece
        # What follows a late bracket may still grow into a tag, and the name needs the character after it to end.
        bracket = text.find("<", max(0, len(text) - longest - 1))
        ready = len(text) if bracket < 0 else bracket
        held = text[ready:]
        yield pattern.sub("‹", text[:ready])
    yield pattern.sub("‹", held)


def escape_tags(text: str, tags: Sequence[str]) -> str:
    """`escaped_tags` for a text in one piece."""
    return "".join(escaped_tags([text], tags))


def _tag_pattern(tags: Sequence[str]) -> re.Pattern[str]:
    names = "|".join(map(re.escape, tags))
    return re.compile(rf"<(?=\s{{0,2}}/?\s{{0,2}}(?:{names})(?![\w-]))", re.IGNORECASE)
