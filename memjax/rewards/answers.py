"""The short answer inside a model's reply.

Every function is linear in the length of the reply: what a model writes must not be able to stall whoever reads it.
"""

from __future__ import annotations

import re

# An escaped brace is text. Two backslashes before "boxed" come from models that write JSON. The repeats are bounded
# because an unbounded one would be tried from each of its positions.
_BOX_TOKENS = re.compile(r"(?P<box>\\{1,2}boxed\s{0,8}\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)
_TEXT_TOKENS = re.compile(
    r"(?P<text>\\text(?:bf|it|rm)?\s{0,8}\{)|\\(?P<sign>[{}$%&#_])|\\.|(?P<open>\{)|(?P<close>\})"
)
_THINKING = re.compile(r"^[ \t]{0,8}<think>", re.MULTILINE)
_ANSWER_IS = re.compile(r"\banswer\s{1,8}is\b[\s:*]{0,8}", re.IGNORECASE)


def extract_answer(text: str) -> str:
    """The answer in a reply: its last box, else its last answer tag, else what follows "answer is", else all of it.

    Only the text after the model's thinking is looked at.
    """
    text = without_thinking(text)
    for extract in (extract_boxed, extract_tag, extract_answer_is):
        answer = extract(text)
        if answer is not None:
            return answer
    return text.strip()


def after_thinking(text: str) -> str:
    """What follows the last `</think>`; the whole text where there is none."""
    return text.rpartition("</think>")[2]


def without_thinking(text: str) -> str:
    """What a reply says to others: what follows the last `</think>`, up to thinking that was begun and never ended."""
    said = after_thinking(text)
    begun = _THINKING.search(said)
    return said if begun is None else said[: begun.start()]


def extract_boxed(text: str) -> str | None:
    r"""The content of the last closed `\boxed{...}`, without its `\text{}` wrappers; None where there is none.

    An unclosed box, as a reply cut off at its token limit leaves it, is passed over for the one before it.
    """
    open_braces: list[int | None] = []  # where a box's content starts; None for any other brace
    last: tuple[int, int] | None = None
    for token in _BOX_TOKENS.finditer(text):
        if token["box"]:
            open_braces.append(token.end())
        elif token["open"]:
            open_braces.append(None)
        elif token["close"] and open_braces:
            start = open_braces.pop()
            if start is not None and (last is None or start > last[0]):
                last = start, token.start()
    return None if last is None else _without_text_commands(text[slice(*last)]).strip()


def extract_tag(text: str, tag: str = "answer") -> str | None:
    """The content of the last `<answer>...</answer>`, or None.

    A missing end tag is no fault: it is often the stop string that ended the reply.
    """
    _, found, rest = text.rpartition(f"<{tag}>")
    return rest.partition(f"</{tag}>")[0].strip() if found else None


def extract_answer_is(text: str) -> str | None:
    """The rest of the line after the last "answer is", without emphasis, quotes and full stop; None without the phrase.

    The answer may stand on the next line.
    """
    matches = list(_ANSWER_IS.finditer(text))
    if not matches:
        return None
    line = text[matches[-1].end() :].lstrip().partition("\n")[0]
    return line.replace("*", "").strip().removesuffix(".").strip().strip("\"'`“”‘’")


def _without_text_commands(content: str) -> str:
    r"""Replace each `\text{...}` in balanced LaTeX by what it holds, and each escaped sign by the sign."""
    pieces: list[str] = []
    keeps_brace: list[bool] = []
    end = 0
    for token in _TEXT_TOKENS.finditer(content):
        pieces.append(content[end : token.start()])
        end = token.end()
        if token["text"]:
            keeps_brace.append(False)
        elif token["sign"]:
            pieces.append(token["sign"])
        elif token["close"]:
            if keeps_brace.pop():
                pieces.append("}")
        else:
            if token["open"]:
                keeps_brace.append(True)
            pieces.append(token[0])
    return "".join([*pieces, content[end:]])
