"""Documents as streams of text: plain text, Markdown, HTML and PDF files, packed or not, and standard input."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import logging
import re
import stat
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import BinaryIO, Literal

Kind = Literal["text", "html", "pdf"]

PIECE_BYTES = 1 << 16

_KIND_OF_SUFFIX: dict[str, Kind] = {".html": "html", ".htm": "html", ".xhtml": "html", ".pdf": "pdf"}

_BYTE_ORDER_MARKS = (  # UTF-32 first: its little-endian mark starts with that of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


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

    def refuse_if_changed(self) -> None:
        """ValueError where what was read is no longer what was inspected; text may have been added to a text file."""
        now = self.path.stat()
        unchanged = (now.st_size, now.st_mtime_ns) == (self.size, self.changed)
        may_have_grown = self.kind != "pdf" and not self.packed
        if unchanged or _hash_of(self.path, self.size if may_have_grown else None) == self.sha256:
            return
        raise ValueError(f"{self.name} changed while it was read: read it again; what is still the same costs nothing")


@dataclass(frozen=True)
class Document:
    """Files read one after another as one text; every file but the first is announced by its name.

    So a text does not depend on which files follow it, and reading on in another file repeats nothing.
    """

    files: tuple[InputFile, ...]

    @property
    def name(self) -> str:
        """The names of the files, for people."""
        return ", ".join(file.name for file in self.files)

    @property
    def size(self) -> int:
        """The bytes of the files on disk."""
        return sum(file.size for file in self.files)

    @property
    def fingerprint(self) -> str:
        """A hash that changes when the text could."""
        names = [file.name for file in self.files[1:]]  # only announced names are text
        parts = [f"{file.kind} {file.sha256}" for file in self.files]
        return hashlib.sha256("\n".join(names + parts).encode()).hexdigest()[:32]

    def pieces(self) -> Iterator[str]:
        """Yield the text from the start, in order."""
        return (text for text, _ in self.pieces_with_share())

    def pieces_with_share(self) -> Iterator[tuple[str, float]]:
        """Yield pieces of the text, each with the share (0 to 1) of the input that had been read by then."""
        whole, before = self.size, 0
        for number, file in enumerate(self.files):
            if number:
                yield f"\n\nDocument {number + 1}: {file.name}\n\n", before / whole
            for text, share in _text_of(file):
                yield text, (before + share * file.size) / whole
            file.refuse_if_changed()
            before += file.size


@dataclass(frozen=True)
class Series:
    """Documents read one after another, each cut into chunks by itself: appending one leaves all other chunks alone."""

    documents: tuple[Document, ...]

    @property
    def name(self) -> str:
        """The names of the documents, for people."""
        return ", ".join(document.name for document in self.documents)

    @property
    def fingerprint(self) -> str:
        """A hash that changes when the text could."""
        return hashlib.sha256("\n".join(document.fingerprint for document in self.documents).encode()).hexdigest()[:32]

    def pieces(self) -> Iterator[str]:
        """Yield the text from the start, in order."""
        for document in self.documents:
            yield from document.pieces()


def open_document(names: Sequence[str], spool: Path) -> Document:
    """Check every file once from end to end and return the document they make.

    "-" is standard input. What can be read only once (standard input, a pipe) is copied into the directory `spool`,
    under a name that its content gives it. Raises ValueError for a file that is missing, empty, binary or not
    decodable.
    """
    if not names:
        raise ValueError("no document given: name one or more files, or - for standard input")
    return Document(tuple(_open_file(name, spool) for name in names))


def _open_file(name: str, spool: Path) -> InputFile:
    path, shown = Path(name), name
    if name == "-":
        path, shown = _copied(sys.stdin.buffer, spool), "standard input"
    elif path.is_dir():
        raise ValueError(f"{name} is a directory: name its files, for example {name.rstrip('/')}/*.txt")
    elif not path.exists():
        raise ValueError(f"there is no file {name}: check the path")
    elif not stat.S_ISREG(path.stat().st_mode):
        with open(name, "rb") as pipe:
            path = _copied(pipe, spool)
    try:
        return inspected(path, shown)
    except PermissionError:
        raise ValueError(f"{shown} cannot be read: its permissions do not allow it") from None
    except ValueError:
        if path != Path(name):  # a copy that was made just now
            path.unlink()
        raise


def is_copy(path: Path, spool: Path) -> bool:
    """Whether a file is a copy that `open_document` made in `spool`."""
    return path.parent == spool and re.fullmatch(r"input-[0-9a-f]{16}", path.name) is not None


def _copied(source: BinaryIO, spool: Path) -> Path:
    """A file with what `source` gives."""
    spool.mkdir(parents=True, exist_ok=True, mode=0o700)
    digest = hashlib.sha256()
    with tempfile.NamedTemporaryFile(dir=spool, delete=False) as copy:
        while piece := source.read(PIECE_BYTES):
            digest.update(piece)
            copy.write(piece)
    target = spool / f"input-{digest.hexdigest()[:16]}"
    if target.exists():  # another process may be reading it
        Path(copy.name).unlink()
        target.touch()
        return target
    return Path(copy.name).rename(target)


def inspected(path: Path, name: str) -> InputFile:
    """Read the file at `path`, which people call `name`, from end to end; ValueError where it is no readable text."""
    stat_ = path.stat()
    size = stat_.st_size
    if size == 0:
        raise ValueError(f"{name} is empty: there is nothing to read")
    packed = _starts_with(path, b"\x1f\x8b")
    digest = _hash_of(path)
    shown = Path(name).name if name != "standard input" else name
    file = InputFile(path, shown, "text", packed, size, digest, stat_.st_mtime_ns)
    with _reading_bytes(file) as (stream, _):
        head = stream.read(1024)
    file = replace(file, kind=_kind(name, head))
    if file.kind == "pdf":
        if packed:
            raise ValueError(f"{name} is a packed PDF: unpack it first (gunzip {name})")
    else:
        for _ in _decoded(file):  # an undecodable byte must be found before hours of reading, not after
            pass
    if not any(text.strip() for text, _ in _text_of(file)):
        hint = "; a scanned PDF needs OCR first" if file.kind == "pdf" else ""
        raise ValueError(f"{name} contains no text{hint}")
    return file


def _hash_of(path: Path, size: int | None = None) -> str:
    """The hash of the file's bytes, or of the first `size` of them."""
    with open(path, "rb") as raw:
        if size is None:
            return hashlib.file_digest(raw, "sha256").hexdigest()
        digest, left = hashlib.sha256(), size
        while left > 0 and (data := raw.read(min(left, PIECE_BYTES))):
            digest.update(data)
            left -= len(data)
        return digest.hexdigest()


