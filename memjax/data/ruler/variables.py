"""RULER's variable tracking: a chain of assignments scattered, in order, over noise."""

from __future__ import annotations

import string
from collections.abc import Iterator
from dataclasses import dataclass

from memjax.data.ruler.draft import NOISE_LINE
from memjax.data.seeds import stream

HOPS = 4
_NAME_LETTERS = 5


@dataclass(frozen=True)
class VariablesDraft:
    """One chain: the first variable holds the value, each next one copies the one before. Units are lines of noise."""

    seed: int
    value: int
    names: tuple[str, ...]

    @property
    def question(self) -> str:
        """Ask for every variable that ends up with the value."""
        return f"Which variables hold the value {self.value}, be it directly or by way of other variables? Name all."

    @property
    def answers(self) -> tuple[str, ...]:
        """The names along the chain."""
        return self.names

    @property
    def evidence(self) -> tuple[str, ...]:
        """The assignments, in the order in which they stand."""
        sources = (str(self.value), *(f"VAR {name}" for name in self.names))
        return tuple(f"VAR {name} = {source}\n" for name, source in zip(self.names, sources, strict=False))

    def pieces(self, units: int) -> Iterator[str]:
        """Yield the noise with the assignments at random places, in order."""
        rng = stream(self.seed, "places")
        places = sorted(rng.randint(0, units) for _ in self.names)
        waiting = list(zip(places, self.evidence, strict=True))[::-1]
        for i in range(units + 1):
            while waiting and waiting[-1][0] == i:
                yield waiting.pop()[1]
            if i < units:
                yield NOISE_LINE


def draft_variables(seed: int) -> VariablesDraft:
    """Draw the names and the value of one chain."""
    rng = stream(seed, "chain")
    names: dict[str, None] = {}
    while len(names) < HOPS + 1:
        names["".join(rng.choices(string.ascii_uppercase, k=_NAME_LETTERS))] = None
    return VariablesDraft(seed, rng.randrange(10_000, 100_000), tuple(names))
