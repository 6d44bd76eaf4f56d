"""Reads the container of a GGUF file: its metadata, and where each tensor's bytes lie.

The layout is the one of ggml's docs/gguf.md. The `gguf` package reads the same, but makes an object of every token of
the vocabulary, which takes seconds; this takes a fraction of one.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MOST_DIMS = 4  # ggml's own limit; more means that the bytes are not what they should be


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as the file declares it; ggml's dimensions run from the fastest, so they are reversed here."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int  # bytes from the start of the file
    file: Path  # which of a split model's parts

    @property
    def rows(self) -> int:
        """How many rows; quantised blocks never cross one."""
        return prod(self.shape[:-1])


@dataclass(frozen=True)
class GGUFFile:
    """What the header of a model says; one that is split has its metadata from the first part, the tensors of all."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


def read_gguf(path: str | Path) -> GGUFFile:
    """Read the header of `path` and, where it is the first part of a split model, of the others; no tensor is touched.

    Raises ValueError for a file that is not a whole GGUF, for another part, and for parts that are not there.
    """
    first = _read_part(Path(path))
    count = first.metadata.get("split.count", 1)
    if count <= 1:
        return first
    parts = [first, *(_read_part(other) for other in _other_parts(first, count))]
    for number, part in enumerate(parts):
        place = part.metadata.get("split.no"), part.metadata.get("split.count")
        if place != (number, count):
            raise ValueError(
                f"{part.path} is not part {number + 1} of {count} (its header says {place}): fetch it again"
            )
    tensors = {name: info for part in parts for name, info in part.tensors.items()}
    declared = first.metadata.get("split.tensors.count", len(tensors))
    if not sum(len(part.tensors) for part in parts) == len(tensors) == declared:
        raise ValueError(
            f"the {count} parts of {path} are not of one model: they hold {len(tensors)} of {declared} tensors"
        )
    return GGUFFile(first.path, first.metadata, tensors)


def _other_parts(first: GGUFFile, count: int) -> list[Path]:
    """The parts after the first, as llama.cpp names them. ValueError where `first` is not that, or one is missing."""
    number, named = first.metadata.get("split.no", 0) + 1, re.fullmatch(r"(.*)-\d{5}-of-\d{5}\.gguf", first.path.name)
    if named is None:
        raise ValueError(
            f"{first.path} is part {number} of {count}, but not named so: call the parts NAME-00001-of-{count:05}.gguf "
            "and so on, that the others can be found"
        )
    paths = [first.path.with_name(f"{named[1]}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    if number != 1:
        raise ValueError(f"{first.path} is part {number} of {count}: give part 1, {paths[0]}")
    if missing := [path.name for path in paths if not path.exists()]:
        raise ValueError(
            f"{first.path} is part 1 of {count}, and {', '.join(missing)} is not beside it: fetch that too"
        )
    return paths[1:]


def _read_part(path: Path) -> GGUFFile:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).read()
    except (struct.error, IndexError) as error:
        raise ValueError(f"{path} is not a whole GGUF file: it ends in the middle; download it again") from error
    except (UnicodeDecodeError, OverflowError, KeyError) as error:
        raise ValueError(f"{path} is a damaged GGUF file: download it again") from error
    except ValueError as error:  # mmap's word for an empty file is not ours
        if path.stat().st_size == 0:
            raise ValueError(f"{path} is empty; download it again") from error
        raise
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error


class _Reader:
    """A cursor over the header."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path, self.data, self.at = path, data, 0

    def read(self) -> GGUFFile:
        if self.data[:4] != _MAGIC:
            raise ValueError(f"{self.path} is not a GGUF file: it starts with {self.data[:4]!r}")
        self.at = 4
        version = self.scalar("I")
        if version not in (2, 3):
            raise ValueError(f"{self.path} is GGUF version {version}; versions 2 and 3, little-endian, can be read")
        tensor_count, entry_count = self.scalar("Q"), self.scalar("Q")
        metadata = {}
        for _ in range(entry_count):
            key = self.string()
            metadata[key] = self.value(self.scalar("I"))
        declared = [self.tensor() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        start = -(-self.at // alignment) * alignment
        tensors = {t.name: replace(t, offset=start + t.offset) for t in declared}
        return GGUFFile(self.path, metadata, tensors)

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        end = self.at + length
        if end > len(self.data):
            raise IndexError(f"a string ends at byte {end} of {len(self.data)}")
        text = self.data[self.at : end].decode("utf-8")
        self.at = end
        return text

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind in (_STRING, _ARRAY):
            return [self.value(kind) for _ in range(count)]
        code = f"<{count}{_SCALARS[kind]}"
        values = struct.unpack_from(code, self.data, self.at)
        self.at += struct.calcsize(code)
        return list(values)

    def tensor(self) -> TensorInfo:
        name = self.string()
        dim_count = self.scalar("I")
        if dim_count > _MOST_DIMS:
            raise ValueError(
                f"{self.path} is a damaged GGUF file: {name!r} has {dim_count} dimensions; download it again"
            )
        dims = [self.scalar("Q") for _ in range(dim_count)]
        return TensorInfo(name, tuple(reversed(dims)), self.scalar("I"), self.scalar("Q"), self.path)
