"""The page and the viewer of journals, as they are served; what they do is tried in a browser in test_browser.py."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from memjax.episodes.journal import Journal
from memjax.serve.journal_view import check_journal, create_view
from tests.serve.conftest import serving

PAGE = Path(__file__).parents[2] / "memjax" / "serve" / "page"


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
def journal(tmp_path) -> Path:
    path = tmp_path / "journal.jsonl"
    Journal(path).close()
    return path


def test_the_viewer_serves_the_page_and_the_journal_to_this_machine_only(journal):
    with TestClient(create_view(journal), base_url="http://127.0.0.1") as client:
        assert client.get("/").url.path == "/journal"
        assert "memjax" in client.get("/journal").text
        assert "script-src 'self'" in client.get("/journal").headers["content-security-policy"]
        assert client.get("/journal.jsonl").text == journal.read_text()
        assert client.get("/page/app.js").status_code == 200
        assert client.get("/journal.jsonl", headers={"Host": "evil.example"}).status_code == 400


def test_a_file_that_is_not_a_journal_is_refused_in_a_sentence(tmp_path, journal):
    check_journal(journal)
    head = journal.read_bytes()
    with pytest.raises(ValueError, match="there is no journal"):
        check_journal(tmp_path / "none.jsonl")
    for content in (b"", b"text\n", b"[1]\n", b'{"question": "Who?"}\n', b"\xff\xfe\n"):
        journal.write_bytes(content)
        with pytest.raises(ValueError, match="is not a journal"):
            check_journal(journal)
    journal.write_bytes(b'{"question": "Who?", "reply": "Holmes", "memory": "Holmes"}\n')
    with pytest.raises(ValueError, match="another version"):
        check_journal(journal)
    journal.write_bytes(head + b"garbage\n")
    with pytest.raises(ValueError, match=":2 is not a journal line"):
        check_journal(journal)
    with pytest.raises(ValueError, match="Is a directory"):
        check_journal(tmp_path)


def test_no_id_of_the_page_is_given_twice():
    ids = re.findall(r'\bid="([^"]+)"', (PAGE / "index.html").read_text())
    assert len(ids) == len(set(ids))


def test_the_page_has_one_word_for_a_chunk():
    for file in PAGE.iterdir():
        assert not re.search(r"\bpieces?\b", file.read_text(), re.IGNORECASE), file


def test_a_run_keeps_the_journal_that_the_viewer_takes(server, tmp_path):
    body = {"text": "The lamp room door opens with a code. " * 25, "questions": ["Which code?", "Which door?"]}
    budgets = {"chunk_tokens": 100, "memory_tokens": 32, "answer_tokens": 16, "question_tokens": 16}
    run = server.post("/v1/memory/answers", body | budgets).json()
    text = server.get(f"/v1/memory/answers/{run['id']}/journal").text
    kept = tmp_path / "kept.jsonl"
    kept.write_text(text)
    check_journal(kept)
    lines = [json.loads(line) for line in text.splitlines()]
    last = [line["chunk"] for line in lines if line.get("chunk", {}).get("index") == run["chunks_read"] - 1]
    assert {chunk["start"] + chunk["tokens"] for chunk in last} == {run["tokens_read"]}
    assert {chunk["document"] for chunk in last} == {run["tokens_read"]}
    ended = {line["episode"]: line["answer"] for line in lines if line["type"] == "end"}
    assert [ended[str(number)] for number in range(2)] == [one["reply"] for one in run["answers"]]
