"""The model name memory/MODEL: which text is read, which is asked, and what is told of it."""

from __future__ import annotations

import base64
import json
from urllib.parse import unquote

import httpx
import pytest

from memjax.serve.errors import ApiError
from memjax.serve.memory_chat import taken_apart
from memjax.serve.schemas import ChatRequest

PARAGRAPHS = [f"Paragraph {i}. The gardener kept the key number {i} in the shed." for i in range(30)]
DOCUMENT = "\n\n".join(PARAGRAPHS)
LONG = "The gardener kept the key in the shed, and the keeper kept the lamp. " * 8
ASK = "In one word: who kept key number 7?"


def user(content) -> dict:
    return {"role": "user", "content": content}


def apart(*messages: dict):
    return taken_apart(ChatRequest(model="memory/tiny", messages=list(messages)))


@pytest.mark.parametrize(
    ("messages", "question", "begins"),
    [
        ([user(f"{DOCUMENT}\n\n{ASK}")], ASK, "Paragraph 0."),
        ([user(f"{ASK}\n\n{DOCUMENT}")], ASK, "Paragraph 0."),
        ([user(f"{ASK}\n\n{DOCUMENT}\n\n{ASK}")], ASK, ASK),
        ([user(f"Name the keeper.\n\n{LONG}\n\n{LONG}")], "Name the keeper.", "The gardener"),
        ([user(f"{LONG}\n\nName the keeper.")], "Name the keeper.", "The gardener"),
        ([user(DOCUMENT), user("Name the keeper.")], "Name the keeper.", "Paragraph 0."),
        ([user(ASK), user(DOCUMENT)], ASK, "Paragraph 0."),
        ([user("Hi."), user(f"{DOCUMENT}\n\n{ASK}")], ASK, "Hi."),
        ([user([{"type": "text", "text": ASK}, {"type": "text", "text": DOCUMENT}])], ASK, "Paragraph 0."),
        (
            [{"role": "system", "content": "Answer in French."}, user(f"{DOCUMENT}\n\n{ASK}")],
            f"Answer in French.\n\n{ASK}",
            "Paragraph 0.",
        ),
    ],
)
def test_the_question_is_found_wherever_it_stands(messages, question, begins):
    asked = apart(*messages)
    assert asked.question == question
    assert asked.document.startswith(begins)
    assert PARAGRAPHS[-1] in asked.document or LONG.strip() in asked.document


@pytest.mark.parametrize(
    "messages",
    [
        [user(f"What is a key?\n\n{DOCUMENT}\n\nWho kept it?")],
        [user(DOCUMENT)],
        [user(f"{LONG}\n\n{LONG}")],
        [user(DOCUMENT), {"role": "assistant", "content": "I have read it."}],
    ],
)
def test_nothing_is_guessed_where_no_question_stands_out(messages):
    with pytest.raises(ApiError, match=r"question|continued") as refused:
        apart(*messages)
    assert refused.value.status == 400


def test_what_the_assistant_said_is_read_with_the_rest():
    asked = apart(user(DOCUMENT), {"role": "assistant", "content": "I have read it."}, user("Who kept key 7?"))
    assert asked.document.endswith("Assistant: I have read it.")
    assert asked.question == "Who kept key 7?"


def answered(server, **changes):
    body = {"model": "memory/tiny", "messages": [user(f"{ASK}\n\n{DOCUMENT}")], "max_tokens": 3, "temperature": 0}
    return server.post("/v1/chat/completions", body | changes)


@pytest.mark.parametrize("stream", [False, True])
def test_a_cut_answer_says_length_and_the_reply_names_the_question_and_what_was_dropped(server, stream):
    response = answered(server, stream=stream, stop=["zz"], logprobs=True, top_k=5, store=True)
    assert response.status_code == 200, response.text
    assert unquote(response.headers["x-memjax-question"]) == ASK
    assert response.headers["x-memjax-ignored-fields"] == "logprobs,stop,store,top_k"
    if stream:
        replies = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    else:
        replies = [response.json()]
        assert replies[0]["ignored_fields"] == ["logprobs", "stop", "store", "top_k"]
    assert replies[-1]["choices"][0]["finish_reason"] == "length"
    assert replies[-1]["memjax"]["question"] == ASK


@pytest.mark.parametrize("prefix", ["", "data:text/plain;base64,"])
def test_a_file_within_a_chat_is_read(server, prefix):
    data = prefix + base64.b64encode(DOCUMENT.encode()).decode()
    file = {"type": "file", "file": {"filename": "a.txt", "file_data": data}}
    response = answered(server, messages=[user([file, {"type": "text", "text": "Who kept key 7?"}])])
    assert response.status_code == 200, response.text
    assert response.json()["memjax"]["question"] == "Who kept key 7?"
    assert response.json()["usage"]["prompt_tokens"] > 500
    assert not server.parts.brought.list()


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ({"file_data": "%%"}, "is not base64"),
        ({"file_data": "AAAA"}, "binary"),
        ({"filename": "a.txt"}, "needs file.file_id"),
        ({"file_id": "x", "file_data": "YQ=="}, "needs file.file_id"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(server, file, says):
    response = answered(server, messages=[user([{"type": "file", "file": file}, {"type": "text", "text": "Who?"}])])
    assert response.status_code == 400, response.text
    assert says in response.json()["error"]["message"]


def test_the_content_of_a_file_comes_back_and_lists_are_paged(server):
    kept = []
    for number, purpose in enumerate(["user_data", "assistants", "user_data"]):
        sent = {"file": (f"{number}é.txt", f"Text {number}.".encode()), "purpose": (None, purpose)}
        kept.append(httpx.post(f"{server.url}/v1/files", files=sent).json()["id"])
    content = server.get(f"/v1/files/{kept[0]}/content")
    assert (content.content, content.headers["content-type"]) == (b"Text 0.", "application/octet-stream")

    def page(**query):
        found = server.get("/v1/files", params=query).json()
        return [file["id"] for file in found["data"]], found["has_more"]

    assert page(limit=2) == ([kept[2], kept[1]], True)
    assert page(limit=2, after=kept[1])[0][0] == kept[0]
    assert page(order="asc", after=kept[1]) == ([kept[2]], False)
    assert page(purpose="assistants", limit=1)[0] == [kept[1]]
    for query in ({"limit": 0}, {"limit": "x"}, {"order": "up"}, {"after": "file-none"}):
        assert server.get("/v1/files", params=query).status_code in (400, 404)
    refused = httpx.post(f"{server.url}/v1/files", files={"file": ("a.txt", b"A."), "purpose": (None, "fun")})
    assert refused.status_code == 400
    for one in kept:
        httpx.delete(f"{server.url}/v1/files/{one}")
