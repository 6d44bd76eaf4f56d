"""The official OpenAI client against a server."""

from __future__ import annotations

import openai
import pytest

from tests.serve.conftest import wait_for

MESSAGES = [{"role": "user", "content": "What is in the lamp room?"}]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60) as client:
        yield client


def chat(client, **options):
    options = {"max_tokens": 12, "temperature": 1.0, "seed": 1} | options
    return client.chat.completions.create(model="tiny", messages=MESSAGES, **options)


def test_a_chat_has_text_a_reason_and_usage(client):
    reply = chat(client)
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason in ("stop", "length")
    assert reply.usage.completion_tokens <= 12
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_a_stream_gives_the_text_of_the_whole_answer(client):
    whole = chat(client)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert reasons == [whole.choices[0].finish_reason]


def test_four_samples_are_four_texts_and_stream_as_such(client):
    whole = chat(client, n=4)
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 4
    streamed = [""] * 4
    for chunk in chat(client, n=4, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_the_same_seed_gives_the_same_text_and_another_seed_another(client):
    first, again, other = (chat(client, seed=seed).choices[0].message.content for seed in (7, 7, 8))
    assert first == again != other


def test_a_stop_string_ends_the_text_before_it(client):
    text = chat(client, max_tokens=30).choices[0].message.content
    stop = text[5:7]
    reply = chat(client, max_tokens=30, stop=[stop])
    assert reply.choices[0].message.content == text[: text.index(stop)]
    assert reply.choices[0].finish_reason == "stop"


def test_every_token_has_its_log_probability(client):
    reply = chat(client, logprobs=True)
    content = reply.choices[0].logprobs.content
    assert len(content) == reply.usage.completion_tokens
    assert all(token.logprob <= 0 for token in content)
    joined = b"".join(bytes(token.bytes) for token in content).decode(errors="replace")
    assert joined == reply.choices[0].message.content


def test_an_assistant_message_at_the_end_is_continued(client, server):
    opened = [*MESSAGES, {"role": "assistant", "content": "The lamp"}]
    ids = server.post("/tokenize", {"messages": opened}).json()["token_ids"]
    assert server.parts.service.tokenizer.decode(ids).endswith("The lamp")
    reply = client.chat.completions.create(model="tiny", messages=opened, max_tokens=4, temperature=0)
    drawn = server.post("/generate", {"token_ids": ids, "max_tokens": 4, "temperature": 0}).json()["samples"][0]
    assert reply.choices[0].message.content == drawn["text"]


def test_text_completions_take_text_lists_and_ids(client, server):
    text = "The lamp room is"
    ids = server.post("/tokenize", {"text": text}).json()["token_ids"]
    options = {"model": "tiny", "max_tokens": 6, "temperature": 0, "logprobs": 0}
    one = client.completions.create(prompt=text, **options)
    by_ids = client.completions.create(prompt=ids, **options)
    several = client.completions.create(prompt=["Another", text], **options)
    assert one.choices[0].text == by_ids.choices[0].text == several.choices[1].text
    assert len(one.choices[0].logprobs.token_logprobs) == one.usage.completion_tokens
    streamed = [""] * 2
    for chunk in client.completions.create(prompt=["Another", text], stream=True, **options):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == [choice.text for choice in several.choices]


def test_a_stream_that_is_closed_gives_its_slot_back(client, server):
    stream = chat(client, stream=True, max_tokens=200, temperature=5.0)
    next(iter(stream))
    stream.close()
    wait_for(lambda: server.slots_used() == 0)
    server.wait_idle()


def test_the_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["tiny", "memory/tiny"]
    assert client.models.retrieve("memory/tiny").id == "memory/tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_an_unknown_model_and_a_long_prompt_are_told_so(client):
    with pytest.raises(openai.NotFoundError, match="no model 'gpt'"):
        client.chat.completions.create(model="gpt", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="memory/tiny"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "long " * 300}])
