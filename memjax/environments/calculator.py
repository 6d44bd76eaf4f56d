"""A tool that works out arithmetic. What it is given is parsed here and never evaluated as Python."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from memjax.environments.environment import Step
from memjax.trajectory import Task

CALCULATOR: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Works out an arithmetic expression: numbers, + - * / // % ** and parentheses.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "For example (3 + 4) * 2.5"}},
            "required": ["expression"],
        },
    },
}

_TOKEN = re.compile(r"\s*(\d+\.?\d*|\.\d+|\*\*|//|[-+*/%()])")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_SIGNS = str.maketrans({"×": "*", "÷": "/", "−": "-", "·": "*"})
_LONGEST = 200  # characters
_NESTED_MOST = 40  # parentheses, signs and powers within one another
_MOST_BITS = 512  # of a numerator or denominator
_TOO_LARGE = "a number becomes too large"
_DIGITS = 12  # shown of a number that is not whole


class Calculator:
    """One tool, `calculator`, that takes an expression. Numbers are exact; what cannot be worked out is told."""

    repeatable = True
    tools = (CALCULATOR,)

    async def reset(self, task: Task, *, seed: int) -> Step:
        """The question."""
        return Step(task.question)

    async def step(self, action: str) -> Step:
        """The value of the expression in a call."""
        return Step(calculate(json.loads(action)["arguments"]["expression"]))

    async def close(self) -> None:
        """Nothing to let go of."""


def calculate(expression: str) -> str:
    """The value of an expression, or a sentence that says what is wrong with it."""
    try:
        return _shown(_Parser(expression).value())
    except ZeroDivisionError:
        return "Error: division by zero."
    except OverflowError:
        return f"Error: {_TOO_LARGE}."
    except ValueError as error:
        return f"Error: {error}."


class _Parser:
    """Reads from left to right; ** binds closest and from the right, then a sign, then * / // %, then + and -."""

    def __init__(self, expression: str):
        if len(expression) > _LONGEST:
            raise ValueError(f"the expression has {len(expression)} characters, more than {_LONGEST}")
        self._text = _THOUSANDS.sub("", expression.translate(_SIGNS))
        self._at = 0
        self._depth = 0

    def value(self) -> Fraction:
        found = self._sum()
        if self._text[self._at :].strip():
            raise self._unreadable()
        return found

    def _sum(self) -> Fraction:
        return self._row(self._product, {"+": lambda a, b: a + b, "-": lambda a, b: a - b})

    def _product(self) -> Fraction:
        return self._row(self._signed, _PRODUCTS)

    def _row(
        self, operand: Callable[[], Fraction], operators: Mapping[str, Callable[[Fraction, Fraction], Fraction | int]]
    ) -> Fraction:
        found = operand()
        while (operator := self._take(operators)) is not None:
            found = _bounded(Fraction(operators[operator](found, operand())))
        return found

    def _signed(self) -> Fraction:
        if self._depth == _NESTED_MOST:
            raise ValueError(f"more than {_NESTED_MOST} parentheses, signs and powers stand within one another")
        self._depth += 1
        sign = self._take("+-")
        found = self._power() if sign is None else self._signed()
        self._depth -= 1
        return -found if sign == "-" else found

    def _power(self) -> Fraction:
        base = self._operand()
        return base if self._take(("**",)) is None else _power(base, self._signed())

    def _operand(self) -> Fraction:
        token = _TOKEN.match(self._text, self._at)
        if token is None or token[1] in ("*", "/", "**", "//", "%", ")", "+", "-"):
            raise self._unreadable()
        self._at = token.end()
        if token[1] != "(":
            return _bounded(Fraction(token[1]))
        found = self._sum()
        if self._take(")") is None:
            raise self._unreadable()
        return found

    def _take(self, wanted: Any) -> str | None:
        token = _TOKEN.match(self._text, self._at)
        if token is None or token[1] not in wanted:
            return None
        self._at = token.end()
        return token[1]

    def _unreadable(self) -> ValueError:
        rest = self._text[self._at :].strip()
        where = f"at {rest[:20]!r}" if rest else "at its end"
        return ValueError(
            f"the expression cannot be read {where}: write numbers, + - * / // % ** and closed parentheses"
        )


_PRODUCTS: Mapping[str, Callable[[Fraction, Fraction], Fraction | int]] = {
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
}


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator == 1:
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if (bits - 1) * abs(exponent) > _MOST_BITS:
            raise ValueError(_TOO_LARGE)
        return _bounded(Fraction(base ** int(exponent)))
    if base < 0:
        raise ValueError("a negative number has no such power")
    return _bounded(Fraction(float(base) ** float(exponent)))


def _bounded(number: Fraction) -> Fraction:
    if max(number.numerator.bit_length(), number.denominator.bit_length()) > 2 * _MOST_BITS:
        raise ValueError(_TOO_LARGE)
    return number


def _shown(number: Fraction) -> str:
    if number.denominator == 1:
        return str(number.numerator)
    return f"{float(number):.{_DIGITS}g}"
