"""Arithmetic that is parsed here: what Python says where Python and it agree, and a sentence for all else."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memjax.environments.calculator import CALCULATOR, Calculator, calculate
from memjax.rollout.client import ToolCall
from memjax.rollout.tool_calls import problem_with


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"),
        ("(2 + 3) * 4", "20"),
        ("2 - 3 - 4", "-5"),
        ("8 / 4 / 2", "1"),
        ("7 // 2", "3"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("-2 ** 2", "-4"),
        ("2 ** -1", "0.5"),
        ("2 ** 3 ** 2", "512"),
        ("--3", "3"),
        ("2 * -3", "-6"),
        ("0.1 + 0.2", "0.3"),
        ("1 / 3", "0.333333333333"),
        ("2 ** 0.5", "1.41421356237"),
        ("1,234,567 + 1", "1234568"),
        ("3 × 4 ÷ 2 − 1", "5"),
        (".5 * 2.", "1"),
        ("2 ** 100", str(2**100)),
        ("0 ** 0", "1"),
        ("(" * 30 + "1" + ")" * 30, "1"),
        ("+".join(["(1)"] * 50), "50"),
    ],
)
def test_known_values(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ("1 / 0", "division by zero"),
        ("1 // (2 - 2)", "division by zero"),
        ("1 % 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("", "at its end"),
        ("2 +", "at its end"),
        ("(2 + 3", "at its end"),
        ("2 + 3)", "at ')'"),
        ("2 3", "at '3'"),
        ("two", "at 'two'"),
        ("__import__('os')", 'cannot be read at "__import__'),
        ("1e9", "at 'e9'"),
        ("2 ^ 3", "at '^ 3'"),
        ("9 ** 9 ** 9", "too large"),
        ("0.5 ** 10000", "too large"),
        ("(2 ** 500) ** 2 * (2 ** 500)", "too large"),
        ("(-8) ** 0.5", "negative number"),
        ("1,23", "at ',23'"),
        ("(" * 300, "300 characters"),
        ("(" * 199, "within one another"),
        ("-" * 199 + "1", "within one another"),
        ("1" + "**1" * 66, "within one another"),
        ("(-" * 60 + "1" + ")" * 60, "within one another"),
        ("9" * 150 + " ** 3.5", "too large"),
    ],
)
def test_what_cannot_be_worked_out_is_told(expression, sentence):
    said = calculate(expression)
    assert said.startswith("Error: ")
    assert sentence in said


NUMBERS = st.integers(0, 99).map(str) | st.decimals(0, 99, places=2).map(str)
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: (
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%"]), inner).map(" ".join)
        | inner.map(lambda e: f"-({e})")
    ),
    max_leaves=6,
)


@given(EXPRESSIONS)
@settings(max_examples=200, deadline=None)
def test_the_value_is_exact_arithmetics(expression):
    import re
    from fractions import Fraction

    exact = re.sub(r"\d+\.?\d*", lambda number: f"Fraction('{number[0]}')", expression)
    said = calculate(expression)
    try:
        expected = eval(exact, {"Fraction": Fraction})
    except ZeroDivisionError:
        assert said == "Error: division by zero."
        return
    if len(expression) <= 200:
        assert math.isclose(float(said), float(expected), rel_tol=1e-11)


@given(st.text(st.sampled_from("0123456789.+-*/%() ,\n×abe_'[]"), max_size=40) | st.text(max_size=250))
@settings(max_examples=300, deadline=None)
def test_no_text_raises(expression):
    assert calculate(expression)


async def test_the_environment_takes_a_call():
    calculator = Calculator()
    step = await calculator.step(json.dumps({"name": "calculator", "arguments": {"expression": "6 * 7"}}))
    assert (step.text, step.reward, step.terminated) == ("42", 0.0, False)
    assert problem_with(ToolCall("1", "calculator", {"expression": "1"}), [CALCULATOR]) is None
