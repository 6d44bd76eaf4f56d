"""Kind 1: whatever one client sends, another's replies stay what they were, and the engine runs on."""

import asyncio
import json

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.exceptions import HTTPException

from memjax.serve.bodies import JsonShape
from memjax.serve.gate import Gate, Pages
from memjax.serve.metrics import Metrics
from memjax.serve.service import CHARACTERS
from tests.serve.conftest import SLOTS, WINDOW

HONEST = {"token_ids": [5, 6, 7], "max_tokens": 12, "temperature": 1.0, "seed": 3}

NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, -1, 1, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 1e-320, 1e-9, 1e300, 0.5, True, None]),
    st.floats(allow_nan=False, allow_infinity=False),
)
SAMPLING = st.fixed_dictionaries(
    {},
    optional={
        name: NUMBERS
        for name in ("top_k", "top_p", "temperature", "seed", "n", "max_tokens", "shared", "stop", "stream")
    },
)
SIZE = 60_000  # bytes, beyond which more of the same is refused by its shape
BOMBS = {
    "empty messages": ("/v1/chat/completions", '{"model":"tiny","messages":[' + "{}," * SIZE + "{}]}"),
    "strings for ids": ("/generate", '{"max_tokens":1,"token_ids":[' + '"",' * SIZE + "1]}"),
    "floats for ids": ("/v1/completions", '{"model":"tiny","prompt":[' + "1.5," * SIZE + "1.5]}"),
    "unknown fields": ("/generate", '{"token_ids":[1],' + ",".join(f'"{i:x}":1' for i in range(SIZE)) + "}"),
    "wrong questions": ("/v1/memory/answers", '{"text":"a","questions":[' + "1," * SIZE + "1]}"),
    "nested lists": ("/generate", '{"token_ids":' + "[" * SIZE + "]" * SIZE + "}"),
    "a long chat": ("/v1/chat/completions", json.dumps(
        {"model": "tiny", "messages": [{"role": "user", "content": "words " * WINDOW * CHARACTERS}]}
    )),
    "long prompts": ("/v1/completions", json.dumps({"model": "tiny", "prompt": ["w " * WINDOW * CHARACTERS] * 9})),
    "many replies": ("/v1/completions", json.dumps({"model": "tiny", "prompt": ["a"] * 64, "n": 64})),
}  # fmt: skip


@pytest.fixture(scope="module")
def honest(server):
    reply = server.post("/generate", HONEST).json()["samples"][0]
    return reply["token_ids"]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=SAMPLING)
def test_no_sampling_of_one_client_touches_the_reply_of_another(server, honest, fields):
    counters = server.parts.service.client.counters
    failed = counters.failed
    with httpx.stream("POST", f"{server.url}/generate", json=HONEST | {"stream": True}, timeout=60) as beside:
        hostile = server.post("/generate", {"token_ids": [1, 2], "max_tokens": 4} | fields)
        assert hostile.status_code in (200, 400, 429), hostile.text
        events = [json.loads(line[6:]) for line in beside.iter_lines() if line.startswith("data: {")]
    assert [event["token_id"] for event in events if "token_id" in event] == honest
    assert counters.failed == failed
    assert server.get("/health").status_code == 200
    server.wait_idle()


@pytest.mark.parametrize("name", BOMBS)
def test_a_body_made_to_take_long_is_refused_by_its_shape(server, honest, name):
    path, body = BOMBS[name]
    response = httpx.post(server.url + path, content=body, headers={"Content-Type": "application/json"}, timeout=60)
    assert response.status_code in (400, 413), response.text
    assert len(response.content) < 1000
    assert server.post("/generate", HONEST).json()["samples"][0]["token_ids"] == honest
    server.wait_idle()
    assert server.slots_used() == 0


JSON = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(alphabet='ab\\"[]{},:\ud83d é'), st.booleans()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='a",:\\'), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None)
@given(value=JSON, cuts=st.lists(st.integers(1, 9), min_size=1))
def test_the_shape_of_a_body_is_counted_wherever_its_pieces_end(value, cuts):
    body, shape, start = json.dumps(value).encode(), JsonShape(), 0
    while start < len(body):
        step = cuts[start % len(cuts)]
        shape.add(body[start : start + step])
        start += step
    assert shape.values == _values(value)


def _values(value) -> int:
    """Opening brackets, commas and colons of the JSON text of a value."""
    if isinstance(value, list):
        return 1 + max(0, len(value) - 1) + sum(map(_values, value))
    if isinstance(value, dict):
        return 1 + len(value) + max(0, len(value) - 1) + sum(map(_values, value.values()))
    return 0


def test_a_request_for_more_replies_than_there_are_places_is_no_matter_of_waiting(server):
    most = SLOTS + server.settings.max_queue
    response = server.post("/v1/completions", {"model": server.parts.service.name, "prompt": ["a"] * 64, "n": 64})
    assert response.status_code == 400
    assert f"asks for 4096 replies, {most} are the most" in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "n"


@pytest.mark.parametrize(("late", "status"), [(True, 200), (False, 408)])
async def test_a_body_is_given_the_time_in_which_the_server_was_busy_with_others(late, status):
    """The body comes after twice its time, in which the event loop was late, or was not."""
    begun, answered = asyncio.get_running_loop().time(), []

    async def app(scope, receive, send):
        try:
            message = await receive()
        except HTTPException as error:
            answered.append(error.status_code)
        else:
            answered.append(200 if message["body"] == b"{}" else 0)

    async def receive():
        await asyncio.sleep(begun + 0.2 - asyncio.get_running_loop().time())
        return {"type": "http.request", "body": b"{}", "more_body": False}

    lag = (lambda: asyncio.get_running_loop().time() - begun) if late else (lambda: 0.0)
    gate = Gate(
        app, keys=(), admin_key=None, pages=Pages(open_to_all=True, host="localhost", allowed=()), max_body=100,
        max_values=100, body_timeout=0.1, metrics=Metrics(), lag=lag,
    )  # fmt: skip
    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": [(b"host", b"localhost")]}
    await gate(scope, receive, None)
    assert answered == [status]
