import pytest
from hypothesis import given
from hypothesis import strategies as st

from memjax.data.lengths import blocks, fit_units, measure, parse_length
from tests.data.multihop_data import WordTokenizer


@pytest.mark.parametrize(
    ("text", "tokens"), [("8192", 8192), ("8k", 8192), ("128K", 131072), ("3.5m", 3670016), ("0.5k", 512)]
)
def test_a_length_is_read(text, tokens):
    assert parse_length(text) == tokens


@pytest.mark.parametrize("text", ["", "k", "-3", "1g", "0", "0.0001", "1e6"])
def test_what_is_no_length_is_refused(text):
    with pytest.raises(ValueError, match="a length"):
        parse_length(text)


@given(st.lists(st.text(max_size=10).map(lambda text: text * 5000), max_size=8))
def test_blocks_are_the_same_text(pieces):
    assert "".join(blocks(pieces)) == "".join(pieces)


def test_pieces_are_measured_as_one_text():
    class Whole(WordTokenizer):
        def encode_stream(self, pieces):
            return iter("".join(pieces).split())

    assert measure(["one wo", "rd more"], Whole()) == 3


@given(
    fixed=st.integers(0, 300),
    per_unit=st.floats(0.5, 40),
    wobble=st.integers(0, 30),
    budget=st.integers(400, 100_000),
    guess=st.integers(0, 10_000),
)
def test_units_fit_the_budget_closely_whatever_the_guess(fixed, per_unit, wobble, budget, guess):
    def tokens_of(units):
        return fixed + int(units * per_unit) + (units * 7919) % (wobble + 1)

    units, tokens = fit_units(tokens_of, budget, guess)
    assert tokens == tokens_of(units) <= budget
    assert tokens >= budget - budget // 125 or tokens_of(units + 1) > budget


def test_a_text_that_cannot_be_short_enough_is_refused():
    with pytest.raises(ValueError, match="the shortest text has 110 tokens, but there is room for 100"):
        fit_units(lambda units: 100 + 10 * units, 100, 50)


def test_a_long_text_is_measured_few_times():
    calls = []

    def tokens_of(units):
        calls.append(units)
        return 120 + 27 * units

    fit_units(tokens_of, 1 << 20, 10)
    assert len(calls) <= 3
