"""`echo` with `logprobs`: every token of a prompt as the model expected it, against a forward pass over all of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memjax.models import qwen2
from tests.serve.conftest import WINDOW

LONGEST = np.random.default_rng(0).integers(0, 250, WINDOW).tolist()


def scored(server, prompt, **changes) -> dict:
    body = {"model": "tiny", "prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 0, "temperature": 0}
    response = server.post("/v1/completions", body | changes)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture(scope="module")
def table(loaded) -> np.ndarray:
    """Log probabilities after every position of the longest prompt: of one forward pass over all of it."""

    def log_probabilities(params, tokens_BT):
        positions_BT, segments_BT = jnp.arange(WINDOW)[None], jnp.ones_like(tokens_BT)
        hidden_BTD = qwen2.forward(params, loaded.config, loaded.options, tokens_BT, positions_BT, segments_BT)
        logits = qwen2.logits(params, loaded.config, loaded.options, hidden_BTD[0])
        return jax.nn.log_softmax(logits[:, : loaded.tokenizer.size], axis=-1)

    return np.asarray(jax.jit(log_probabilities)(loaded.params, jnp.asarray([LONGEST])))


@pytest.mark.parametrize("length", [1, 2, 64, 65, 128, 129, 300, WINDOW])
def test_they_are_those_of_one_forward_pass(server, loaded, table, length):
    ids = LONGEST[:length]
    whole = scored(server, ids)
    logprobs = whole["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    np.testing.assert_allclose(logprobs["token_logprobs"][1:], table[np.arange(length - 1), ids[1:]], atol=2e-4)
    top = [next(iter(one.values())) for one in logprobs["top_logprobs"][1:]]
    np.testing.assert_allclose(top, table[: length - 1].max(axis=1), atol=2e-4)
    likeliest = [loaded.tokenizer.token_bytes(int(one)) for one in table[: length - 1].argmax(axis=1)]
    named = [next(iter(one)) for one in logprobs["top_logprobs"][1:]]
    assert named == [one.decode("utf-8", errors="replace") for one in likeliest]
    assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == length
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (length, 0)
    assert server.engine.compilations == 0


def test_a_likeliest_token_has_the_very_number_of_the_top_one(server):
    """lm-eval calls a continuation greedy by comparing the two numbers."""
    prompt = scored(server, "Hello", max_tokens=12)["choices"][0]["logprobs"]
    drawn = server.post(
        "/generate", {"token_ids": server.parts.service.tokenizer.encode("Hello"), "max_tokens": 12, "temperature": 0}
    ).json()["samples"][0]["token_ids"]
    ids = server.parts.service.tokenizer.encode("Hello") + drawn
    again = scored(server, ids)["choices"][0]["logprobs"]
    for token, top in list(zip(again["token_logprobs"], again["top_logprobs"], strict=True))[-len(drawn) :]:
        assert token == max(top.values())
    np.testing.assert_allclose(again["token_logprobs"][1:], prompt["token_logprobs"][1:], atol=2e-4)


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_prompt_stands_before_its_reply_with_the_right_offsets(server, temperature):
    prompts = ["Hello wörld", "日本 a"]
    whole = scored(server, prompts, max_tokens=3, n=2, temperature=temperature, seed=1)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    for choice in whole["choices"]:
        logprobs, text = choice["logprobs"], choice["text"]
        prompt = prompts[choice["index"] // 2]
        assert text.startswith(prompt)
        count = len(server.parts.service.tokenizer.encode(prompt))
        assert {len(column) for column in logprobs.values()} == {len(logprobs["tokens"])}
        assert logprobs["text_offset"][count] == len(prompt)
        for token, at in list(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))[:count]:
            assert "\ufffd" in token or prompt[at:].startswith(token)
        assert (logprobs["top_logprobs"][-1] is None) == (temperature == 1)


def test_an_echo_alone_is_the_text_and_scores_nothing(server):
    choice = scored(server, "Hello world", logprobs=None, max_tokens=2)["choices"][0]
    assert choice["text"].startswith("Hello world")
    assert choice["logprobs"] is None


def test_a_stream_has_offsets_too(server):
    body = {"model": "tiny", "prompt": "Hello", "logprobs": 0, "max_tokens": 3, "stream": True}
    assert '"text_offset": [0]' in server.post("/v1/completions", body).text


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"echo": False}, "max_tokens is 0"),
        ({"stream": True}, "echo: a prompt is not streamed"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": [5] * (WINDOW + 1)}, "maximum context length is 640 tokens"),
        ({"prompt": [5] * WINDOW, "max_tokens": 1}, "maximum context length is 640 tokens"),
        ({"prompt": [5] * 10, "max_tokens": WINDOW}, "maximum context length is 640 tokens"),
        ({"logprobs": 3}, "at most 1"),
        ({"prompt": [300]}, "token ids must be in"),
    ],
)
def test_what_cannot_be_scored_is_refused(server, changes, says):
    body = {"model": "tiny", "prompt": "Hello", "echo": True, "logprobs": 1, "max_tokens": 0}
    response = server.post("/v1/completions", body | changes)
    assert response.status_code == 400, response.text
    assert says in response.json()["error"]["message"]
    server.wait_idle()