def _starts_with(path: Path, magic: bytes) -> bool:
    with open(path, "rb") as raw:
        return raw.read(len(magic)) == magic


def _kind(name: str, head: bytes) -> Kind:
    if head.startswith(b"%PDF-"):
        return "pdf"
    if head.startswith(b"PK\x03\x04"):
        raise ValueError(f"{name} is a ZIP or Office file: save it as text, HTML or PDF first")
    kind = _KIND_OF_SUFFIX.get(Path(name.removesuffix(".gz")).suffix.lower())
    if kind == "pdf":
        raise ValueError(f"{name} is called a PDF but does not start like one: is it a damaged download?")
    if kind is None:
        kind = "html" if re.match(rb"\s*<(!doctype html|html)\b", head, re.IGNORECASE) else "text"
    return kind


@contextmanager
def _reading_bytes(file: InputFile) -> Iterator[tuple[BinaryIO, BinaryIO]]:
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


def _decoded(file: InputFile) -> Iterator[tuple[str, float]]:
    """The characters of the file as they stand, line ends as newlines, with the share of the file read."""
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    with _reading_bytes(file) as (stream, raw):

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
                    f"{offset - pending + error.start} cannot be decoded; convert it first, for example with "
                    f"iconv -f latin1 -t utf-8"
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
            # A page that can be searched byte by byte for its declaration is not UTF-16, whatever it declares.
            name = codecs.lookup(declared[1].decode()).name
            return ("utf-8" if name.startswith(("utf-16", "utf-32")) else name), 0
        except LookupError:
            return "utf-8", 0
    return "utf-8", 0


def _text_of(file: InputFile) -> Iterator[tuple[str, float]]:
    if file.kind == "pdf":
        yield from _pdf_text(file)
    elif file.kind == "html":
        extractor = _HtmlText()
        share = 0.0
        for text, share in _decoded(file):
            extractor.feed(text)
            yield extractor.take(), share
        extractor.close()
        yield extractor.take(), share
    else:
        yield from _decoded(file)


_SILENT = frozenset({"script", "style", "template", "noscript", "svg", "head"})
_BLOCKS = frozenset(
    {
        "address",
        "article",
        "aside",
        "blockquote",
        "br",
        "dd",
        "div",
        "dl",
        "dt",
        "figcaption",
        "figure",
        "footer",
        "form",
    }
    | {"h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "li", "main", "nav", "ol", "p", "pre", "section", "table"}
    | {"form", "td", "th", "title", "tr", "ul"}
)


class _HtmlText(HTMLParser):
    """Collects the visible text; blocks become lines, runs of white space one space (except in pre)."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._parts: list[str] = []
        self._last = "\n"
        self._silent: list[str] = []
        self._pre = 0

    def take(self) -> str:
        """What was collected since the last call."""
        text = "".join(self._parts)
        self._parts.clear()
        return text

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "body":
            self._silent.clear()  # a head that was never closed ends here
        elif tag in _SILENT:
            self._silent.append(tag)
        if tag == "pre":
            self._pre += 1
        if tag in _BLOCKS:
            self._new_line()

    def handle_endtag(self, tag: str) -> None:
        if tag in self._silent:
            del self._silent[self._silent.index(tag) :]
        if tag == "pre":
            self._pre = max(0, self._pre - 1)
        if tag in _BLOCKS:
            self._new_line()

    def handle_data(self, data: str) -> None:
        title = self._silent == ["head"] and self.lasttag == "title"
        if self._silent and not title:
            return
        if not self._pre:
            data = re.sub(r"\s+", " ", data)
            if self._last.isspace():
                data = data.lstrip(" ")
        self._emit(data)

    def _new_line(self) -> None:
        if self._last != "\n":
            self._emit("\n")

    def _emit(self, text: str) -> None:
        if text:
            self._parts.append(text)
            self._last = text[-1]


def _pdf_text(file: InputFile) -> Iterator[tuple[str, float]]:
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, PyPdfError

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # what matters of its remarks is raised, and said below
    try:
        reader = PdfReader(file.path)
        if reader.is_encrypted and not reader.decrypt(""):
            raise ValueError(f"{file.name} is protected by a password: save it without one")
        pages = len(reader.pages)
    except (PyPdfError, DependencyError) as error:
        raise ValueError(f"{file.name} is a damaged or protected PDF ({error}): save or fetch it again") from error
    for number in range(pages):
        try:
            text = reader.pages[number].extract_text()
        except Exception as error:  # the boundary to pypdf, which meets broken files with whatever they provoke
            raise ValueError(f"{file.name}: the text of page {number + 1} cannot be read ({error!r})") from error
        yield text + "\n\n", (number + 1) / pages
