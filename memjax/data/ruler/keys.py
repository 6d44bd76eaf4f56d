"""Words, numbers and UUIDs that needles are made of."""

from __future__ import annotations

import functools
import random
import re
import uuid
from typing import Literal

from wonderwords import RandomWord

Kind = Literal["words", "numbers", "uuids"]

_PLAIN = re.compile(r"[a-z]+")


@functools.cache
def vocabulary(*categories: Literal["noun", "adjective", "verb"]) -> tuple[str, ...]:
    """The distinct plain English words of these categories, sorted."""
    words = RandomWord().filter(include_categories=categories)
    return tuple(sorted({word for word in words if _PLAIN.fullmatch(word)}))


def draw(kind: Kind, rng: random.Random) -> str:
    """One adjective-noun pair, one number of seven digits, or one random UUID."""
    match kind:
        case "words":
            return f"{rng.choice(vocabulary('adjective'))}-{rng.choice(vocabulary('noun'))}"
        case "numbers":
            return str(rng.randrange(10**6, 10**7))
        case "uuids":
            return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def draw_distinct(kind: Kind, count: int, rng: random.Random, avoid: frozenset[str] = frozenset()) -> list[str]:
    """`count` different values, none of them in `avoid`."""
    found: dict[str, None] = {}
    while len(found) < count:
        value = draw(kind, rng)
        if value not in avoid:
            found[value] = None
    return list(found)
