"""Whatever a service says, there is an answer that it gave, or the reader is told why there is none.

And whatever a model thinks, what it reads next has nothing of it.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from memjax.agents.memagent import MemAgent
from memjax.cli import app
from memjax.episodes.run import run_episode
from memjax.rollout.fake import ByteTokenizer, ScriptedClient
from memjax.rollout.http import RetryPolicy
from memjax.trajectory import SamplingParams, Task

MEMORY, ANSWER = "The gardener kept the key.", "gardener"
BUDGETS = ["--chunk-tokens", "100", "--memory-tokens", "64", "--answer-tokens", "64"]
FINISHED = ("stop", "length", "tool_calls", None)
FAILED = (
    "error",
    "abort",
    "network_error",
    "insufficient_system_resource",
    "model_context_window_exceeded",
    "gibberish",
)


@dataclass(frozen=True)
class Said:
    """One thing that a service may say where a reply is due. `words` is what of it must reach the reader."""

    status: int = 200
    reason: str | None = "stop"
    text: str | None = "good"  # "good" stands for what is right at this turn
    error: str = ""
    refusal: str = ""
    thinking: str = ""
    usage: Any = field(default_factory=dict)

    @property
    def is_reply(self) -> bool:
        """Whether this is a finished reply that says something."""
        finished = self.status == 200 and not self.error and self.reason in FINISHED
        return finished and bool((self.text or "").strip())

    @property
    def words(self) -> str:
        """The service's own words on why there is no reply."""
        if self.error or self.status != 200:
            return self.error
        return self.refusal if self.reason in FINISHED else ""

    def body(self, good: str) -> dict[str, Any]:
        """As JSON."""
        if self.status != 200:
            return {"error": {"message": self.error}}
        message = {"role": "assistant", "content": good if self.text == "good" else self.text}
        message |= {"refusal": self.refusal} if self.refusal else {}
        message |= {"reasoning_content": self.thinking} if self.thinking else {}
        choice = {"index": 0, "message": message, "finish_reason": self.reason}
        return {"choices": [choice], "usage": self.usage} | ({"error": {"message": self.error}} if self.error else {})


class Service:
    """A service that says `said` in memory turns, in the final turn, or in both, and answers well otherwise."""

    def __init__(self) -> None:
        self.url, self.said, self.turns = "", Said(), ("memory", "final")

    def answer(self, prompt: str) -> tuple[int, dict[str, Any]]:
        """The status and the body for a prompt."""
        turn = "final" if "boxed" in prompt else "memory"
        good = rf"\boxed{{{ANSWER}}}" if turn == "final" else MEMORY
        said = self.said if turn in self.turns else Said()
        return said.status, said.body(good)


