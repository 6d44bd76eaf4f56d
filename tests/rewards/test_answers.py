import pytest

from memjax.rewards.answers import after_thinking, extract_answer, extract_answer_is, extract_boxed, extract_tag


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"So \boxed{Paris}.", "Paris"),
        (r"\boxed{a} or rather \boxed{b}", "b"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\text{New \textbf{York}} City}", "New York City"),
        (r"\boxed {Paris}", "Paris"),
        (r"\\boxed{Paris}", "Paris"),
        (r"\boxed{50\% of \{x\}}", "50% of {x}"),
        (r"\boxed{a \} b}", "a } b"),
        (r"\boxed{a} then \boxed{cut of", "a"),
        (r"\boxed{a} } \boxed{b}", "b"),
        ("\\boxed{two\nlines}", "two\nlines"),
        (r"\boxed{}", ""),
        (r"\boxed{cut of", None),
        (r"boxed{a}", None),
        ("", None),
    ],
)
def test_the_last_closed_box_is_the_answer(text, answer):
    assert extract_boxed(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>a</answer> <answer> b </answer>", "b"),
        ("<answer>ended by its stop string", "ended by its stop string"),
        ("no tag", None),
    ],
)
def test_the_last_answer_tag_is_the_answer(text, answer):
    assert extract_tag(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is A. No: the answer is **St. Louis**.", "St. Louis"),
        ("the final ANSWER is: Paris\nI am sure.", "Paris"),
        ('The answer is:\n\n"Paris"', "Paris"),
        ("The answer is", ""),
        ("I do not know.", None),
    ],
)
def test_the_rest_of_the_line_after_the_phrase_is_the_answer(text, answer):
    assert extract_answer_is(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"<think>\boxed{draft}</think>The answer is Paris.", "Paris"),
        (r"<think>\boxed{draft} and on", ""),  # cut while thinking
        (r"The answer is A. \boxed{B}", "B"),
        ("The answer is in <answer>B</answer>", "B"),
        ("  Paris \n", "Paris"),
    ],
)
def test_the_clearest_mark_after_the_thinking_decides(text, answer):
    assert extract_answer(text) == answer


def test_text_without_thinking_stays():
    assert after_thinking("<think>a</think>b</think> c") == " c"
    assert after_thinking("<think>never closed") == "<think>never closed"


@pytest.mark.parametrize("unit", [r"\boxed{", r"\boxed{\text{", "{", "\\", "the answer is ", "<answer>", r"\boxed    "])
def test_a_long_hostile_reply_is_read_in_linear_time(unit):
    # Quadratic reading of this length would take minutes, and the test run would be seen to hang here.
    extract_answer(unit * (1_000_000 // len(unit)))
    extract_answer("\\boxed{" + "\\text{" * 100_000 + "}" * 100_001)
