"""Kind 2: a page of another site reaches nothing of a server without keys, and no key is dropped in silence."""

import itertools

import httpx
import pytest

from memjax.serve.settings import keys_sentence, read_admin_key, read_keys
from tests.serve.conftest import serving

OUR_HOSTS = [
    "127.0.0.1:{port}",
    "localhost:{port}",
    "[::1]:{port}",
    "192.168.7.7:{port}",
    "box.localhost",
    "mine.example",
]
FOREIGN_HOSTS = [
    "evil.example",
    "evil.example:{port}",
    "localhost.evil.example",
    "127.0.0.1.nip.io",
    "",
    "mine.example.evil",
]
FOREIGN = [
    {"Origin": "http://evil.example"},
    {"Origin": "http://evil.example:{port}"},
    {"Origin": "http://localhost:1"},
    {"Origin": "http://127.0.0.1:1"},  # another server of this machine
    {"Origin": "http://127.0.0.1"},
    {"Host": "localhost:{port}", "Origin": "http://127.0.0.1:{port}"},
    {"Host": "[::1]:{port}", "Origin": "http://[::1]:1"},
    {"Origin": "null"},
    {"Origin": "https://localhost.evil.example"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
]
KINDS = ["text/plain", "application/json", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
PAGES = [("GET", "/"), ("GET", "/v1/models"), ("GET", "/v1/memory/answers"), ("GET", "/page/app.js")]
CHANGES = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/memory/answers"),
    ("POST", "/v1/files"),
    ("POST", "/generate"),
    ("DELETE", "/v1/files/file-x"),
    ("POST", "/v1/memory/answers/run-x/stop"),
]


@pytest.fixture(scope="module")
def open_server(engine, loaded, tmp_path_factory):
    with serving(engine, loaded, tmp_path_factory.mktemp("open"), allowed_hosts=("mine.example",)) as running:
        yield running


def ask(server, method, path, headers, **content):
    port = server.url.rpartition(":")[2]
    return httpx.request(
        method, server.url + path, headers={k: v.format(port=port) for k, v in headers.items()}, timeout=30, **content
    )


@pytest.mark.parametrize("host", FOREIGN_HOSTS)
def test_a_name_that_is_not_ours_is_refused_for_everything_but_health(open_server, host):
    for method, path in [*PAGES, *CHANGES]:
        response = ask(open_server, method, path, {"Host": host})
        assert response.status_code in (400, 403), (method, path)
        assert "listed" not in response.text
    assert ask(open_server, "GET", "/health", {"Host": host or "any"}).status_code == 200


@pytest.mark.parametrize("host", OUR_HOSTS)
def test_our_own_names_and_any_address_are_served(open_server, host):
    assert ask(open_server, "GET", "/v1/models", {"Host": host}).status_code == 200


@pytest.mark.parametrize(("headers", "change"), list(itertools.product(FOREIGN, CHANGES)))
def test_a_page_of_another_site_changes_nothing(open_server, headers, change):
    for kind in KINDS:
        body = b'{"text":"planted","question":"q"}'
        response = ask(open_server, *change, headers | {"Content-Type": kind}, content=body)
        assert response.status_code == 403, response.text
    assert open_server.get("/v1/memory/answers").json()["data"] == []
    assert open_server.get("/v1/files").json()["data"] == []


def test_the_page_itself_and_programs_are_served(open_server):
    port = open_server.url.rpartition(":")[2]
    own = {"Host": f"localhost:{port}", "Origin": f"http://localhost:{port}", "Sec-Fetch-Site": "same-origin"}
    body = {"token_ids": [1], "max_tokens": 1}
    assert ask(open_server, "POST", "/generate", own, json=body).status_code == 200
    assert open_server.post("/generate", body).status_code == 200
    friend = {"Host": f"localhost:{port}", "Origin": "https://mine.example"}
    assert ask(open_server, "POST", "/generate", friend, json=body).status_code == 200
    assert ask(open_server, "GET", "/", {"Sec-Fetch-Site": "cross-site"}).status_code == 200  # a link from elsewhere


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_body_that_a_page_may_send_unasked_is_read_by_no_route(open_server, kind):
    for path in ("/v1/memory/answers", "/v1/chat/completions", "/generate", "/v1/completions", "/tokenize"):
        response = ask(open_server, "POST", path, {"Content-Type": kind}, content=b'{"text":"a","question":"q"}')
        assert response.status_code == 400
        assert "must be JSON" in response.json()["error"]["message"]


EMPTY = ["", " ", ",", "a,,b", " , a"]


@pytest.mark.parametrize("text", EMPTY)
def test_an_empty_key_never_opens_the_server(text):
    with pytest.raises(ValueError, match="MEMJAX_API_KEYS holds an empty key"):
        read_keys(None, {"MEMJAX_API_KEYS": text})
    with pytest.raises(ValueError, match="--api-key holds an empty key"):
        read_keys([text], {"MEMJAX_API_KEYS": "secret"})
    assert read_keys(["a,b"], {}) == read_keys(None, {"MEMJAX_API_KEYS": "a,b"}) == ("a", "b")


def test_an_empty_admin_key_is_refused():
    with pytest.raises(ValueError, match="MEMJAX_ADMIN_KEY is set and empty"):
        read_admin_key({"MEMJAX_ADMIN_KEY": ""})
    assert read_admin_key({}) is None


def test_the_start_says_whether_keys_are_asked_for():
    assert keys_sentence(("a", "b"), "0.0.0.0") == "2 API keys are asked for"
    assert "every program of this machine" in keys_sentence((), "127.0.0.1")
    assert keys_sentence((), "0.0.0.0").startswith("WARNING: NO API KEY IS ASKED FOR")
