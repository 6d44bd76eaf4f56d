"""Files as streams of characters: what a file is, its encoding, and whether it changed."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

Kind = Literal["text", "html", "pdf"]

PIECE_BYTES = 1 << 16

_BYTE_ORDER_MARKS = (  # UTF-32 first: its little-endian mark starts with that of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)

_WEB_ENCODINGS = frozenset(
    {"ascii", "iso8859-1", "cp1252", "cp866", "koi8-r", "koi8-u", "mac-roman", "mac-cyrillic", "cp874", "tis-620"}
    | {f"iso8859-{part}" for part in (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 14, 15, 16)}
    | {f"cp{page}" for page in (1250, 1251, 1253, 1254, 1255, 1256, 1257, 1258, 932, 949)}
    | {"gb2312", "gbk", "gb18030", "big5", "big5hkscs", "euc_jp", "iso2022_jp", "shift_jis", "euc_kr"}
)
"""What a page may declare, under Python's names (WHATWG's Encoding Standard has the labels)."""

_AS_BROWSERS_READ = {
    "ascii": "cp1252",
    "iso8859-1": "cp1252",
    "iso8859-9": "cp1254",
    "iso8859-11": "cp874",
    "tis-620": "cp874",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "shift_jis": "cp932",
    "euc_kr": "cp949",
    "big5": "big5hkscs",
}
"""Declared encodings that stand for a larger one."""


@dataclass(frozen=True)
class InputFile:
    """One readable file: where it lies, what it is, and the hash of its bytes."""

    path: Path
    name: str
    kind: Kind
    packed: bool
    size: int  # bytes on disk
    sha256: str
    changed: int  # time of the last change, in nanoseconds
    notes: tuple[str, ...] = ()  # what a person should know of the text: parts that could not be read

    def refuse_if_changed(self) -> None:
        """ValueError where what was read is no longer what was inspected; text may have been added to a text file."""
        now = self.path.stat()
        unchanged = (now.st_size, now.st_mtime_ns) == (self.size, self.changed)
        may_have_grown = self.kind != "pdf" and not self.packed
        if unchanged or hash_of(self.path, self.size if may_have_grown else None) == self.sha256:
            return
        raise ValueError(f"{self.name} changed while it was read: read it again; what is still the same costs nothing")


def hash_of(path: Path, size: int | None = None) -> str:
    """The hash of the file's bytes, or of the first `size` of them."""
    with open(path, "rb") as raw:
        if size is None:
            return hashlib.file_digest(raw, "sha256").hexdigest()
        digest, left = hashlib.sha256(), size
        while left > 0 and (data := raw.read(min(left, PIECE_BYTES))):
            digest.update(data)
            left -= len(data)
        return digest.hexdigest()


def starts_with(path: Path, magic: bytes) -> bool:
    """Whether a file begins with these bytes."""
    with open(path, "rb") as raw:
        return raw.read(len(magic)) == magic


@contextmanager
def reading_bytes(file: InputFile) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The unpacked bytes, and the file on disk whose position tells how far they are."""
    with open(file.path, "rb") as raw:
        if not file.packed:
            yield raw, raw
            return
        try:
            with gzip.GzipFile(fileobj=raw) as unpacked:
                yield unpacked, raw  # type: ignore[misc]
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{file.name} is a damaged gzip file ({error}): fetch it again") from error


def decoded(file: InputFile) -> Iterator[tuple[str, float]]:
    """The characters of the file as they stand, line ends as newlines, with the share of the file read."""
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    with reading_bytes(file) as (stream, raw):

        def next_piece() -> bytes:  # what was added to a file since it was inspected is not read
            return stream.read(PIECE_BYTES if file.packed else max(0, min(PIECE_BYTES, file.size - raw.tell())))

        piece = next_piece()
        encoding, mark = _encoding(piece, file.kind)
        decoder = codecs.getincrementaldecoder(encoding)()
        offset, piece = mark, piece[mark:]
        while True:
            pending = len(decoder.getstate()[0])
            if "16" not in encoding and "32" not in encoding and b"\0" in piece:
                raise ValueError(
                    f"{file.name} is a binary file (byte 0 at offset {offset + piece.index(0)}): give text, HTML or PDF"
                )
            try:
                text = decoder.decode(piece, final=not piece)
            except UnicodeDecodeError as error:
                bad = error.object[error.start]
                raise ValueError(
                    f"{file.name} is not valid {encoding.upper()}: byte 0x{bad:02x} at offset "
                    f"{offset - pending + error.start} cannot be decoded; convert it with iconv -f NAME -t utf-8: "
                    "cp1252 for Western text, shift_jis for Japanese, gb18030 for Chinese"
                ) from None
            yield newlines.decode(text, final=not piece), min(1.0, raw.tell() / file.size)
            if not piece:
                return
            offset += len(piece)
            piece = next_piece()


def _encoding(head: bytes, kind: Kind) -> tuple[str, int]:
    """The encoding, and the length of the byte order mark that names it."""
    for mark, encoding in _BYTE_ORDER_MARKS:
        if head.startswith(mark):
            return encoding, len(mark)
    declared = re.search(rb"<(?:meta|\?xml)[^>]*?(?:charset|encoding)\s*=\s*[\"']?([\w-]+)", head[:2048], re.IGNORECASE)
    if kind == "html" and declared:
        try:
            name = codecs.lookup(declared[1].decode()).name
        except LookupError:
            return "utf-8", 0
        # A page that can be searched byte by byte for its declaration is not UTF-16, whatever it declares; and Python
        # knows encodings that are none of text.
        return (_AS_BROWSERS_READ.get(name, name) if name in _WEB_ENCODINGS else "utf-8"), 0
    return _utf16_without_mark(head) or "utf-8", 0


def _utf16_without_mark(head: bytes) -> str | None:
    """UTF-16 of mostly Latin text, told by the zero in every other byte."""
    sample = head[: len(head) // 2 * 2][:1024]
    zeros = [sample[i::2].count(0) / max(1, len(sample) // 2) for i in (0, 1)]
    if len(sample) >= 8 and min(zeros) < 0.05 and max(zeros) > 0.5:
        return "utf-16-be" if zeros[0] > zeros[1] else "utf-16-le"
    return None
