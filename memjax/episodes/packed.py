"""How a journal packs arrays, and where the tokens of a text begin."""

from __future__ import annotations

import base64
import itertools
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

_IN_WORDS = np.array([bytes([byte]).isalnum() or byte >= 0x80 or byte == ord("'") for byte in range(256)])


def packed_lengths(pieces: Sequence[bytes]) -> str:
    """Where each of these tokens, none of them empty, begins in their text.

    A bit for each byte, packed: whether the token that begins there, or does not, differs from what `_likely` says.
    """
    assert all(pieces), "a token without text has no place in it"
    text = b"".join(pieces)
    begins = np.zeros(len(text), bool)
    begins[np.cumsum([0, *map(len, pieces)])[:-1]] = True
    return packed(np.packbits(begins ^ _likely(text)))


def pieces_in(text: bytes, lengths: str) -> list[bytes]:
    """The tokens of which `packed_lengths` made `lengths`, in their text."""
    begins = np.unpackbits(unpacked(lengths, np.uint8), count=len(text)).astype(bool) ^ _likely(text)
    ends = [*np.flatnonzero(begins).tolist(), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(ends)]


def _likely(text: bytes) -> np.ndarray:
    """Whether a token is likely to begin at each byte: a space, or a change between words and others after no space."""
    bytes_ = np.frombuffer(text, np.uint8)
    is_word, is_space = _IN_WORDS[bytes_], bytes_ == ord(" ")
    follows_space, follows_word = np.roll(is_space, 1), np.roll(is_word, 1)
    return is_space | ((is_word != follows_word) & ~follows_space)


def packed(data: bytes | np.ndarray) -> str:
    """Bytes, or an array, as a text: deflate in base64. Of an array first the lowest bytes of all items, and so on."""
    if isinstance(data, np.ndarray):
        little = np.ascontiguousarray(data, data.dtype.newbyteorder("<"))
        data = little.view(np.uint8).reshape(-1, little.itemsize).T.tobytes()
    return base64.b64encode(zlib.compress(data)).decode()


def unpacked(text: str | None, dtype: Any) -> np.ndarray:
    """The array that `packed` made a text of; an empty one for None."""
    little = np.dtype(dtype).newbyteorder("<")
    raw = np.frombuffer(zlib.decompress(base64.b64decode(text)) if text else b"", np.uint8)
    return np.ascontiguousarray(raw.reshape(little.itemsize, -1).T).reshape(-1).view(little)
