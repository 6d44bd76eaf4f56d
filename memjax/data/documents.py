"""Documents as streams of text: plain text, Markdown, HTML and PDF files, packed or not, and standard input."""

from __future__ import annotations

import hashlib
import re
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from memjax.data.input_files import PIECE_BYTES, InputFile, Kind, decoded, hash_of, reading_bytes, starts_with
from memjax.data.parsing import checked, parsed

_KIND_OF_SUFFIX: dict[str, Kind] = {".html": "html", ".htm": "html", ".xhtml": "html", ".pdf": "pdf"}


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
    def notes(self) -> tuple[str, ...]:
        """What a person should know of the text, each with the name of its file."""
        return tuple(f"{file.name}: {note}" for file in self.files for note in file.notes)

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
    def notes(self) -> tuple[str, ...]:
        """As for a document."""
        return tuple(note for document in self.documents for note in document.notes)

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
    packed = starts_with(path, b"\x1f\x8b")
    digest = hash_of(path)
    shown = Path(name).name if name != "standard input" else name
    file = InputFile(path, shown, "text", packed, size, digest, stat_.st_mtime_ns)
    with reading_bytes(file) as (stream, _):
        head = stream.read(1024)
    file = replace(file, kind=_kind(name, head))
    if file.kind == "pdf":
        if packed:
            raise ValueError(f"{name} is a packed PDF: unpack it first (gunzip {name})")
    else:
        for _ in decoded(file):  # an undecodable byte must be found before hours of reading, not after
            pass
    has_text, notes = checked(file) if file.kind != "text" else (any(text.strip() for text, _ in decoded(file)), ())
    if not has_text:
        hint = "; a scanned PDF needs OCR first" if file.kind == "pdf" else "".join(f"; {note}" for note in notes)
        raise ValueError(f"{name} contains no text{hint}")
    return replace(file, notes=notes)


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


def _text_of(file: InputFile) -> Iterator[tuple[str, float]]:
    return decoded(file) if file.kind == "text" else parsed(file)