@contextmanager
def odd_service() -> Iterator[Service]:
    service = Service()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(200, {"data": []})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(*service.answer(asked["messages"][-1]["content"]))

        def _send(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    service.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with odd_service() as service:
        yield service


@pytest.fixture
def document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("API_KEY", "")
    monkeypatch.setattr(RetryPolicy, "wait", lambda *_: 0.0)
    path = tmp_path / "text.txt"
    path.write_text("The gardener kept the key.\n" * 20)
    return path


words = st.sampled_from(["", "upstream died", "Insufficient balance", "no room"])
usages = st.sampled_from(
    [{}, None, {"prompt_tokens": None}, {"completion_tokens": float("nan")}, {"prompt_tokens": "5"}]
)
sayings = st.builds(
    Said,
    status=st.sampled_from([200] * 9 + [400, 402, 429, 500, 503]),
    reason=st.sampled_from(FINISHED * 2 + FAILED),
    text=st.sampled_from(["good", "good", None, "", " \n"]),
    error=st.just("") | words,
    refusal=st.sampled_from(["", "", "I cannot help with that"]),
    thinking=st.sampled_from(["", "let me think about it"]),
    usage=usages,
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(said=sayings, turns=st.sampled_from([("memory",), ("final",), ("memory", "final")]))
@example(said=Said(reason="error", text="The gard"), turns=("memory", "final"))
@example(said=Said(reason="abort", text="The gard"), turns=("memory", "final"))
@example(said=Said(error="Upstream provider overloaded"), turns=("memory",))
@example(said=Said(text=None, refusal="I cannot help with that"), turns=("final",))
@example(said=Said(text=None, reason="length", thinking="let me think"), turns=("memory",))
@example(said=Said(text=""), turns=("memory", "final"))
@example(said=Said(usage={"completion_tokens": float("nan")}), turns=("memory", "final"))
def test_an_answer_was_given_or_its_absence_is_told(
    service: Service, document: Path, said: Said, turns: tuple[str, ...]
) -> None:
    service.said, service.turns = said, turns
    asked = ["ask", "Who kept the key?", str(document), "--url", service.url, "--model", "stub", *BUDGETS]
    ended = CliRunner().invoke(app, [*asked, "--json", "--fresh"])
    told = ended.stderr
    assert "Traceback" not in told
    assert isinstance(ended.exception, SystemExit | None)
    if ended.exit_code:
        assert not ended.stdout.strip()
        assert "memjax: " in told
        assert said.words in told
        assert not said.is_reply or said.usage, "a good reply was not taken"
        return
    result = json.loads(ended.stdout, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    (answered,) = result["answers"]
    if said.is_reply:
        assert (answered["answer"], answered["notes"]) == (ANSWER, [])
        return
    assert said.status == 200
    assert said.reason in FINISHED
    assert not said.error
    for turn, what in (("memory", "memories"), ("final", "answers")):
        is_told = any(f"{what} came back empty" in note and note in told for note in answered["notes"])
        assert is_told == (turn in turns)
    assert answered["answer"] == ("" if "final" in turns else ANSWER)
    assert answered["memory"] == ("" if "memory" in turns else MEMORY)


thoughts = st.recursive(
    st.sampled_from(["THOUGHT", "THOUGHT\n\nTHOUGHT", "\\boxed{THOUGHT}"]),
    lambda inner: inner.map("a <think>{} b".format) | inner.map("a\n<think>{}</think>".format),
    max_leaves=3,
)
closed = thoughts.map("<think>{}</think>".format) | thoughts.map("{}</think>".format)  # the prompt may have opened it
unclosed = thoughts.filter(lambda thought: "</think>" not in thought).map("\n <think>{}".format)
spoken = st.sampled_from(["", " \n", "The key is red.", "one\n\ntwo"])
tags = st.sampled_from(["", "</memory>", "< /Memory >\n<section>", "<memory>" * 60])


@settings(max_examples=60, deadline=None)
@given(before=st.just("") | closed, said=spoken, tag=tags, after=st.just("") | unclosed)
def test_a_memory_is_what_was_said_and_closes_no_section(before: str, said: str, tag: str, after: str) -> None:
    client = ScriptedClient(lambda prompt, params: before + said + tag + after)
    agent = MemAgent(question=50, chunk=200, memory=400, answer=50)
    turns = asyncio.run(
        run_episode(agent, Task("t", "Which?", "x" * 350), client, ByteTokenizer(), SamplingParams(temperature=0))
    )
    assert turns.error is None
    shown = [prompt.messages[-1].text(ByteTokenizer().decode) for prompt in client.prompts]
    assert len(shown) == 3
    assert not any("THOUGHT" in prompt for prompt in shown)
    is_blank = not (said + tag).strip()
    assert turns.counters["empty_updates"] == 2 * is_blank
    prompts = agent.loaded_prompts
    for prompt in shown[1:]:
        memory = prompt.split("<memory>\n")[1].split("\n</memory>")[0]
        if is_blank:
            assert memory == prompts.no_memory
        else:
            assert memory.startswith(said.strip())
        assert not any(f"{bracket}{name}" in memory.lower() for name in prompts.tags for bracket in ("<", "</", "< /"))
        assert len(memory.encode()) <= agent.memory
