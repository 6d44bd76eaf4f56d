"""Where a reply ends, and what of its text may be shown before it does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memjax.rollout.reply import GrowingReply

END = 256


class Bytes:
    """Ids 0 to 255 are bytes; 256 ends."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < END else b""


def reply(*, stop=(), max_tokens=1000) -> Reply:
    return GrowingReply(Bytes(), {END}, stop, max_tokens)


def push_all(growing: Reply, ids) -> str:
    shown = ""
    for token_id in ids:
        growing.push(token_id, -0.5)
        shown += growing.take_text()
        if growing.finish_reason:
            break
    return shown


@pytest.mark.parametrize(
    ("stop", "ids", "text", "taken", "reason"),
    [
        ((), [*b"abc", END], "abc", 4, "stop"),
        ((), [END], "", 1, "stop"),
        (("\n\n",), [*b"ab\n\ncd", END], "ab", 4, "stop"),
        (("cd", "bc"), [*b"abcd", END], "a", 3, "stop"),
        (("é",), [*"caé!".encode(), END], "ca", 4, "stop"),
        (("aab",), [*b"aaab", END], "a", 4, "stop"),
        (("xyz",), [*b"abxy", END], "abxy", 5, "stop"),
    ],
)
def test_a_reply_ends_at_an_end_id_or_before_a_stop_string(stop, ids, text, taken, reason):
    growing = reply(stop=stop)
    assert push_all(growing, ids) == text == growing.text
    assert growing.token_ids == ids[:taken]
    assert len(growing.logprobs) == taken
    assert growing.finish_reason == reason


def test_the_last_token_allowed_gives_length_unless_it_stops():
    growing = reply(max_tokens=3, stop=("c!",))
    assert push_all(growing, b"abcd") == "abc"
    assert growing.finish_reason == "length"
    growing = reply(max_tokens=3)
    push_all(growing, [*b"ab", END])
    assert growing.finish_reason == "stop"


def test_half_a_character_is_shown_only_at_the_end():
    growing = reply(max_tokens=4)
    assert [push_all(growing, [byte]) for byte in [*"é".encode(), *"é".encode()[:1], *b"!"]] == ["", "é", "", "\ufffd!"]


@given(st.text("abé", max_size=30), st.lists(st.text("abé", min_size=1, max_size=4), max_size=3))
def test_what_is_shown_adds_up_to_the_text_before_the_first_stop(text, stops):
    growing = reply(stop=tuple(stops))
    shown = push_all(growing, [*text.encode(), END])
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if ends:
        first = min(ends)
        assert growing.text == min((text[: first - len(s)] for s in stops if text[:first].endswith(s)), key=len)
    else:
        assert growing.text == text
    assert shown == growing.text
