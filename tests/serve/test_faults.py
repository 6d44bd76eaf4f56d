"""Bad requests get a 4xx with a sentence, faults fail what they concern, and the server goes on."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time

import httpx
import numpy as np
import pytest

from memjax.serve.listening import bind, raise_file_limit
from memjax.trajectory import SamplingParams
from tests.serve.conftest import SLOTS, WINDOW, serving, wait_for

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
IDS = {"token_ids": [1, 2, 3], "max_tokens": 4}


def changed(body: dict, **changes) -> dict:
    return body | changes


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/chat/completions", changed(CHAT, model="gpt-4"), 404, "no model 'gpt-4'"),
        ("/v1/chat/completions", changed(CHAT, model=7), 400, "model: Input should be a valid string, got 7"),
        ("/v1/chat/completions", changed(CHAT, messages=[]), 400, "messages"),
        ("/v1/chat/completions", changed(CHAT, messages="hi"), 400, "messages"),
        ("/v1/chat/completions", changed(CHAT, messages=[{"role": "tool", "content": "x"}]), 400, "messages.0.role"),
        ("/v1/chat/completions", changed(CHAT, max_tokens=-1), 400, "max_tokens"),
        ("/v1/chat/completions", changed(CHAT, max_tokens=10**9), 400, "lower max_tokens"),
        ("/v1/chat/completions", changed(CHAT, max_tokens="4"), 400, "max_tokens"),
        ("/v1/chat/completions", changed(CHAT, temperature=-0.1), 400, "temperature"),
        ("/v1/chat/completions", changed(CHAT, temperature=1e300), 400, "temperature"),
        ("/v1/chat/completions", changed(CHAT, top_p=0), 400, "top_p"),
        ("/v1/chat/completions", changed(CHAT, n=0), 400, "n: "),
        ("/v1/chat/completions", changed(CHAT, n=10**6), 400, "n: "),
        ("/v1/chat/completions", changed(CHAT, stop=[""]), 400, "stop string"),
        ("/v1/chat/completions", changed(CHAT, seed=1 << 70), 400, "seed"),
        ("/v1/chat/completions", changed(CHAT, top_logprobs=5), 400, "top_logprobs"),
        ("/v1/chat/completions", {"messages": CHAT["messages"]}, 400, "model is missing"),
        ("/v1/completions", {"model": "tiny", "prompt": "a", "logprobs": 2}, 400, "at most 1, got 2"),
        ("/v1/completions", {"model": "tiny", "prompt": ""}, 400, "prompt is empty"),
        ("/v1/completions", {"model": "tiny", "prompt": []}, 400, "prompt"),
        ("/v1/completions", {"model": "tiny", "prompt": [300]}, 400, "token ids must be in"),
        ("/v1/completions", {"model": "tiny", "prompt": [[1], [2, "x"]]}, 400, "prompt"),
        ("/v1/completions", {"model": "tiny", "prompt": [5] * WINDOW}, 400, "memory/tiny"),
        ("/generate", {"token_ids": [-1]}, 400, "token_ids"),
        ("/generate", changed(IDS, shared=9), 400, "shared"),
        ("/generate", [1, 2], 400, "valid dictionary"),
        ("/tokenize", {}, 400, "text or messages"),
        ("/tokenize", {"text": "a", "messages": []}, 400, "text or messages"),
        ("/nowhere", {}, 404, "nothing at /nowhere"),
        ("/health", {}, 405, "POST is not for /health"),
    ],
)
def test_a_bad_request_is_refused_in_a_sentence(server, path, body, status, says):
    response = server.post(path, body)
    assert response.status_code == status, response.text
    assert says in response.json()["error"]["message"]


NO_JSON = [
    b"{",
    b"",
    b"\xff\xfe",
    b'{"a": 1',
    b"[" * 100_000,
    b'{"seed": 1' + b"0" * 5000 + b"}",
    b'"\\ud800"',
]


@pytest.mark.parametrize("content", NO_JSON)
def test_a_body_that_is_no_json_is_refused(server, content):
    response = httpx.post(
        f"{server.url}/v1/chat/completions", content=content, headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]


def test_a_body_that_does_not_say_that_it_is_json_is_told_how_to(server):
    response = httpx.post(f"{server.url}/v1/chat/completions", content=json.dumps(CHAT).encode())
    assert response.status_code == 400
    assert "it does not say what it is; send Content-Type: application/json" in response.json()["error"]["message"]
    form = httpx.post(f"{server.url}/generate", data={"token_ids": "1"})
    assert "it says application/x-www-form-urlencoded; send" in form.json()["error"]["message"]


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-6, 100.0])
def test_any_temperature_gives_finite_log_probabilities(server, temperature):
    response = server.post("/generate", IDS | {"temperature": temperature, "top_p": 0.5})
    assert response.status_code == 200, response.text
    assert np.isfinite(response.json()["samples"][0]["logprobs"]).all()


def test_unknown_fields_are_accepted_and_reported(server):
    response = server.post(
        "/v1/chat/completions", changed(CHAT, logit_bias={"1": 2}, user="me", parallel_tool_calls=None)
    )
    assert response.status_code == 200
    assert response.json()["ignored_fields"] == ["logit_bias", "user"]
    assert response.headers["x-memjax-ignored-fields"] == "logit_bias,user"


def test_a_body_over_the_limit_is_refused_by_its_length_and_by_its_size(engine, loaded, tmp_path):
    with serving(engine, loaded, tmp_path, max_body=2000) as server:
        long = changed(CHAT, user="x" * 3000)
        assert server.post("/v1/chat/completions", long).status_code == 413

        def chunks():
            for _ in range(30):
                yield b" " * 100

        response = httpx.post(f"{server.url}/v1/chat/completions", content=chunks())
        assert response.status_code == 413
        assert server.post("/v1/chat/completions", CHAT).status_code == 200


def test_a_client_that_sends_slowly_is_let_go(engine, loaded, tmp_path):
    with serving(engine, loaded, tmp_path, body_timeout=0.5) as server:
        host, port = server.url.removeprefix("http://").split(":")
        body = socket.create_connection((host, int(port)))
        host_line = "Host: localhost\r\nContent-Type: application/json\r\nContent-Length: 100"
        head = f"POST /generate HTTP/1.1\r\n{host_line}\r\n\r\n{{"
        body.sendall(head.encode())
        slow = socket.create_connection((host, int(port)))
        slow.sendall(b"GET /health HTTP/1.1\r\nHost:")
        silent = socket.create_connection((host, int(port)))
        for connection in (body, slow, silent):
            connection.settimeout(20)
        assert b" 408 " in body.recv(4096)
        assert slow.recv(4096) == b""
        assert silent.recv(4096) == b""
        for connection in (body, slow, silent):
            connection.close()
        assert server.post("/generate", IDS).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_the_slots_of_a_client_that_leaves_are_free_again(server, stream):
    cancelled = server.parts.service.client.counters.cancelled
    body = {"token_ids": [1, 2], "max_tokens": WINDOW - 2, "temperature": 50.0, "n": SLOTS, "seed": 3, "stream": stream}
    asyncio.run(_ask_and_leave(server, body))
    server.wait_idle()
    wait_for(lambda: server.parts.service.client.counters.cancelled == cancelled + 1)


async def _ask_and_leave(server, body: dict) -> None:
    """Ask, wait for the first byte of a stream or until slots are used, and close the connection."""
    async with httpx.AsyncClient() as client, asyncio.TaskGroup() as tasks:

        async def ask() -> None:
            async with client.stream("POST", f"{server.url}/generate", json=body) as response:
                await anext(response.aiter_bytes())
                left.set()

        left = asyncio.Event()
        task = tasks.create_task(ask())
        while not left.is_set() and (body["stream"] or not server.slots_used()):
            await asyncio.sleep(0.001)
        task.cancel()


def test_a_generation_that_is_closed_has_its_slot_for_two_steps_at_most(server):
    service, done = server.parts.service, []

    async def run() -> None:
        generation = service.start([1, 2], SamplingParams(max_tokens=WINDOW - 2, temperature=50.0, seed=3))
        async for _ in generation.events():
            break
        before = service.client.counters.decode_steps
        generation.close()
        while service.client.scheduler.running:
            await asyncio.sleep(0.001)
        done.append(service.client.counters.decode_steps - before)

    asyncio.run(run())
    assert done[0] <= 2


@pytest.mark.parametrize("clients", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_more_clients_than_slots_and_queue_get_429_and_the_rest_are_served(engine, loaded, tmp_path, clients):
    raise_file_limit()
    with serving(engine, loaded, tmp_path, max_queue=6) as server:

        async def all_at_once():
            limits = httpx.Limits(max_connections=clients)
            async with httpx.AsyncClient(timeout=60, limits=limits) as client:
                body = IDS | {"max_tokens": 40}
                return await asyncio.gather(*(client.post(f"{server.url}/generate", json=body) for _ in range(clients)))

        answers = asyncio.run(all_at_once())
        statuses = [answer.status_code for answer in answers]
        assert set(statuses) == {200, 429}
        assert statuses.count(200) >= SLOTS + 6
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert int(refused.headers["retry-after"]) >= 1
        server.wait_idle()
        assert server.parts.service.metrics.totals()["rejected"] == statuses.count(429)


def test_a_reply_that_takes_too_long_is_a_504_and_its_slot_is_free(engine, loaded, tmp_path, monkeypatch):
    with serving(engine, loaded, tmp_path, request_timeout=0.02) as server:
        generate = engine.generate

        def slow(params, state):
            time.sleep(0.05)  # a fast engine may draw the end id sooner than the timeout
            return generate(params, state)

        monkeypatch.setattr(engine, "generate", slow)
        response = server.post("/generate", IDS | {"max_tokens": 250, "temperature": 50.0})
        assert response.status_code == 504
        assert "0.02 s" in response.json()["error"]["message"]
        server.wait_idle()


def test_an_error_of_the_engine_fails_its_requests_and_three_in_a_row_the_server(engine, loaded, tmp_path, monkeypatch):
    with serving(engine, loaded, tmp_path) as server:
        generate, failures = engine.generate, [1]

        def failing(params, state):
            if failures[0] > 0:
                failures[0] -= 1
                raise RuntimeError("the device is on fire")
            return generate(params, state)

        monkeypatch.setattr(engine, "generate", failing)
        response = server.post("/generate", IDS)
        assert response.status_code == 503
        assert "on fire" in response.json()["error"]["message"]
        assert server.post("/generate", IDS).status_code == 200
        assert server.get("/health").status_code == 200
        failures[0] = 100
        streams = [server.post("/generate", IDS | {"stream": True}) for _ in range(3)]
        assert [stream.status_code for stream in streams] == [503] * 3
        wait_for(lambda: server.parts.service.failure is not None)
        assert server.get("/health").status_code == 503
        assert server.post("/generate", IDS).status_code == 503


def test_nothing_is_generated_before_everything_is_compiled(engine, loaded, tmp_path):
    with serving(engine, loaded, tmp_path) as server:
        server.parts.service.ready = False
        assert server.get("/ready").status_code == 503
        assert server.get("/health").status_code == 200
        response = server.post("/v1/chat/completions", CHAT)
        assert (response.status_code, response.headers["retry-after"]) == (503, "5")


def test_a_second_server_on_a_port_is_refused():
    first = bind("127.0.0.1", 0)
    with pytest.raises(ValueError, match="choose another --host or --port"):
        bind("127.0.0.1", first.getsockname()[1])
    first.close()


def test_without_the_key_there_is_nothing_but_health(engine, loaded, tmp_path):
    with serving(engine, loaded, tmp_path, keys=("secret",)) as server:
        for path in ("/v1/chat/completions", "/generate", "/v1/files", "/v1/memory/answers", "/nowhere"):
            assert server.post(path, {}).status_code == 401
            assert server.post(path, {}, headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert server.get("/health").status_code == server.get("/metrics").status_code == 200
        answer = server.post("/generate", IDS, headers={"Authorization": "Bearer secret"})
        assert answer.status_code == 200
        assert (
            server.post("/admin/weights", {"directory": "/"}, headers={"Authorization": "Bearer secret"}).status_code
            == 403
        )


def test_a_drain_lets_running_requests_end_and_refuses_others(engine, loaded, tmp_path):
    answers = []
    with serving(engine, loaded, tmp_path) as server:
        body = IDS | {"max_tokens": 200, "temperature": 5.0, "seed": 1}
        whole = server.post("/generate", body).json()
        thread = threading.Thread(target=lambda: answers.append(server.post("/generate", body)))
        thread.start()
        wait_for(lambda: server.slots_used() or answers)
        server.parts.service.draining = True
        assert server.post("/generate", IDS).status_code == 503
        server.server.should_exit = True
        thread.join(30)
    assert answers[0].json()["samples"] == whole["samples"]


def test_the_metrics_tell_what_happened(server):
    before = server.parts.service.metrics.totals().get("length", 0)
    drawn = server.post("/generate", IDS | {"max_tokens": 5, "temperature": 0}).json()
    assert drawn["samples"][0]["finish_reason"] == "length"
    text = server.get("/metrics").text
    assert f'memjax_requests_total{{outcome="length"}} {before + 1}' in text
    for name in ("time_to_first_token_seconds_count", "time_per_output_token_seconds_count", "slots 4.0", "queue 0.0"):
        assert f"memjax_{name}" in text
    assert "memjax_compilations 0.0" in text
