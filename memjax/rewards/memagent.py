r"""MemAgent's training verifier and test metric, with their faults, so that published numbers can be reproduced.

Source: BytedTsinghua-SIA/MemAgent, verl/utils/reward_score/hotpotqa.py and taskutils/memory_eval/utils. The faults are
kept on purpose and each is named where it happens; `memjax.rewards.answers` and `memjax.rewards.qa` are without them.
"""

from __future__ import annotations

from collections.abc import Sequence

from memjax.rewards.qa import squad_form

_TAIL = 300  # characters of a response that the verifier reads
_DELETED = (r"\left", r"\right", r"^{\circ}", r"^\circ", r"\$", r"\%")
_DEEPSEEK_TOKENS = ("<｜Assistant｜>", "<｜end▁of▁sentence｜>")


def verify(response: str, golds: Sequence[str]) -> float:
    r"""The training reward: 1 where the last box of the raw response equals a gold answer.

    Equality is of LaTeX strings without spaces: articles, commas, full stops and `\text{}` make a difference.
    """
    try:
        answer = extract_boxed(response[-_TAIL:].lower())
    except ValueError:
        return 0.0
    return float(answer is not None and _latex_form(answer) in {_latex_form(gold.lower()) for gold in golds})


def sub_em(prediction: str, gold: str) -> float:
    """The test metric: 1 where the normal form of either contains the other, as characters.

    So "1" is right for "1984", and a prediction without any word ("", "The", ".") for everything. Their scripts do not
    score a response without an answer but count it as 0: call this with what `extract_answer` found, not with "".
    """
    predicted, wanted = squad_form(prediction), squad_form(gold)
    return float(predicted in wanted or wanted in predicted)


def extract_answer(response: str) -> str | None:
    """The answer as the test scripts read it: what follows the last "the answer is" after the thinking.

    None, which counts as wrong, without that very phrase: "The answer is" is not found.
    """
    text = response.rpartition("</think>")[2] or response
    _, found, answer = text.replace("*", "").rpartition("the answer is")
    if not found:
        return None
    answer = answer.strip()
    for token in _DEEPSEEK_TOKENS:
        answer = answer.replace(token, "")
    return answer.strip().strip(".")


def extract_boxed(text: str) -> str | None:
    r"""The content of the last box as the verifier and the boxed test scripts read it, or None.

    One `\boxed ` with a space anywhere decides alone, its answer runs to the next `$`, and braces stay in it. An
    `\fbox` and a command that only starts with `\boxed` are ValueErrors: there upstream fails an assertion.
    """
    if "\\boxed " in text:
        return text.rpartition("\\boxed ")[2].partition("$")[0]
    start = text.rfind("\\boxed")
    if start < 0:
        start = text.rfind("\\fbox")
    end = _closing_brace(text, start) if start >= 0 else None
    if end is None:
        return None
    box = text[start : end + 1]
    if not box.startswith("\\boxed{"):
        raise ValueError(f"{box[:40]!r} is no box that MemAgent reads")
    return box[len("\\boxed{") : -1]


def _closing_brace(text: str, start: int) -> int | None:
    """Index of the brace at which as many are closed as were opened from `start` on; escaped braces count too."""
    depth = 0
    for i in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0 and text[i] == "}":
            return i
    return None


def _latex_form(text: str) -> str:
    """The form in which the verifier compares; the order of the replacements matters."""
    text = text.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac")
    for command in _DELETED:
        text = text.replace(command, "")
    return text.replace(" .", " 0.").replace("{.", "{0.").replace(" ", "")
