"""A stock JetStream client against the gRPC port: it is served, and nothing that it sends ends the process."""

from __future__ import annotations

import inspect
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from importlib.metadata import version

import grpc
import pytest
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc
from jetstream.core.utils.async_multifuture import AsyncMultifuture

from memjax.serve.jetstream_grpc import orchestrator
from tests.serve.conftest import EOS, WINDOW, serving, wait_for

Request = jetstream_pb2.DecodeRequest


@pytest.fixture(scope="module")
def grpc_server(engine, loaded, tmp_path_factory):
    with serving(engine, loaded, tmp_path_factory.mktemp("grpc"), grpc_port=0) as server:
        yield server


@contextmanager
def connected(server):
    with grpc.insecure_channel(f"127.0.0.1:{server.parts.grpc.port}") as channel:
        yield jetstream_pb2_grpc.OrchestratorStub(channel)


@pytest.fixture
def stub(grpc_server):
    with connected(grpc_server) as stub:
        yield stub


def by_ids(ids, max_tokens=8, **options):
    return Request(token_content=Request.TokenContent(token_ids=ids), max_tokens=max_tokens, **options)


def by_text(text, max_tokens=8, **options):
    return Request(text_content=Request.TextContent(text=text), max_tokens=max_tokens, **options)


def drawn(stub, request) -> list[int]:
    return [
        token for response in stub.Decode(request, timeout=60) for token in response.stream_content.samples[0].token_ids
    ]


def status_of(stub, request) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as error:
        list(stub.Decode(request, timeout=60))
    assert error.value.details()
    return error.value.code()


def greedy(server, ids, max_tokens=8) -> dict:
    return server.post("/generate", {"token_ids": ids, "max_tokens": max_tokens, "temperature": 0}).json()["samples"][0]


def test_ids_in_give_the_greedy_ids_that_http_gives(stub, grpc_server):
    assert drawn(stub, by_ids([5, 6, 7])) == greedy(grpc_server, [5, 6, 7])["token_ids"]


def test_text_in_gives_the_text_that_http_gives(stub, grpc_server):
    ids = grpc_server.post("/tokenize", {"text": "héllo 你好"}).json()["token_ids"]
    responses = list(stub.Decode(by_text("héllo 你好", max_tokens=20), timeout=60))
    text = "".join(response.stream_content.samples[0].text for response in responses)
    assert text == greedy(grpc_server, ids, 20)["text"]


def test_requests_at_the_same_time_share_the_batch(stub, grpc_server):
    prompts = [[i + 1, i + 2] for i in range(8)]
    calls = [stub.Decode(by_ids(prompt), timeout=60) for prompt in prompts]
    replies = [[t for r in call for t in r.stream_content.samples[0].token_ids] for call in calls]
    assert replies == [greedy(grpc_server, prompt)["token_ids"] for prompt in prompts]


def test_the_health_check_says_that_it_lives(stub):
    assert stub.HealthCheck(jetstream_pb2.HealthCheckRequest(), timeout=60).is_live


@pytest.mark.parametrize(
    "request_",
    [
        Request(max_tokens=4),
        by_text("", 4),
        by_ids([], 4),
        by_ids([-1], 4),
        by_ids([10**6], 4),
        by_ids([1] * (WINDOW + 1), 4),
        by_ids([1], 0),
        by_ids([1], -3),
    ],
)
def test_what_cannot_be_run_is_an_invalid_argument(stub, request_):
    assert status_of(stub, request_) == grpc.StatusCode.INVALID_ARGUMENT
    assert stub.HealthCheck(jetstream_pb2.HealthCheckRequest(), timeout=60).is_live


def test_the_requests_that_end_a_stock_server_are_served(stub, grpc_server):
    """A first request, a session with ids, a long text, a client that leaves: test_jetstream_stock shows the deaths."""
    assert len(drawn(stub, by_ids([1, 2], 4))) <= 4  # any first request
    assert drawn(stub, by_ids([1, 2], 4, session_cache="x")) == drawn(stub, by_ids([1, 2], 4))
    assert list(stub.Decode(by_text("hello", max_tokens=100), timeout=60))
    call = stub.Decode(by_ids([EOS, 3], WINDOW), timeout=60)
    next(call)
    call.cancel()
    grpc_server.wait_idle()
    assert stub.HealthCheck(jetstream_pb2.HealthCheckRequest(), timeout=60).is_live
    assert drawn(stub, by_ids([5, 6, 7])) == greedy(grpc_server, [5, 6, 7])["token_ids"]


def test_a_client_that_leaves_gives_its_slot_back(stub, grpc_server):
    cancelled = grpc_server.parts.service.client.counters.cancelled
    calls = [stub.Decode(by_ids([1, 2 + i], WINDOW), timeout=60) for i in range(12)]
    for call in calls:
        call.cancel()
    wait_for(lambda: grpc_server.parts.service.under_way == 0)
    grpc_server.wait_idle()
    assert grpc_server.parts.service.client.counters.cancelled >= cancelled


def test_too_many_are_told_to_come_back(engine, loaded, tmp_path):
    with serving(engine, loaded, tmp_path, grpc_port=0, max_queue=0) as server, connected(server) as stub:
        calls = [stub.Decode(by_ids([i], WINDOW), timeout=60) for i in range(40)]
        codes = set()
        for call in calls:
            with suppress(grpc.RpcError):
                list(call)
            codes.add(call.code())
        assert codes == {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}


def test_the_key_is_asked_for_here_too(engine, loaded, tmp_path):
    with serving(engine, loaded, tmp_path, grpc_port=0, keys=("secret",)) as server, connected(server) as stub:
        assert status_of(stub, by_ids([1])) == grpc.StatusCode.UNAUTHENTICATED
        assert list(stub.Decode(by_ids([1], 2), timeout=60, metadata=[("authorization", "Bearer secret")]))


def test_jetstream_is_as_the_module_assumes():
    assert version("google-jetstream") == "0.2.2"
    service = orchestrator.LLMOrchestrator
    assert list(inspect.signature(service.__init__).parameters) == ["self", "driver"]
    source = inspect.getsource(service)
    asked = {name for name in ("live", "place_request_on_prefill_queue") if f"self._driver.{name}" in source}
    assert asked == {"live", "place_request_on_prefill_queue"}
    assert source.count("self._driver.") == 2
    assert "except queue.Full" in inspect.getsource(service.Decode)
    fields = orchestrator.ActiveRequest.__dataclass_fields__
    assert {"max_tokens", "return_channel", "prefill_content"} <= set(fields)
    sample = orchestrator.ReturnSample(text=["a"], token_ids=[1])
    assert (sample.text, sample.token_ids) == (["a"], [1])


async def test_the_multi_future_gives_results_in_order_and_then_the_error():
    channel = AsyncMultifuture()
    channel.add_result(1)
    channel.set_exception(ValueError("two"))
    assert await anext(channel) == 1
    with pytest.raises(ValueError, match="two"):
        await anext(channel)
    closed = AsyncMultifuture()
    closed.close()
    assert [result async for result in closed] == []
    cancelled = AsyncMultifuture()
    cancelled.cancel()
    with pytest.raises(CancelledError):
        await anext(cancelled)
