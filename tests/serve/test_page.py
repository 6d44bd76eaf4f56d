"""The page and the viewer of traces, as they are served; what they do is tried in a browser in test_browser.py."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from memjax.serve.trace_view import check_trace, create_view
from tests.serve.conftest import serving

PAGE = Path(__file__).parents[2] / "memjax" / "serve" / "page"
LINE = {"question": "Who?", "reply": "Holmes", "memory": "Holmes"}


def test_the_page_and_all_its_parts_are_served_under_the_policy_without_a_key(engine, loaded, tmp_path):
    with serving(engine, loaded, tmp_path, keys=("secret",)) as server:
        for path in ["/", *(f"/page/{file.name}" for file in PAGE.iterdir())]:
            answer = server.get(path)
            assert answer.status_code == 200, path
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
            assert "unsafe" not in policy
        assert server.get("/page/nothing.js").status_code == 404
        assert server.get("/page/../web_page.py").status_code in (401, 404)
        assert "secret" not in server.get("/").text


def test_a_part_that_has_not_changed_is_not_sent_again(server):
    first = server.get("/page/app.js")
    again = server.get("/page/app.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_the_page_asks_for_nothing_beyond_its_server():
    for file in PAGE.iterdir():
        text = file.read_text()
        outside = [url for url in re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\"'\s]*", text) if "www.w3.org" not in url]
        assert not outside, file
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|\beval\(|document\.write", text), file


@pytest.fixture
def trace(tmp_path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(LINE) + "\n")
    return path


def test_the_viewer_serves_the_page_and_the_trace_to_this_machine_only(trace):
    with TestClient(create_view(trace), base_url="http://127.0.0.1") as client:
        assert client.get("/").url.path == "/trace"
        assert "memjax" in client.get("/trace").text
        assert "script-src 'self'" in client.get("/trace").headers["content-security-policy"]
        assert client.get("/trace.jsonl").text == trace.read_text()
        assert client.get("/page/app.js").status_code == 200
        assert client.get("/trace.jsonl", headers={"Host": "evil.example"}).status_code == 400


def test_a_file_that_is_no_trace_is_refused_in_a_sentence(tmp_path, trace):
    check_trace(trace)
    with pytest.raises(ValueError, match="there is no trace"):
        check_trace(tmp_path / "none.jsonl")
    for content in (b"", b"text", b"[1]", b'{"question": "Who?"}', b"\xff\xfe"):
        trace.write_bytes(content)
        with pytest.raises(ValueError, match="is no trace"):
            check_trace(trace)
    with pytest.raises(ValueError, match="is no trace"):
        check_trace(tmp_path)


def test_a_reading_keeps_the_trace_that_the_viewer_takes(server, tmp_path):
    body = {"text": "The lamp room door opens with a code. " * 25, "questions": ["Which code?", "Which door?"]}
    budgets = {"chunk_tokens": 100, "memory_tokens": 32, "answer_tokens": 16, "question_tokens": 16}
    run = server.post("/v1/memory/answers", body | budgets).json()
    text = server.get(f"/v1/memory/answers/{run['id']}/trace").text
    kept = tmp_path / "kept.jsonl"
    kept.write_text(text)
    check_trace(kept)
    lines = [json.loads(line) for line in text.splitlines()]
    last = [line for line in lines if line["chunk"] == run["chunks_read"] - 1]
    assert [line["memory"] for line in last] == [memory["memory"] for memory in run["memories"]]
    assert {line["tokens_read"] for line in last} == {line["document_tokens"] for line in last} == {run["tokens_read"]}
    assert [line["answer"] for line in lines if line["chunk"] is None] == [one["answer"] for one in run["answers"]]
