"""The HTTP client says what went wrong, tries again where that helps, and never shows the key."""

import asyncio
import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from memjax.rollout.client import ClientError, Message, Prompt, ToolCall
from memjax.rollout.fake import ByteTokenizer
from memjax.rollout.http import HttpClient, RetryPolicy, served_models
from memjax.trajectory import SamplingParams

KEY = "sk-very-secret"
HELLO = Prompt((Message("user", ("Say ", tuple("naïve".encode()), "!")),))


def chat(*texts, finish="stop", usage=None):
    choices = [
        {"index": i, "message": {"role": "assistant", "content": text}, "finish_reason": finish}
        for i, text in enumerate(texts)
    ]
    return 200, {"content-type": "application/json"}, json.dumps({"choices": choices, "usage": usage}).encode()


def said(status, message="nope", **headers):
    body = json.dumps({"error": {"message": message}}).encode()
    return status, {"content-type": "application/json", **headers}, body


class Service:
    """A socket that gives prepared answers, one after another, the last one again and again."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.requests = []
        self.url = ""


@contextmanager
def serving(*answers):
    service = Service(*answers)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            service.requests.append((self.path, {k.lower(): v for k, v in self.headers.items()}, json.loads(body)))
            answer = service.answers.pop(0) if len(service.answers) > 1 else service.answers[0]
            if answer == "hang up":
                self.close_connection = True
                return
            if answer == "stall":
                time.sleep(1.0)
                return
            status, headers, content = answer
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            if "content-length" not in headers:
                self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    service.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def complete(service, params=None, *, url=None, **options):
    retries = RetryPolicy(attempts=3, first_wait=0.01, longest_wait=0.02)
    options = {"api_key": KEY, "read_timeout": 20.0, "retries": retries, **options}
    client = HttpClient("m", ByteTokenizer(), url=url or service.url, **options)
    try:
        return await client.complete(HELLO, params or SamplingParams(max_tokens=7, temperature=0.5, top_p=0.9, seed=3))
    finally:
        await client.close()


async def test_the_request_holds_the_prompt_the_sampling_and_both_headers():
    with serving(chat("hi", usage={"prompt_tokens": 9, "completion_tokens": 2})) as service:
        (completion,) = await complete(service, SamplingParams(max_tokens=7, temperature=0.5, seed=3, stop=("x",)))
    (path, headers, body) = service.requests[0]
    assert path == "/v1/chat/completions"
    assert headers["authorization"] == f"Bearer {KEY}"
    assert headers["api-key"] == KEY
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "Say naïve!"}],
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 1.0,
        "seed": 3,
        "stop": ["x"],
    }
    assert (completion.text, completion.finish_reason) == ("hi", "stop")
    assert (completion.prompt_tokens, completion.completion_tokens) == (9, 2)
    assert len(completion.token_ids) == len(completion.prompt_ids) == len(completion.logprobs) == 0


async def test_samples_come_in_order_and_share_the_counted_tokens():
    answer = chat("a", "b", "c", finish="length", usage={"completion_tokens": 9})
    body = json.loads(answer[2])
    body["choices"].reverse()
    with serving((*answer[:2], json.dumps(body).encode())) as service:
        completions = await complete(service, SamplingParams(n=3))
    assert service.requests[0][2]["n"] == 3
    assert [c.text for c in completions] == ["a", "b", "c"]
    assert {c.finish_reason for c in completions} == {"length"}
    assert {c.completion_tokens for c in completions} == {3}


async def test_an_azure_address_keeps_its_api_version():
    with serving(chat("hi")) as service:
        host = service.url.removesuffix("/v1")
        await complete(service, url=f"{host}/openai/deployments/gpt?api-version=2024-10-21")
    assert service.requests[0][0] == "/openai/deployments/gpt/chat/completions?api-version=2024-10-21"


async def test_without_a_key_no_header_is_sent(monkeypatch):
    monkeypatch.delenv("API_KEY", raising=False)
    with serving(chat("hi")) as service:
        await complete(service, api_key=None)
    assert not {"authorization", "api-key"} & set(service.requests[0][1])


@pytest.mark.parametrize("passing", [said(408), said(429), said(500), said(503), "hang up"])
async def test_what_passes_is_tried_again_and_told(passing):
    told = []
    with serving(passing, passing, chat("at last")) as service:
        (completion,) = await complete(service, on_retry=told.append)
    assert completion.text == "at last"
    assert len(service.requests) == 3
    first, second = told
    assert service.url in first
    assert "(try 2 of 3 in" in first
    assert "(try 3 of 3 in" in second


async def test_tries_are_bounded_and_counted():
    with (
        serving(said(503, "overloaded")) as service,
        pytest.raises(ClientError, match=r"HTTP 503.*overloaded.*3 times"),
    ):
        await complete(service)
    assert len(service.requests) == 3


async def test_retry_after_is_honoured_up_to_a_bound():
    policy = RetryPolicy(longest_asked=120.0)
    assert policy.wait(1, 7.0) == 7.0
    assert policy.wait(1, 1e9) == 120.0
    assert policy.wait(1, -5.0) == 0.0
    assert 0.25 <= policy.wait(1, None) <= 0.5
    assert 1.0 <= policy.wait(3, None) <= 2.0
    assert policy.wait(50, None) <= policy.longest_wait
    with serving(said(429, retry_after="0.3"), chat("hi")) as service:
        started = time.monotonic()
        await complete(service)
    assert time.monotonic() - started >= 0.3
    with serving(said(429, retry_after="Wed, 21 Oct 2015 07:28:00 GMT"), chat("hi")) as service:
        await complete(service)  # a date that is past asks for no wait
    for odd in ("nan", "inf", "soon", "Wed, 21 Oct 99999 07:28:00 GMT"):
        with serving(said(429, retry_after=odd), chat("hi")) as service:
            assert (await complete(service))[0].text == "hi"


FINAL = [
    (said(401, f"bad key {KEY}"), r"refused access \(HTTP 401\): set API_KEY to a valid key; it said: bad key \*\*\*"),
    (said(403), r"refused access \(HTTP 403\)"),
    (said(404, "no model m"), r"no such model or address \(HTTP 404\): check --model m and --url; it said: no model m"),
    (said(400, "too long"), r"refused the request \(HTTP 400\); it said: too long"),
    ((200, {"content-type": "text/html"}, b"<html>hello</html>"), "an HTML page instead of JSON.*ends in /v1"),
    ((404, {"content-type": "text/html"}, b"<html>gone</html>"), "it said: an HTML page"),
    ((200, {"content-type": "application/json"}, b"[1]"), "JSON that is no chat completion"),
    ((200, {"content-type": "application/json"}, b'{"choices": []}'), "0 choices where 1 were asked for"),
    ((200, {"content-type": "application/json"}, b'{"id": 1}'), "no choices where 1 were asked for"),
    ((200, {"content-type": "application/json"}, b'{"choices": [{"text": "x"}]}'), "no chat completion"),
]


@pytest.mark.parametrize(("answer", "message"), FINAL)
async def test_what_does_not_pass_is_said_at_once(answer, message):
    with serving(answer) as service, pytest.raises(ClientError, match=message) as caught:
        await complete(service)
    assert len(service.requests) == 1
    assert KEY not in str(caught.value)
    assert service.url in str(caught.value)


async def test_a_service_that_is_down_is_named():
    with serving(chat("hi")) as service:
        pass
    with pytest.raises(
        ClientError, match=rf"{service.url} cannot be reached .*is the service running there\? \(tried 3"
    ):
        await complete(service)


async def test_a_stall_ends_at_the_timeout():
    with serving("stall") as service, pytest.raises(ClientError, match=r"sent nothing for 0.2 s.*try 1 of 3"):
        await complete(service, read_timeout=0.2)


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    "cut",
    [
        (200, {**JSON, "content-length": "500"}, b'{"choices": ['),
        (200, JSON, b'{"choices": [{"mess'),
        (200, JSON, b""),
        "hang up",
    ],
)
async def test_a_reply_that_breaks_off_is_tried_again_and_then_named(cut):
    with serving(cut) as service, pytest.raises(ClientError, match=r"broke off.*only in part.*tried 3 times"):
        await complete(service)
    assert len(service.requests) == 3
    with serving(cut, chat("whole")) as service:
        assert (await complete(service))[0].text == "whole"


async def test_a_filtered_reply_is_an_error_and_an_absent_one_is_empty():
    with serving(chat("x", finish="content_filter")) as service:
        (completion,) = await complete(service)
    assert (completion.finish_reason, completion.error) == ("error", "the service's content filter stopped the reply")
    with serving(chat(None)) as service:
        assert (await complete(service))[0].text == ""


def ended(text="Good.", usage=None, error=None, **choice):
    message = text if isinstance(text, dict) else {"role": "assistant", "content": text}
    body = {"choices": [{"message": message, "finish_reason": "stop"} | choice], "usage": usage, "error": error}
    return 200, JSON, json.dumps(body).encode()


@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls", "STOP", "", None])
async def test_a_reply_that_came_to_its_end_counts(reason):
    with serving(ended(finish_reason=reason)) as service:
        (completion,) = await complete(service)
    assert (completion.text, completion.finish_reason) == ("Good.", "length" if reason == "length" else "stop")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (ended("The gard", finish_reason="abort"), "ended a reply with finish_reason 'abort'"),
        (ended("The gard", finish_reason=["stop"]), "ended a reply with finish_reason"),
        (
            ended("The gard", error={"message": "overloaded", "code": 502}),
            "answered with an error; it said: overloaded",
        ),
        (ended("The gard", error="overloaded"), "answered with an error; it said: overloaded"),
        (ended("The gard", finish_reason="error", error={}), "finish_reason 'error'"),
        (ended("The gard", **{"finish_reason": "stop", "index": 0}, error={"message": "half \ud83d"}), "half \ufffd"),
    ],
)
async def test_what_failed_behind_a_200_is_tried_again_and_then_told(answer, message):
    with serving(answer) as service, pytest.raises(ClientError, match=rf"{message}.*tried 3 times"):
        await complete(service)
    assert len(service.requests) == 3
    with serving(answer, chat("whole")) as service:
        assert (await complete(service))[0].text == "whole"


async def test_an_error_behind_a_200_that_will_not_pass_is_told_at_once():
    broke = ended(error={"message": "Insufficient balance", "code": 402})
    with serving(broke) as service, pytest.raises(ClientError, match="Insufficient balance"):
        await complete(service)
    assert len(service.requests) == 1


@pytest.mark.parametrize(
    ("answer", "finish", "why"),
    [
        (ended({"content": None, "refusal": "I cannot"}), "error", "the model refused to reply: I cannot"),
        (ended({"content": None, "refusal": "n\ud83do"}), "error", "the model refused to reply: n\ufffdo"),
        (
            ended({"content": None, "reasoning_content": "hmm"}, finish_reason="length"),
            "length",
            "3 characters of think",
        ),
        (
            ended("", {"completion_tokens_details": {"reasoning_tokens": 64}}, finish_reason="length"),
            "length",
            "finish_reason length after 64 tokens of thinking",
        ),
        (ended(" "), "stop", "finish_reason stop"),
    ],
)
async def test_a_reply_without_text_says_why(answer, finish, why):
    with serving(answer) as service:
        (completion,) = await complete(service)
    assert completion.finish_reason == finish
    assert why in completion.error


@pytest.mark.parametrize(
    "usage",
    [None, [], "x", {"completion_tokens": float("nan")}, {"prompt_tokens": float("inf")}, {"prompt_tokens": "5"},
     {"prompt_tokens": None, "completion_tokens": -1}, {"prompt_tokens_details": [1], "completion_tokens_details": 1}],
)  # fmt: skip
async def test_a_count_that_is_none_costs_no_reply(usage):
    with serving(ended(usage=usage)) as service:
        (completion,) = await complete(service)
    assert (completion.text, completion.prompt_tokens, completion.completion_tokens) == ("Good.", 0, 0)


async def test_halves_of_characters_and_parts_are_read_as_text():
    parts = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a \ud83d b"}]
    for content in ("a \ud83d b", parts):
        with serving(ended(content)) as service:
            assert (await complete(service))[0].text == "a \ufffd b"


@pytest.mark.parametrize("name", ["temperature", "top_p", "seed"])
async def test_a_parameter_that_is_refused_is_left_out_once_and_told(name):
    told = []
    with serving(said(400, f"Unsupported parameter: {name}"), chat("hi")) as service:
        client = HttpClient("m", ByteTokenizer(), url=service.url, api_key=KEY, on_retry=told.append)
        params = SamplingParams(max_tokens=7, temperature=0.5, top_p=0.9, seed=3)
        for _ in range(2):
            assert (await client.complete(HELLO, params))[0].text == "hi"
        await client.close()
    assert [name in body for _, _, body in service.requests] == [True, False, False]
    assert len(told) == 1
    assert f"refuses {name}=" in told[0]


async def test_a_stream_that_was_not_asked_for_is_told_at_once():
    events = 200, {"content-type": "text/event-stream"}, b'data: {"choices": []}\n\ndata: [DONE]\n\n'
    with serving(events) as service, pytest.raises(ClientError, match="stream of events"):
        await complete(service)
    assert len(service.requests) == 1


async def test_a_model_that_wants_the_other_token_limit_gets_it():
    refusal = said(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.")
    with serving(refusal, chat("hi")) as service:
        await complete(service)
    assert [("max_tokens" in body, body.get("max_completion_tokens")) for _, _, body in service.requests] == [
        (True, None),
        (False, 7),
    ]


async def test_cancelling_ends_the_request():
    with serving("stall") as service:
        task = asyncio.create_task(complete(service))
        while not service.requests:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("url", ["localhost:8000/v1", "ftp://host/v1", "http://"])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ValueError, match="is not an http URL"):
        HttpClient("m", ByteTokenizer(), url=url)


def test_url_and_key_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("URL", "https://user:pass@example.org/v1/")
    monkeypatch.setenv("API_KEY", KEY)
    client = HttpClient("m", ByteTokenizer())
    assert KEY not in repr(vars(client)["_shown"])
    assert vars(client)["_shown"] == "https://example.org/v1"


def test_a_service_that_does_not_list_its_models_serves_none_known():
    with serving(chat("hi")) as service:  # it answers GET with 501
        assert served_models(service.url, "") == {}
    assert served_models(service.url, "") == {}


@pytest.mark.parametrize("window", [None, "4096", -1, 0, float("nan"), [4096]])
def test_a_window_that_is_none_is_not_known(monkeypatch, window):
    listed = json.dumps({"data": [{"id": "m", "max_model_len": window}]})
    monkeypatch.setattr(httpx, "get", lambda *_, **__: httpx.Response(200, text=listed))
    assert served_models("http://localhost/v1", "") == {"m": None}


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
WRITTEN = 'Hm.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def called(id_="c1", arguments='{"a": 1}'):
    return {"id": id_, "type": "function", "function": {"name": "add", "arguments": arguments}}


@pytest.mark.parametrize(
    ("messages", "shown"),
    [
        (  # calls of a message, whose results name them in another order
            [
                Message("assistant", (), (ToolCall("c1", "add", {"a": 1}), ToolCall("c2", "add", "{}"))),
                Message("tool", ("2",), tool_call_id="c2"),
                Message("tool", ("1",), tool_call_id="c1"),
            ],
            [
                {"role": "assistant", "content": None, "tool_calls": [called(), called("c2", "{}")]},
                {"role": "tool", "content": "2", "tool_call_id": "c2"},
                {"role": "tool", "content": "1", "tool_call_id": "c1"},
            ],
        ),
        (  # a reply's own text holds its call
            [Message("assistant", (tuple(WRITTEN.encode()),)), Message("tool", ("1",), tool_call_id="x")],
            [
                {"role": "assistant", "content": "Hm.", "tool_calls": [called("call_1_1")]},
                {"role": "tool", "content": "1", "tool_call_id": "call_1_1"},
            ],
        ),
        (  # a result of a call that nobody can read
            [Message("assistant", ("<tool_call>{",)), Message("tool", ("Write JSON.",))],
            [{"role": "assistant", "content": "<tool_call>{"}, {"role": "user", "content": "Write JSON."}],
        ),
        ([Message("assistant", (WRITTEN,))], [{"role": "assistant", "content": WRITTEN}]),  # no result follows
    ],
)
async def test_tools_go_out_as_openai_has_them(messages, shown):
    with serving(chat("x")) as service:
        client = HttpClient("m", ByteTokenizer(), url=service.url)
        await client.complete(Prompt((Message("user", ("q",)), *messages), tools=(TOOL,)), SamplingParams())
        await client.close()
    _, _, body = service.requests[0]
    assert body["tools"] == [TOOL]
    assert body["messages"] == [{"role": "user", "content": "q"}, *shown]


@pytest.mark.parametrize(("content", "text"), [("Hm.", WRITTEN), (None, WRITTEN.removeprefix("Hm.\n"))])
async def test_calls_that_come_back_apart_are_in_the_text(content, text):
    answer = {
        "message": {"role": "assistant", "content": content, "tool_calls": [called()]},
        "finish_reason": "tool_calls",
    }
    body = 200, {"content-type": "application/json"}, json.dumps({"choices": [answer]}).encode()
    with serving(body) as service:
        client = HttpClient("m", ByteTokenizer(), url=service.url)
        (completion,) = await client.complete(Prompt(HELLO.messages, tools=(TOOL,)), SamplingParams())
        await client.close()
    assert (completion.text, completion.finish_reason) == (text, "stop")
