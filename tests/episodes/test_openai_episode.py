"""Agents written for the official async client: its attributes, and conversations that extend."""

from __future__ import annotations

import json

import numpy as np
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessage

from memjax.agents.scripted import TeacherClient, said
from memjax.environments.calculator import CALCULATOR, calculate
from memjax.episodes.run import run_episode
from memjax.tokenizer import Tokenizer
from memjax.trajectory import SamplingParams
from tests.episodes.drive import drive, drive_with, scripted, task
from tests.qwen_tokenizer import write_qwen_tokenizer

CALL = (
    '<tool_call>\n{"name":"calculator", "arguments": {"expression": "6*7"}}\n</tool_call>'  # not as a template has it
)
SAMPLING = SamplingParams(temperature=1.0, seed=1)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_qwen_tokenizer(tmp_path_factory.mktemp("qwen")))


async def written_for_openai(client, question: str, form: str) -> str:
    """An agent of somebody who knows nothing of episodes."""
    messages: list = [{"role": "developer", "content": [{"type": "text", "text": "Be exact."}]}]
    messages.append({"role": "user", "content": question})
    while True:
        response = await client.chat.completions.create(
            model="gpt-4o", messages=messages, tools=[CALCULATOR], max_completion_tokens=64
        )
        message = response.choices[0].message
        if form == "object":
            messages.append(message)
        elif form == "dump":
            messages.append(message.model_dump(exclude_none=True))
        elif form == "official":
            messages.append(ChatCompletionMessage.model_validate(message.model_dump()))
        else:
            calls = [call.model_dump() for call in message.tool_calls or []]
            messages.append(
                {"role": "assistant", "content": message.content} | ({"tool_calls": calls} if calls else {})
            )
        if response.choices[0].finish_reason != "tool_calls":
            if len(messages) > 10:
                return message.content
            messages.append({"role": "user", "content": "And again?"})
            continue
        for call in message.tool_calls:
            value = calculate(json.loads(call.function.arguments)["expression"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": value})


@pytest.mark.parametrize("form", ["object", "dump", "official", "dict"])
async def test_its_conversations_extend_by_the_ids_that_were_sampled(qwen: Tokenizer, form: str) -> None:
    replies = [CALL, "It is 42.", f"Again.\n{CALL}", CALL, "It is 42."]
    given = iter(replies)
    prompts = []

    async def write(prompt, params):
        prompts.append(prompt)
        return [said(next(given))]

    async def agent(task, episode):
        return await written_for_openai(episode.openai(), task.question, form)

    client = TeacherClient(write, qwen)
    trajectory = await run_episode(agent, task(question="6*7?"), client, qwen, SAMPLING)
    assert (trajectory.answer, trajectory.error) == ("It is 42.", None)
    assert "broken_conversations" not in trajectory.counters
    (conversation,) = trajectory.conversations
    end = qwen.eos_ids[0]
    sampled = [token_id for text in replies for token_id in [*qwen.encode_reply(text), end]]
    assert conversation.token_ids[conversation.loss_mask].tolist() == sampled
    assert prompts[0].messages[0].role == "system"


async def test_equal_replies_go_back_as_the_ids_of_their_own_place(qwen: Tokenizer) -> None:
    """The same text may be sampled in other tokens."""
    whole = qwen.encode("hello")
    split = [*qwen.encode("hel"), *qwen.encode("lo")]
    assert whole != split
    sampled = iter([split, whole, whole])

    class Model:
        model, window = "m", None

        async def complete(self, prompt, params):
            from dataclasses import replace

            ids = np.array([*next(sampled), qwen.eos_ids[0]], np.int32)
            prompt_ids = np.array(qwen.render(prompt.messages), np.int32)
            return [
                replace(said("hello"), prompt_ids=prompt_ids, token_ids=ids, logprobs=np.zeros(len(ids), np.float32))
            ]

    async def agent(task, episode):
        client, messages = episode.openai(), [{"role": "user", "content": "q"}]
        for _ in range(3):
            response = await client.chat.completions.create(model="m", messages=messages, max_tokens=8)
            messages += [response.choices[0].message, {"role": "user", "content": "q"}]
        return ""

    trajectory = await run_episode(agent, task(), Model(), qwen, SAMPLING)
    assert trajectory.error is None
    assert len(trajectory.conversations) == 1
    assert "broken_conversations" not in trajectory.counters


async def asked(*replies, text_only=False, sampling=SAMPLING, **arguments):
    """The response to one request, the client that was asked, and the trajectory."""
    found = []

    async def agent(task, episode):
        async with episode.openai() as client:
            found.append(await client.chat.completions.create(messages=[{"role": "user", "content": "q"}], **arguments))
        return found[0].choices[0].message.content or ""

    client = scripted(lambda prompt, params: replies[0], text_only=text_only)
    trajectory = await drive(agent, task(), client, sampling=sampling)
    return (found[0] if found else None), client, trajectory


@pytest.mark.parametrize("text_only", [False, True])
@pytest.mark.parametrize("reply", ["Hello.", CALL, f"Hm.\n{CALL}", "<tool_call>{"])
async def test_responses_have_the_official_clients_attributes(reply: str, text_only: bool) -> None:
    ours, _, _ = await asked(reply, text_only=text_only, model="x", tools=[CALCULATOR], max_tokens=200)
    official = ChatCompletion.model_validate(ours.model_dump())

    def compare(one, other):
        for name in type(other).model_fields:
            value, theirs = getattr(one, name), getattr(other, name)
            if isinstance(theirs, list):
                assert len(value) == len(theirs)
                for pair in zip(value, theirs, strict=True):
                    compare(*pair)
            elif hasattr(type(theirs), "model_fields"):
                compare(value, theirs)
            else:
                assert value == theirs, name

    compare(ours, official)
    assert ours.usage.total_tokens == ours.usage.prompt_tokens + ours.usage.completion_tokens > 0
    has_call = "calculator" in reply
    assert ours.choices[0].finish_reason == ("tool_calls" if has_call else "stop")
    assert ours.choices[0].message.content == (reply.partition("<tool")[0].strip() or None if has_call else reply)


async def test_without_tools_a_reply_is_its_text():
    response, _, _ = await asked(CALL, max_tokens=200)
    assert (response.choices[0].message.content, response.choices[0].message.tool_calls) == (CALL, None)


async def test_a_reply_that_was_cut_says_so():
    response, client, _ = await asked("long " * 20, max_tokens=9, stop="x", seed=3)
    assert response.choices[0].finish_reason == "length"
    assert (client.params[0].max_tokens, client.params[0].stop) == (9, ("x",))
    assert client.params[0].seed != 3  # the episode's own draws


async def test_without_a_limit_the_runs_sampling_and_the_window_bound_a_reply():
    _, client, _ = await asked("a", stop=["x", "y"])
    assert (client.params[0].max_tokens, client.params[0].stop) == (SAMPLING.max_tokens, ("x", "y"))

    async def agent(task, episode):
        await episode.openai().chat.completions.create(model="m", messages=[{"role": "user", "content": "q"}])
        return ""

    small = scripted(window=100)
    assert (await drive(agent, task(), small)).error is None
    assert small.params[0].max_tokens < 100


@pytest.mark.parametrize(
    ("temperature", "carries_loss"), [(None, True), (1.0, True), (openai.NOT_GIVEN, True), (0.3, False), (0, False)]
)
async def test_a_call_at_another_temperature_is_honoured_and_carries_no_loss(temperature, carries_loss):
    _, client, trajectory = await asked("a", temperature=temperature)
    assert client.params[0].temperature == (1.0 if carries_loss else temperature)
    assert trajectory.conversations[0].loss_mask.any() == carries_loss
    assert trajectory.counters.get("off_temperature_calls", 0) == int(not carries_loss)


async def test_arguments_that_change_no_reply_are_ignored():
    ignored = {"timeout": 5, "user": "u", "extra_headers": {"a": "b"}, "extra_query": {"a": "b"}, "store": False}
    more = {"metadata": {}, "service_tier": "auto", "safety_identifier": "s", "prompt_cache_key": "k"}
    response, client, trajectory = await asked("a", **ignored, **more)
    assert (response.choices[0].message.content, len(client.prompts), trajectory.error) == ("a", 1, None)


@pytest.mark.parametrize(
    "arguments",
    [
        {"stream": True},
        {"n": 2},
        {"logprobs": True},
        {"top_logprobs": 3},
        {"top_p": 0.5},
        {"tool_choice": "required"},
        {"logit_bias": {"1": 2}},
        {"response_format": {"type": "json_object"}},
        {"extra_body": {"top_k": 3}},
        {"functions": []},
    ],
)
async def test_what_is_not_supported_is_refused_by_name(arguments):
    _, client, trajectory = await asked("a", **arguments)
    assert f"does not support {next(iter(arguments))}=" in trajectory.error
    assert client.prompts == []


async def test_what_changes_nothing_is_taken():
    neutral = {"stream": False, "n": 1, "top_p": 1.0, "tool_choice": "auto", "user": None, "logprobs": openai.omit}
    neutral |= {"timeout": 30, "user": "me", "store": False, "metadata": {}, "extra_headers": {"x": "y"}}
    assert (await asked("a", **neutral))[2].error is None


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ({"role": "function", "content": "x"}, "role 'function'"),
        ({"content": "x"}, "role None"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "part of type 'image_url'"),
        ({"role": "assistant", "content": None, "function_call": {"name": "f"}}, "use tool_calls"),
    ],
)
async def test_a_message_that_cannot_be_shown_is_refused(message, sentence):
    async def agent(task, episode):
        await episode.openai().chat.completions.create(model="m", messages=[message])
        return ""

    assert sentence in (await drive(agent, task(), scripted())).error


async def test_anything_else_of_the_client_is_named():
    async def agent(task, episode):
        return await episode.openai().responses.create(model="m")

    assert "no 'responses'" in (await drive(agent, task(), scripted())).error


async def test_a_resumed_agent_of_this_kind_replays(tmp_path):
    async def agent(task, episode):
        return await written_for_openai(episode.openai(), task.question, "dict")

    replies = iter([CALL, *["It is 42."] * 9])
    whole = await drive_with(tmp_path / "j", agent, task(), scripted(lambda *_: next(replies)))
    client = scripted()
    again = await drive_with(tmp_path / "j", agent, task(), client)
    assert (again.answer, again.error, client.prompts) == (whole.answer, None, [])
