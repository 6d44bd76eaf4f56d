"""Tool calls as models write them."""

import json
import warnings

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memjax.rollout.client import ToolCall
from memjax.rollout.tool_calls import ParsedReply, parse_tool_calls, problem_with, write_tool_calls

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "most": {"type": "integer"},
                    "share": {"type": "number"},
                    "kind": {"enum": ["a", "b"]},
                    "tags": {"type": ["array", "null"]},
                    "exact": {"type": "boolean"},
                },
                "required": ["query"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]

F, G = '{"name": "f", "arguments": {}}', '{"name": "g", "arguments": {}}'


@pytest.mark.parametrize(
    ("text", "before", "calls"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", {"a": 1})]),
        ('I look.\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\nDone.', "I look.", [("f", {})]),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}', "", [("f", {"a": 1})]),  # not closed
        (
            f"<tool_call>{F}</tool_call><tool_call>{G}</tool_call>",
            "",
            [("f", {}), ("g", {})],
        ),
        (f"<tool_call>{F}\n<tool_call>{G}", "", [("f", {}), ("g", {})]),
        ('<tool_call>\n```json\n{"name": "f", "arguments": {}}\n```\n</tool_call>', "", [("f", {})]),
        ("<tool_call>{'name': 'f', 'arguments': {'a': 'x', 'b': None, 'c': true,},}</tool_call>", "",
         [("f", {"a": "x", "b": None, "c": True})]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": [1]}"}</tool_call>', "", [("f", {"a": [1]})]),
        ('<tool_call>{"name": "f", "arguments": ""}</tool_call>', "", [("f", {})]),
        ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', "", [("f", {"a": 1})]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
        ('<tool_call>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]</tool_call>', "",
         [("f", {}), ("g", {})]),
        ('<tool_call>{"type": "function", "function": {"name": "f", "arguments": {}}}</tool_call>', "", [("f", {})]),
        ('<tool_call>{"function": "f", "arguments": {}}</tool_call>', "", [("f", {})]),
        ('{"name": "f", "arguments": {"a": "}{</tool_call>"}}', "", [("f", {"a": "}{</tool_call>"})]),
        ('<tool_call>{"name": "f", "arguments": {"a": "<tool_call>}"}}', "", [("f", {"a": "<tool_call>}"})]),
        ("<tool_call>{'name': 'f', 'arguments': {'a': '}\\' \"{'}}", "", [("f", {"a": "}' \"{"})]),
        ('```json\n{"name": "f", "arguments": {}}\n```', "", [("f", {})]),
        ('<tool_call>{"name": "f", "arguments": {"a": "\\d+ \\/ \\frac"}}</tool_call>', "",
         [("f", {"a": "\\d+ / \frac"})]),
        ('<tool_call>{"name": "f", "arguments": {"a": "two\nlines",}}</tool_call>', "", [("f", {"a": "two\nlines"})]),
        ('The answer is {"name": "f", "arguments": {}}.', 'The answer is {"name": "f", "arguments": {}}.', []),
        ('{"name": "Ada", "age": 3}', '{"name": "Ada", "age": 3}', []),
        ("[1, 2]", "[1, 2]", []),
        ("", "", []),
    ],
)  # fmt: skip
def test_calls_are_read_as_models_write_them(text, before, calls):
    parsed = parse_tool_calls(text, "x")
    assert (parsed.text, parsed.problems) == (before, ())
    assert [(call.name, json.loads(call.json)) for call in parsed.calls] == calls
    assert [call.id for call in parsed.calls] == [f"x_{i + 1}" for i in range(len(calls))]


@pytest.mark.parametrize(
    "half",
    [
        '{"name": "f", "arguments": {"a": ',
        '{"name": "f", "arguments": {"a": "x}}',
        "f(1)",
        "",
        '{"arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "1 + 1"}',
        '{"name": "f", "arguments": {"a": NaN}}',
        "{'name': 'f', 'arguments': {'a': {1, 2}}}",
        "{'name': __import__('os'), 'arguments': {}}",
        "[" * 5000,
    ],
)
def test_half_a_call_is_a_problem_and_the_next_one_is_read(half):
    parsed = parse_tool_calls(
        f'Hm.<tool_call>{half}</tool_call><tool_call>{{"name": "g", "arguments": {{}}}}</tool_call>'
    )
    assert parsed.text == "Hm."
    assert [call.name for call in parsed.calls] == ["g"]
    (problem,) = parsed.problems
    assert half[:70] in problem or "'name': 'f'" in problem or "'arguments'" in problem
    assert "Write one JSON object" in problem


