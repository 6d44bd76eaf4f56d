import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memjax.eval.scoring import extract_like_memagent, extract_strictly, score_answer
from memjax.rewards.answers import extract_answer
from memjax.rewards.pool import RewardPool
from memjax.rewards.transcript import Transcript


@pytest.mark.parametrize(
    ("response", "answer", "how"),
    [
        (r"<think>\boxed{no}</think>So \boxed{Paris}.", "Paris", "box"),
        ("<answer>Paris</answer>", "Paris", "tag"),
        ("I looked. The answer is **Paris**.", "Paris", "answer is"),
        (" Paris \n", "Paris", "whole reply"),
    ],
)
def test_the_way_an_answer_was_found_is_recorded(response, answer, how):
    found = extract_strictly(response)
    assert (found.answer, found.how) == (answer, how)


@given(st.lists(st.sampled_from([r"\boxed{", "}", "<answer>", "</answer>", "answer is", "</think>", "x ", "\n"])))
def test_the_strict_extraction_is_the_rewards_own(pieces):
    response = "".join(pieces)
    assert extract_strictly(response).answer == extract_answer(response)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{Paris}", "Paris"),
        ("Therefore, the answer is Paris.", "Paris"),
        ("The answer is Paris.", ""),  # upstream's phrase is case-sensitive
        ("Paris", ""),
        (r"\fbox{Paris}", ""),
    ],
)
def test_memagents_extraction_keeps_its_rules(response, answer):
    assert extract_like_memagent(response).answer == answer


def test_no_answer_is_worth_nothing_by_any_metric():
    with RewardPool(workers=1) as pool:
        nothing = asyncio.run(score_answer(pool, Transcript("?", ("Paris",), "", "no idea")))
        found = asyncio.run(score_answer(pool, Transcript("?", ("Paris",), "Paris", r"\boxed{Paris}")))
    assert set(nothing.values.values()) == {0.0}  # upstream's symmetric sub_em would give 1
    assert set(found.values.values()) == {1.0}
