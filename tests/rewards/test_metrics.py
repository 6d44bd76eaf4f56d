import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memjax.rewards import METRICS, hotpotqa, memagent, score

# metric, prediction, gold answers, value worked out by hand
TABLE = [
    ("em", "The Eiffel Tower.", ["eiffel tower"], 1.0),
    ("em", "Paris", ["London", "Paris"], 1.0),
    ("em", "The", ["A"], 0.0),  # neither has a word, but they are not the same answer
    ("em", "?", ["?"], 1.0),
    ("f1", "the red fox", ["red fox jumps"], 0.8),  # 2 of 2 and 2 of 3 words
    ("f1", "cat cat", ["cat"], 2 / 3),  # a word counts as often as it stands in both
    ("f1", "yes it is", ["yes"], 0.5),
    ("hotpot_f1", "yes it is", ["yes"], 0.0),
    ("hotpot_f1", "no", ["yes", "no"], 1.0),
    ("sub_em", "It was Paris, in France", ["Paris"], 1.0),
    ("sub_em", "Paris", ["Paris, France"], 0.0),  # one way only
    ("sub_em", "1984", ["1"], 0.0),
    ("sub_em", "1", ["1984"], 0.0),
    ("sub_em", "Norway", ["no"], 0.0),
    ("sub_em", "The", ["Paris"], 0.0),
    ("sub_em", "New big York", ["New York"], 0.0),
    ("sub_em", "It has 1000 doors", ["1,000"], 1.0),
    ("sub_em", "Paris\u2014the capital", ["Paris"], 1.0),
    ("sub_em", "答案是北京。", ["北京"], 1.0),
    ("memagent_sub_em", "1", ["1984"], 1.0),
    ("memagent_sub_em", "The", ["Paris"], 1.0),
    ("memagent_sub_em", "no", ["Norway"], 1.0),
    ("ruler_all", "It says 12 and 34", ["12", "34", "56", "78"], 0.5),
    ("ruler_part", "It says 12 and 34", ["56", "34"], 1.0),
    ("ruler_part", "FRANCE", ["france"], 1.0),
    ("recall", "red and blue", ["red", "blue", "green", "Green"], 2 / 3),  # an answer given twice is one answer
    ("recall", "1984", ["1", "1984"], 0.5),
    ("number", "So she pays $1,034.00.", ["1034"], 1.0),
    ("number", "12 + 3 = 15", ["15"], 1.0),
    ("number", "15 = 12 + 3", ["15"], 0.0),  # the last one counts
    ("number", "-3", ["3"], 0.0),
    ("number", "it is -3", ["-3"], 1.0),
    ("number", "5-3", ["3"], 1.0),
    ("number", "0.50", [".5"], 1.0),
    ("number", "many", ["3"], 0.0),
    ("number", "A lot", ["a lot"], 1.0),
    ("number", "²", ["2"], 0.0),
]


@pytest.mark.parametrize(("metric", "prediction", "golds", "value"), TABLE)
def test_values_worked_out_by_hand(metric, prediction, golds, value):
    assert score(metric, prediction, golds) == pytest.approx(value)


# response, gold answers, the training verifier's reward as checked upstream
VERIFIER = [
    (r"\boxed{New York City}.", ["New York City"], 1.0),
    (r"\boxed{NEW  york city}", ["New York City"], 1.0),  # case and spaces do not count
    (r"\boxed{Paris}", ["London", "Paris"], 1.0),
    (r"\boxed{the cat}", ["cat"], 0.0),
    (r"\boxed {Paris}", ["Paris"], 0.0),
    (r"\boxed{\text{Paris}}", ["Paris"], 0.0),
    (r"\boxed{{Paris}}", ["Paris"], 0.0),
    (r"\boxed{1,000}", ["1000"], 0.0),
    (r"\boxed{St. Louis}", ["St Louis"], 0.0),
    (r"\boxed{}", [""], 1.0),
    (r"\boxed{a} and \boxed{b}", ["a"], 0.0),  # the last box
    (r"\boxed{Paris", ["Paris"], 0.0),
    (r"\fbox{Paris}", ["Paris"], 0.0),
    (r"\boxedly{Paris}", ["Paris"], 0.0),
    (r"\boxed x. Then \boxed{Paris}", ["Paris"], 0.0),  # a box with a space decides alone
    (r"\boxed Paris$ is it", ["Paris"], 1.0),
    (r"\boxed{50\%}", ["50"], 1.0),
    (r"\boxed{\dfrac{1}{2}}", [r"\frac{1}{2}"], 1.0),
    (r"\boxed{Paris}" + "." * 287, ["Paris"], 1.0),  # starts 300 characters before the end
    (r"\boxed{Paris}" + "." * 288, ["Paris"], 0.0),
    ("Paris", ["Paris"], 0.0),
]