def test_half_a_call_that_is_the_whole_reply_is_a_problem():
    parsed = parse_tool_calls('{"name": "f", "arguments": {"a": ')
    assert (parsed.text, parsed.calls, len(parsed.problems)) == ("", (), 1)


@pytest.mark.parametrize(
    "open_string", ['{"a": "' + '\\"' * 500_000, "{'a': '" + "\\'" * 500_000, "{" + '\\"' * 500_000]
)
def test_a_long_open_string_is_a_problem_and_read_once(open_string):
    parsed = parse_tool_calls(f"<tool_call>{open_string}")
    assert (parsed.calls, len(parsed.problems)) == ((), 1)


@pytest.mark.parametrize("begun", ["<tool_call>", '<tool_call>{\\"', "<tool_call>{", "<tool_call>```json\n["])
def test_of_very_many_calls_the_first_are_read_and_the_rest_is_one_problem(begun):
    parsed = parse_tool_calls(begun * 5_000)
    assert (parsed.calls, len(parsed.problems)) == ((), 129)
    assert "(after 128 others)" in parsed.problems[-1]


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("find", {"query": "x", "most": 3, "share": 0.5, "kind": "a", "tags": None, "exact": True}, None),
        ("find", {"query": "x", "most": 3.0, "tags": []}, None),
        ("now", {}, None),
        ("fimd", {}, "There is no tool 'fimd': call find or now."),
        ("find", {}, "find needs the argument 'query' of type string."),
        ("find", {"query": "", "n": 1}, "find has no argument 'n'; it takes query, most, share, kind, tags, exact."),
        ("find", {"query": 3}, "The argument 'query' of find must be of type string, not 3."),
        ("find", {"query": "x", "most": 1.5}, "The argument 'most' of find must be of type integer, not 1.5."),
        ("find", {"query": "x", "most": True}, "The argument 'most' of find must be of type integer, not true."),
        ("find", {"query": "x", "kind": "c"}, "The argument 'kind' of find must be one of ['a', 'b'], not 'c'."),
        ("find", {"query": "x", "tags": "t"}, "The argument 'tags' of find must be of type array or null, not \"t\"."),
        ("now", {"x": 1}, "now has no argument 'x'; it takes none."),
    ],
)  # fmt: skip
def test_a_wrong_call_is_told_in_a_sentence(name, arguments, sentence):
    assert problem_with(ToolCall("1", name, json.dumps(arguments)), TOOLS) == sentence
    assert problem_with(ToolCall("1", name, arguments), TOOLS) == sentence


MARKS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "{", "}", "[", "]", '"', "'", "\\", ":", ",", '"name"', '"arguments"', "```json\n",
     "true", "None", "1e999", "-", "\\u", "\ud800", "0" * 5000, "\n", " ", "lambda: 0", "1j", "b''"]
)  # fmt: skip


@given(st.one_of(st.text(), st.lists(MARKS, max_size=30).map("".join)))
@example("<tool_call>" + "[" * 100_000)
@example("<tool_call>{'a': " + "-" * 100_000 + "1}")
@example('<tool_call>{"name": "\\ud800", "arguments": {"\\ud800": 1}}')
@settings(max_examples=400, deadline=None)
def test_no_text_raises(text):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parsed = parse_tool_calls(text)
    for call in parsed.calls:
        problem_with(call, TOOLS)
        write_tool_calls("", [call]).encode()
    assert parse_tool_calls(write_tool_calls(parsed.text, parsed.calls)).calls == parsed.calls or "<tool_call>" in text


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(
    text=st.text(st.characters(codec="utf-8", exclude_characters="<{["), max_size=20).map(str.strip),
    calls=st.lists(st.tuples(st.text(min_size=1), st.dictionaries(st.text(), VALUES, max_size=3)), max_size=3),
)
@settings(max_examples=200, deadline=None)
def test_what_is_written_is_read_again(text, calls):
    def encodable(value):
        return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace").decode()

    made = tuple(
        ToolCall(f"call_{i + 1}", name.encode("utf-8", "replace").decode(), encodable(arguments))
        for i, (name, arguments) in enumerate(calls)
    )
    assert parse_tool_calls(write_tool_calls(text, made)) == ParsedReply(text, made)


def test_arguments_that_a_service_broke_are_written_so_that_they_are_a_problem():
    parsed = parse_tool_calls(write_tool_calls("", [ToolCall("1", "f", '{"a": ')]))
    assert parsed.calls == ()
    assert len(parsed.problems) == 1
