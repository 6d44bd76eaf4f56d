"""Tool calls in the text of a reply: read as models write them, checked against the tools, and written."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memjax.rollout.client import ToolCall

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
_STRING = r'"(?:[^"\\]|\\.)*"?|' r"'(?:[^'\\]|\\.)*'?"  # one that is not closed ends with the text: no second try
_BRACKETS = re.compile(rf"{_STRING}|[{{}}\[\]]", re.DOTALL)
_JSON_WORDS = {"true": "True", "false": "False", "null": "None"}
_TOKENS = re.compile(rf"{_STRING}|\b(?:{'|'.join(_JSON_WORDS)})\b", re.DOTALL)
_ESCAPES = re.compile(r"\\(.)|\n|\r", re.DOTALL)
_FENCE = re.compile(r"\s*(?:```\w*\s*)?")
_NESTED_MOST = 50  # brackets in brackets
_CALLS_MOST = 128  # marks in a reply: each may be read up to its end
_UNREADABLE = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError, OverflowError)
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "number": (int, float),
    "integer": (int, float),
    "boolean": bool,
    "array": list,
    "object": Mapping,
    "null": type(None),
}


@dataclass(frozen=True)
class ParsedReply:
    """What a reply says before its first call, its calls, and a sentence for each call that cannot be read."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()


def parse_tool_calls(text: str, prefix: str = "call") -> ParsedReply:
    """The tool calls of a reply; those of any text can be asked for. Ids are PREFIX_1, PREFIX_2, ...

    A call is a JSON object with name and arguments (or parameters) after <tool_call>, closed or not, or the whole
    reply. It may stand in a fence, in Python's notation, or have its arguments as a JSON text.
    """
    found: list[ToolCall] = []
    problems: list[str] = []
    values, before = _marked(text) if CALL_BEGIN in text else _whole(text)
    for value in values:
        for one in value if isinstance(value, list) else [value]:
            try:
                name, arguments = _name_and_arguments(one)
                found.append(ToolCall(f"{prefix}_{len(found) + 1}", name, arguments))
            except _UNREADABLE:
                shown = one if isinstance(one, str) else repr(one)
                problems.append(
                    f"This tool call cannot be read: {_short(shown)} Write one JSON object with the tool's name and "
                    f'its arguments as an object: {{"name": ..., "arguments": {{...}}}}.'
                )
    return ParsedReply(before.strip(), tuple(found), tuple(problems))


def problem_with(call: ToolCall, tools: Iterable[Mapping[str, Any]]) -> str | None:
    """A sentence for the model where a call names none of the tools or has wrong arguments."""
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    if call.name not in functions:
        return f"There is no tool {_short(call.name)!r}: call {' or '.join(functions)}."
    schema = functions[call.name].get("parameters") or {}
    known: Mapping[str, Any] = schema.get("properties") or {}
    arguments = json.loads(call.json) if isinstance(call.arguments, str) else call.arguments
    for name in schema.get("required", ()):
        if name not in arguments:
            return f"{call.name} needs the argument {name!r}{_of_type(known.get(name, {}))}."
    for name, value in arguments.items():
        if name not in known and not schema.get("additionalProperties"):
            return f"{call.name} has no argument {_short(name)!r}; it takes {', '.join(known) or 'none'}."
        kind = known.get(name, {})
        if not _fits(value, kind.get("type")):
            return f"The argument {name!r} of {call.name} must be{_of_type(kind)}, not {_short(json.dumps(value))}."
        if "enum" in kind and value not in kind["enum"]:
            return f"The argument {name!r} of {call.name} must be one of {kind['enum']}, not {_short(repr(value))}."
    return None


def write_tool_calls(text: str, calls: Sequence[ToolCall]) -> str:
    """The text of a reply that says `text` and makes these calls, as `parse_tool_calls` reads it."""
    written = [
        f'{CALL_BEGIN}\n{{"name": {_quoted(call.name)}, "arguments": {_valid(call)}}}\n{CALL_END}' for call in calls
    ]
    return "\n".join([text, *written] if text else written)


