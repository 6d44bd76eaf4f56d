"""Kind 6: the server is neither stricter nor looser than the interface it speaks. Cases come from its own schemas."""

from __future__ import annotations

import json

import httpx
import pytest

from memjax.serve.replies import _OFF
from memjax.serve.schemas import (
    AppendRequest,
    Body,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    MemoryRequest,
    TokenizeRequest,
)

HALF = "a \ud83d b"
MESSAGES = [{"role": "user", "content": "Hello"}]
DRAWN = {"model": "tiny", "max_tokens": 2, "temperature": 0}
BODIES: dict[type[Body], tuple[str, dict]] = {
    ChatRequest: ("/v1/chat/completions", DRAWN | {"messages": MESSAGES}),
    CompletionRequest: ("/v1/completions", DRAWN | {"prompt": "Hello"}),
    GenerateRequest: ("/generate", {"token_ids": [1, 2, 3], "max_tokens": 2, "temperature": 0}),
    TokenizeRequest: ("/tokenize", {"text": "Hello"}),
    MemoryRequest: ("/v1/memory/answers", {"text": "The gardener kept the key.", "question": "Who?"}),
}
GENERATING = [ChatRequest, CompletionRequest, GenerateRequest]


def optional(kind: type[Body]) -> list[str]:
    return [name for name, field in kind.model_fields.items() if not field.is_required()]


@pytest.mark.parametrize("kind", [*BODIES, AppendRequest], ids=lambda kind: kind.__name__)
def test_null_for_an_optional_field_is_the_field_left_out(kind):
    given = BODIES[kind][1] if kind in BODIES else {}
    without = {name: value for name, value in given.items() if name not in optional(kind)}
    nulls = without | dict.fromkeys(optional(kind))
    assert kind.model_validate(nulls) == kind.model_validate(without)
    assert kind.model_validate(nulls).model_fields_set == set(without)


@pytest.mark.parametrize("kind", GENERATING, ids=lambda kind: kind.__name__)
def test_a_request_full_of_nulls_is_answered(server, kind):
    path, body = BODIES[kind]
    nulls = {name: None for name in optional(kind) if name not in body} | {"store": None, "response_format": None}
    response = server.post(path, body | nulls)
    assert response.status_code == 200, response.text
    assert response.json()["ignored_fields"] == []


def broken(value):
    """Every way to put half a surrogate pair where a text stands."""
    if isinstance(value, str):
        yield HALF
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from (value | {key: changed} for changed in broken(inner))
        yield value | {HALF: HALF}
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from ([*value[:i], changed, *value[i + 1 :]] for changed in broken(inner))


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_half_a_surrogate_pair_anywhere_is_no_error_of_the_server(server, kind):
    path, body = BODIES[kind]
    texts = {name: "a" for name in optional(kind) if name not in body and name not in ("file_id", "model", "stream")}
    for sent in broken(body | {"stop": "zz"} if kind in GENERATING else body | texts):
        content = json.dumps(sent)
        headers = {"Content-Type": "application/json"}
        response = httpx.post(server.url + path, content=content, headers=headers, timeout=60)
        assert response.status_code in (200, 400, 404), (content, response.text)
        assert "\ud83d" not in response.text


def test_half_a_surrogate_pair_is_read_as_the_replacement_character(server):
    replaced = server.post("/tokenize", {"text": "a \ufffd b"}).json()
    response = httpx.post(
        f"{server.url}/tokenize", content=json.dumps({"text": HALF}), headers={"Content-Type": "application/json"}
    )
    assert response.json() == replaced


CHANGED = {
    "response_format": {"type": "json_object"},
    "suffix": "x",
    "logit_bias": {"5": 100},
    "presence_penalty": 0.5,
    "frequency_penalty": -1,
    "best_of": 3,
    "modalities": ["text", "audio"],
    "audio": {"voice": "alloy", "format": "wav"},
    "guided_json": {"type": "object"},
    "min_tokens": 2,
    "repetition_penalty": 1.2,
    "prompt_logprobs": 1,
}


@pytest.mark.parametrize("kind", GENERATING, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", CHANGED)
def test_what_changes_the_meaning_of_a_reply_is_refused(server, kind, name):
    path, body = BODIES[kind]
    response = server.post(path, body | {name: CHANGED[name]})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], name in error["message"]) == (name, True)


@pytest.mark.parametrize("kind", GENERATING, ids=lambda kind: kind.__name__)
def test_what_asks_for_nothing_is_let_pass(server, kind):
    path, body = BODIES[kind]
    neutral = {name: values[0] for name, values in _OFF.items() if values} | {"best_of": 1}
    assert server.post(path, body | neutral).status_code == 200


@pytest.mark.parametrize("kind", GENERATING, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("value", [1, "x", [1], {"a": 1}, True])
def test_no_unknown_field_is_silent(server, kind, value):
    path, body = BODIES[kind]
    names = [f"unheard_of_{i}" for i in range(3)] + ["user", "store", "metadata", "service_tier", "verbosity"]
    response = server.post(path, body | dict.fromkeys(names, value))
    assert response.status_code == 200
    assert response.json()["ignored_fields"] == sorted(names)


def test_a_field_inside_a_message_is_not_silent_either(server):
    part = {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "content": [part], "name": "Ann"}]
    response = server.post("/v1/chat/completions", DRAWN | {"messages": messages})
    assert response.json()["ignored_fields"] == ["messages.content.cache_control", "messages.name"]