@pytest.mark.parametrize(("response", "golds", "value"), VERIFIER)
def test_the_training_verifier_is_upstreams_with_its_faults(response, golds, value):
    assert score("memagent_reward", response, golds) == value


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("so **the answer is Paris.**", "Paris"),
        ("the answer is A, no, the answer is B.", "B"),
        ("The answer is Paris.", None),
        ("<think>the answer is A</think>the answer is B<｜end▁of▁sentence｜>", "B"),
        ("<think>the answer is A</think>", "A</think>"),  # nothing follows the thinking: all is read
    ],
)
def test_the_test_scripts_extraction_is_upstreams(response, answer):
    assert memagent.extract_answer(response) == answer


@settings(deadline=None)  # another process may hold the processor
@given(st.text(min_size=1).filter(str.strip), st.sampled_from(sorted(METRICS)))
def test_the_gold_answer_scores_one(gold, metric):
    if metric == "memagent_reward":
        if any(sign in gold for sign in "{}\\") or len(gold) > 200:
            return
        assert score(metric, f"\\boxed{{{gold}}}", [gold]) == 1.0
    else:
        assert score(metric, gold, [gold]) == 1.0


@settings(deadline=None)
@given(st.text(min_size=1).filter(str.strip), st.sampled_from(sorted(set(METRICS) - {"memagent_sub_em"})))
def test_an_empty_answer_scores_nothing(gold, metric):
    assert score(metric, "", [gold]) == 0.0


@settings(deadline=None)
@given(st.text(), st.lists(st.text(min_size=1), min_size=1, max_size=3), st.sampled_from(sorted(METRICS)))
def test_scores_lie_between_zero_and_one(prediction, golds, metric):
    assert 0.0 <= score(metric, prediction, golds) <= 1.0


@pytest.mark.parametrize("metric", ["em", "f1", "hotpot_f1", "sub_em", "memagent_sub_em", "ruler_part", "longbench_f1"])
def test_any_of_the_gold_answers_is_right(metric):
    for gold in ("Paris", "City of Light", "yes"):
        assert score(metric, gold, ["Paris", "City of Light", "yes"]) == 1.0


def test_an_unknown_metric_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match=r"no metric 'subem'; did you mean 'sub_em'\?"):
        score("subem", "a", ["a"])


@pytest.mark.parametrize("answers", ["Paris", [], ()])
def test_gold_answers_that_are_no_list_of_strings_are_refused(answers):
    with pytest.raises(ValueError, match="answers"):
        score("em", "Paris", answers)


def test_missing_predictions_score_zero_in_their_part_and_jointly():
    gold = [{"_id": i, "answer": "yes", "supporting_facts": [["A", 0], ["B", 1]]} for i in ("1", "2")]
    ours = hotpotqa.official_metrics({"1": "yes", "2": "yes"}, {"1": [["A", 0], ["C", 1]]}, gold)
    assert ours["em"] == 1.0
    assert ours["sp_prec"] == ours["sp_recall"] == ours["sp_f1"] == 0.25
    assert ours["joint_prec"] == ours["joint_recall"] == ours["joint_f1"] == 0.25
    assert ours["sp_em"] == ours["joint_em"] == 0.0