def _marked(text: str) -> tuple[Iterator[Any], str]:
    """What stands after each mark, a value or the text of one that cannot be read; and what stands before the first."""

    def values() -> Iterator[Any]:
        at = text.find(CALL_BEGIN)
        for _ in range(_CALLS_MOST):
            if at < 0:
                return
            start = at + len(CALL_BEGIN)
            try:
                value, end = _value_at(text, start)
                yield value
            except _UNREADABLE:
                end = start
                yield text[start:].partition(CALL_BEGIN)[0].partition(CALL_END)[0].strip()
            at = text.find(CALL_BEGIN, end)
        if at >= 0:
            yield f"{text[at : at + 40]} (after {_CALLS_MOST} others)"

    return values(), text[: text.index(CALL_BEGIN)]


def _whole(text: str) -> tuple[Iterable[Any], str]:
    """The reply as one call or a list of them, and nothing before it; else no call, and all of its text."""
    start = _after_fence(text, 0)
    try:
        value, end = _value_at(text, start)
    except _UNREADABLE:
        begun = re.match(r"""[\[\s]*\{\s*["']name["']\s*:""", text[start:]) and re.search("arguments|parameters", text)
        return ([text], "") if begun else ((), text)
    listed = value if isinstance(value, list) else [value]
    is_call = listed and all(isinstance(one, dict) and "name" in one and one.keys() & _ARGUMENTS for one in listed)
    return ([value], "") if is_call and not text[end:].strip("` \r\n\t") else ((), text)


_ARGUMENTS = {"arguments", "parameters"}


def _value_at(text: str, start: int) -> tuple[Any, int]:
    """The object or list that begins at `start`, behind space and a fence, and where it ends."""
    start = _after_fence(text, start)
    if text[start : start + 1] not in ("{", "["):
        raise ValueError("no object")
    try:
        return json.JSONDecoder(strict=False).raw_decode(text, start)
    except ValueError:
        end = _end_of(text, start)
        return ast.literal_eval(_TOKENS.sub(_in_python, text[start:end])), end


def _after_fence(text: str, start: int) -> int:
    found = _FENCE.match(text, start)
    return found.end() if found else start


def _end_of(text: str, start: int) -> int:
    depth = 0
    for token in _BRACKETS.finditer(text, start):
        depth += (token[0] in "{[") - (token[0] in "}]")
        if depth == 0:
            return token.end()
        if depth > _NESTED_MOST:
            break
    raise ValueError("no end")


def _in_python(token: re.Match[str]) -> str:
    """A string or a word of JSON in Python's notation; a backslash that escapes nothing stands for itself."""
    if token[0] in _JSON_WORDS:
        return _JSON_WORDS[token[0]]

    def escaped(found: re.Match[str]) -> str:
        if found[1] is None:
            return {"\n": "\\n", "\r": "\\r"}[found[0]]
        if found[1] in "\"'\\bfnrtu":
            return found[0]
        return found[1] if found[1] == "/" else f"\\\\{found[1]}"

    return _ESCAPES.sub(escaped, token[0])


def _name_and_arguments(value: Any) -> tuple[str, str]:
    """The name and the arguments, as JSON text, of a value that is a call."""
    inner = value.get("function") if isinstance(value, Mapping) else None
    call = inner if isinstance(inner, Mapping) else value
    if not isinstance(call, Mapping):
        raise ValueError("no object")
    name = call.get("name", inner)
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        arguments = _value_at(arguments, 0)[0] if arguments.strip() else {}
    if not isinstance(name, str) or not name or not isinstance(arguments, dict | None):
        raise ValueError("no call")
    text = json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
    return _encodable(name), _encodable(text)


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()  # JSON may escape half of a surrogate pair


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(kind, list):
        return any(_fits(value, one) for one in kind)
    if kind not in _TYPES:
        return True
    if isinstance(value, bool) and kind in ("number", "integer"):
        return False
    return isinstance(value, _TYPES[kind]) and (kind != "integer" or not isinstance(value, float) or value.is_integer())


def _of_type(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type")
    return "" if kind is None else f" of type {' or '.join(kind) if isinstance(kind, list) else kind}"


def _valid(call: ToolCall) -> str:
    try:
        return json.dumps(json.loads(call.json), ensure_ascii=False)
    except _UNREADABLE:
        return _quoted(call.json)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
