"""Independent random streams for the samples of a data set, named rather than numbered."""

from __future__ import annotations

import hashlib
import random


def derive_seed(seed: int, *path: str | int) -> int:
    """The 32-bit seed of the stream that `path` names under `seed`: unrelated paths give unrelated streams."""
    text = "/".join(str(part) for part in (seed, *path))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def stream(seed: int, *path: str | int) -> random.Random:
    """The random generator that `path` names under `seed`."""
    return random.Random(derive_seed(seed, *path))
