import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memjax.eval.statistics import bootstrap, compare, interval, samples_needed, standard_error, wilson


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    [
        (0, 10, 0.0, 0.27754),  # z^2 / (n + z^2) = 3.84146 / 13.84146
        (10, 10, 0.72246, 1.0),
        (5, 10, 0.23659, 0.76341),  # 0.5 -+ 1.95996 sqrt(0.025 + 0.0096036) / 1.384146
        (105, 128, 0.74478, 0.87718),  # (0.8203125 + 0.0150057 -+ 1.95996 * 0.0347876) / 1.0300114
    ],
)
def test_wilson_gives_the_hand_worked_interval(successes, count, low, high):
    assert wilson(successes, count) == pytest.approx((low, high), abs=1e-5)


def test_no_samples_say_nothing():
    assert wilson(0, 0) == (0.0, 1.0)
    assert interval([]).count == 0


def test_right_or_wrong_scores_get_wilsons_interval_and_graded_ones_a_bootstrap():
    binary = interval([1.0] * 5 + [0.0] * 5)
    assert (binary.low, binary.high) == pytest.approx(wilson(5, 10))
    graded = interval([0.0, 0.25, 0.5, 0.75, 1.0] * 4)
    assert (graded.low, graded.high) == bootstrap([0.0, 0.25, 0.5, 0.75, 1.0] * 4)
    # The mean of 20 scores with variance 1/8 has a standard error of 0.0791, times 1.96.
    assert graded.low == pytest.approx(0.5 - 0.155, abs=0.01)
    assert graded.high == pytest.approx(0.5 + 0.155, abs=0.01)


def test_equal_graded_scores_do_not_claim_certainty():
    assert interval([0.5] * 10).high - interval([0.5] * 10).low > 0.3


def test_standard_error_is_the_samples_spread_over_root_n():
    assert standard_error([0.0, 1.0, 1.0, 0.0]) == pytest.approx(math.sqrt(1 / 3) / 2)


@pytest.mark.parametrize(
    ("variance", "expected"),
    [
        (0.2, 1745),  # 0.2 (1.959964 + 0.841621)^2 / 0.03^2 = 0.2 * 7.848879 / 0.0009
        (2 * 0.25, 4361),
        (0.0, 1),
    ],
)
def test_samples_for_three_points_are_the_hand_worked_number(variance, expected):
    assert samples_needed(variance) == expected


def test_a_paired_comparison_sees_a_difference_that_unpaired_intervals_hide():
    a = [1.0, 0.0] * 50
    b = [1.0, 0.0] * 40 + [1.0, 1.0] * 10
    result = compare(a, b)
    assert result.difference.mean == pytest.approx(0.1)
    # 10 of 100 differences are 1: standard error sqrt(0.09 / 100) = 0.03.
    assert result.difference.low == pytest.approx(0.1 - 0.0588, abs=0.015)
    assert result.difference.high == pytest.approx(0.1 + 0.0588, abs=0.015)
    assert result.p_value < 0.01
    assert result.samples_for_3_points == samples_needed(0.09) == 785
    assert interval(a).high > interval(b).low


def test_five_wins_of_six_are_what_chance_gives_once_in_sixteen():
    assert compare([0.0] * 6, [1.0] * 5 + [0.0]).p_value == pytest.approx(2 / 2**5, abs=0.01)


def test_equal_runs_do_not_differ():
    result = compare([1.0, 0.0, 1.0], [1.0, 0.0, 1.0])
    assert (result.difference.low, result.difference.high, result.p_value) == (0.0, 0.0, 1.0)
    assert result.samples_for_3_points is None


def test_runs_with_other_samples_are_not_compared():
    with pytest.raises(ValueError, match="the same samples twice, got 2 and 1"):
        compare([1.0, 0.0], [1.0])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_an_interval_holds_its_mean(scores):
    result = interval(scores)
    assert result.low - 1e-9 <= result.mean <= result.high + 1e-9
