"""Kind 9: who did what can be told from the log and the metrics, and an error of the server is one line and a place."""

import logging

import httpx
import pytest

from memjax.serve.gate import owner_of
from tests.serve.conftest import serving, wait_for

KEYS = ("alice-key", "bob-key")
REQUESTS = [
    ("POST", "/generate", {"token_ids": [1], "max_tokens": 1}, 200),
    ("POST", "/generate", {"token_ids": [-1]}, 400),
    ("GET", "/v1/memory/answers/none", None, 404),
    ("GET", "/v1/files", None, 200),
    ("GET", "/nothing", None, 404),
]


@pytest.fixture(scope="module")
def server(engine, loaded, tmp_path_factory):
    with serving(engine, loaded, tmp_path_factory.mktemp("seen"), keys=KEYS) as running:
        yield running


def send(server, method, path, body, key, **headers):
    headers = {"Authorization": f"Bearer {key}"} | headers
    return httpx.request(method, server.url + path, json=body, headers=headers, timeout=30)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(("method", "path", "body", "status"), REQUESTS)
def test_every_request_is_a_line_with_its_id_and_its_key(server, caplog, method, path, body, status, key):
    caplog.set_level(logging.INFO, logger="memjax.serve.access")
    response = send(server, method, path, body, key, **{"X-Request-Id": "mine-1"})
    assert (response.status_code, response.headers["X-Request-Id"]) == (status, "mine-1")
    lines = lambda: [one.getMessage() for one in caplog.records if one.name == "memjax.serve.access"]  # noqa: E731
    wait_for(lines)  # it is written when the answer is on its way
    (line,) = lines()
    assert line.startswith(f"{method} {path} {status} ")
    assert f"key={owner_of(key)[:8]}" in line
    assert line.endswith("request=mine-1")
    assert key not in line


@pytest.mark.parametrize("given", ["", "a b", "x" * 65, "ü", 'a"b'])
def test_an_id_that_could_forge_a_line_is_replaced(server, given):
    response = send(server, "GET", "/v1/models", None, KEYS[0], **{"X-Request-Id": given.encode()})
    assert response.headers["X-Request-Id"] != given
    assert response.headers["X-Request-Id"].isalnum()


def test_requests_are_counted_by_key_and_the_process_is_measured(server):
    for _ in range(3):
        send(server, "GET", "/v1/models", None, KEYS[0])
    lines = server.get("/metrics").text.splitlines()
    key = f'memjax_key_requests_total{{key="{owner_of(KEYS[0])[:8]}"}} '
    (counted,) = [float(line.removeprefix(key)) for line in lines if line.startswith(key)]
    assert counted >= 3
    for name in ("process_resident_memory_bytes", "memjax_state_bytes"):
        assert any(line.startswith(name) for line in lines), name


def test_an_error_of_the_server_is_told_once_with_its_request(server, caplog, monkeypatch):
    def broken(*_):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(server.parts.files, "list", broken)
    caplog.set_level(logging.INFO)
    response = send(server, "GET", "/v1/files", None, KEYS[0])
    assert response.status_code == 500
    request_id = response.headers["X-Request-Id"]
    assert request_id in response.json()["error"]["message"]
    told = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [record.name for record in told] == ["memjax.serve.gate"]
    assert request_id in told[0].getMessage()
