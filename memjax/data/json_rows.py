"""JSON objects from a file, one at a time: JSON lines, one JSON array, or one JSON object; gzip too."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from memjax.text import whole_strings

_READ = 1 << 18  # characters read at a time
_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")  # as it is escaped; UTF-8 itself has none
_CUT_MARGIN = 16  # an error this near the end of what was read may be a token that was cut, not a fault

Row = dict[str, Any]


def read_rows(path: str | Path) -> Iterator[tuple[str, Row]]:
    """Yield every object of a file with its place ("tasks.jsonl, line 3") for messages.

    Never holds more than one object and a buffer. Halves of surrogate pairs become U+FFFD. ValueError, with the place,
    for anything that is not such a file.
    """
    path = Path(path)
    try:
        with _open(path) as file:
            start = file.readline()
            while start and not start.strip():
                start = file.readline()
        with _open(path) as file:
            if not start:
                raise ValueError(f"{path} is empty")
            if start.lstrip().startswith("["):
                yield from _array(file, path)
            elif _is_one_object(start, path):
                yield f"{path}", _object(file.read(), f"{path}")
            else:
                yield from _lines(file, path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a whole gzip file: {error}") from error


def _open(path: Path) -> TextIO:
    opener = gzip.open if path.suffix == ".gz" else open
    return opener(path, "rt", encoding="utf-8-sig")


def _is_one_object(first_line: str, path: Path) -> bool:
    """Whether a file that starts with a brace is one object (SQuAD) rather than one object a line."""
    try:
        value = json.loads(first_line)
    except (json.JSONDecodeError, RecursionError):
        return ".jsonl" not in path.suffixes
    return isinstance(value, dict) and "data" in value


def _object(text: str, place: str) -> Row:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not valid JSON: {error.msg} at column {error.colno}") from error
    except RecursionError:
        raise ValueError(f"{place}: JSON nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"{place}: must be a JSON object, got {text[:40]!r}")
    return whole_strings(value) if _HALF_PAIR.search(text) else value


def _lines(file: TextIO, path: Path) -> Iterator[tuple[str, Row]]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            place = f"{path}, line {number}"
            yield place, _object(line, place)


def _array(file: TextIO, path: Path) -> Iterator[tuple[str, Row]]:
    """The objects of a top-level array; what was read is dropped behind the element that is being decoded."""
    decoder = json.JSONDecoder()
    buffer, at, number = file.read(_READ), 0, 0
    at = buffer.index("[") + 1
    while True:
        place = f"{path}, element {number + 1}"
        buffer, at = _skip(file, buffer, at, " \t\r\n," if number else " \t\r\n")
        if buffer[at : at + 1] == "]":
            return
        if buffer[at : at + 1] != "{":
            found = repr(buffer[at : at + 20]) if at < len(buffer) else "the end of the file"
            raise ValueError(f"{place}: expected a JSON object, got {found}")
        while True:
            try:
                value, end = decoder.raw_decode(buffer, at)
                break
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated") or error.pos > len(buffer) - _CUT_MARGIN
                more = file.read(max(_READ, len(buffer) - at)) if cut else ""
                if not more:
                    raise ValueError(f"{place}: not valid JSON: {error.msg}") from error
                buffer, at = buffer[at:] + more, 0
            except RecursionError:
                raise ValueError(f"{place}: JSON nested too deeply") from None
        yield place, whole_strings(value) if _HALF_PAIR.search(buffer, at, end) else value
        at = end
        number += 1


def _skip(file: TextIO, buffer: str, at: int, characters: str) -> tuple[str, int]:
    """Move past `characters`, reading on where the buffer ends."""
    while True:
        while at < len(buffer) and buffer[at] in characters:
            at += 1
        if at < len(buffer):
            return buffer, at
        buffer, at = file.read(_READ), 0
        if not buffer:
            return buffer, at
