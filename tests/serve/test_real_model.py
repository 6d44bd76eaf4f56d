"""The OpenAI and JetStream clients against a process that serves a real model."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import grpc
import openai
import pytest
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

from tests.serve.test_process import served

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

QUESTION = [{"role": "user", "content": "Name the capital of France in one word."}]


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    model = os.environ.get("MEMJAX_REAL_MODEL")
    if not model:
        pytest.skip("MEMJAX_REAL_MODEL is not set")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    state = tmp_path_factory.mktemp("real")
    options = ["--max-length", "512", "--slots", "4", "--grpc-port", str(port), "--served-name", "real"]
    with served(Path(model), state, options=options) as server:
        yield server, port


@pytest.fixture(scope="module")
def client(real):
    with openai.OpenAI(base_url=f"{real[0].url}/v1", api_key="any", max_retries=0, timeout=600) as client:
        yield client


def chat(client, **options):
    return client.chat.completions.create(model="real", messages=QUESTION, **({"max_tokens": 8, "seed": 1} | options))


def test_chat_stream_samples_stop_seed_and_log_probabilities(client):
    greedy = chat(client, temperature=0, logprobs=True)
    assert "Paris" in greedy.choices[0].message.content
    assert all(token.logprob <= 0 for token in greedy.choices[0].logprobs.content)
    streamed = chat(client, temperature=0, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in streamed) == greedy.choices[0].message.content
    four = chat(client, n=4, temperature=1.5)
    assert len({choice.message.content for choice in four.choices}) > 1
    again = chat(client, n=4, temperature=1.5)
    assert [c.message.content for c in four.choices] == [c.message.content for c in again.choices]
    assert "is" not in chat(client, temperature=0, stop=["is"]).choices[0].message.content


def test_a_stock_jetstream_client_is_answered(real):
    request = jetstream_pb2.DecodeRequest(
        text_content=jetstream_pb2.DecodeRequest.TextContent(text="The capital of France is"), max_tokens=4
    )
    with grpc.insecure_channel(f"127.0.0.1:{real[1]}") as channel:
        responses = list(jetstream_pb2_grpc.OrchestratorStub(channel).Decode(request, timeout=600))
    assert "Paris" in "".join(response.stream_content.samples[0].text for response in responses)
