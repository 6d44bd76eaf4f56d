"""Tools over the official OpenAI client: a scripted model with Qwen2.5's tokenizer, and the tiny one."""

from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import replace

import httpx
import numpy as np
import openai
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memjax.rollout.client import Message, Prompt, ToolCall
from memjax.rollout.http import HttpClient
from memjax.rollout.reply import GrowingReply
from memjax.rollout.scheduler import ANYONE, Counters, TokenEvent
from memjax.rollout.tool_calls import parse_tool_calls
from memjax.serve.settings import ServeSettings
from memjax.serve.tool_chat import CallReader, SampledCalls, StreamedCalls
from memjax.tokenizer import Tokenizer
from memjax.tokenizer_files import read_json, write_json
from memjax.trajectory import Completion, SamplingParams
from tests.qwen_tokenizer import write_qwen_tokenizer
from tests.serve.conftest import running_server, serving
from tests.tiny_model import write_tiny_tokenizer

ASK = [{"role": "user", "content": "2*3?"}]
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Arithmetic.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}
SEARCH = {"type": "function", "function": {"name": "_search"}}
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2*3"}}\n</tool_call>'
ODD = "Let me see.\n\n<tool_call>{'name':'calculator','arguments':{'expression':'2*3'}}</tool_call> Now I wait."
TWO = f"{CALL}\n{CALL}"
HALF = f'Hm.\n{CALL}\n<tool_call>\n{{"name": "calculator", "argu'


class ScriptedModel:
    """A backend whose next reply is known beforehand; keeps the prompts it was given."""

    model, window, slots, running, failure = "scripted", 4000, 4, 0, None
    compilations = weights_version = 0
    counters = Counters()

    def __init__(self, directory):
        self.tokenizer = Tokenizer.load(directory)
        self.with_control = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.reply, self.prompts, self.sampled = "", [], []

    def warm_up(self):
        pass

    async def close(self):
        pass

    def submit(self, ids, params, *, shared=0, on_token=None, caller=ANYONE):
        self.prompts.append(list(ids))
        self.sampled = self.with_control.encode(self.reply, add_special_tokens=False).ids
        drawn = [self._draw(sample, params, on_token) for sample in range(params.n)]
        future: Future[list[Completion]] = Future()
        future.set_result([replace(one, prompt_ids=np.asarray(ids, np.int32), prompt_tokens=len(ids)) for one in drawn])
        return future

    def _draw(self, sample, params, on_token):
        growing = GrowingReply(self.tokenizer, self.tokenizer.eos_ids, params.stop, params.max_tokens)
        for token in [*self.sampled, self.tokenizer.eos_ids[0]]:
            growing.push(token, -0.5)
            on_token(TokenEvent(sample, token, -0.5, growing.take_text(), growing.finish_reason))
            if growing.finish_reason:
                break
        ids = np.asarray(growing.token_ids, np.int32)
        logprobs = np.full(len(ids), -0.5, np.float32)
        return Completion(ids[:0], ids, logprobs, growing.text, growing.finish_reason, 0, len(ids))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return ScriptedModel(write_qwen_tokenizer(tmp_path_factory.mktemp("qwen")))


@pytest.fixture(scope="module")
def client(model, model_directory, tmp_path_factory):
    where = ServeSettings(model=str(model_directory), state_dir=tmp_path_factory.mktemp("state"), port=0)
    with (
        running_server(model, where) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60) as client,
    ):
        yield client


def ask(client, messages=ASK, *, tools=(CALCULATOR, SEARCH), model="scripted", **options):
    return client.chat.completions.create(model=model, messages=messages, tools=list(tools), **options)


def said(message):
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    return message.content, calls


ARGUMENTS = ("calculator", '{"expression": "2*3"}')
REPLIES = {
    CALL: (None, [ARGUMENTS]),
    ODD: ("Let me see.", [ARGUMENTS]),
    TWO: (None, [ARGUMENTS] * 2),
    '{"name": "calculator", "arguments": {"expression": "2*3"}}': (None, [ARGUMENTS]),
    '```json\n{"name": "calculator", "arguments": {"expression": "2*3"}}\n```': (None, [ARGUMENTS]),
    HALF: (HALF, []),
    "<tool_call>what?</tool_call>": ("<tool_call>what?</tool_call>", []),
    " It is 6, <b>six</b> <tool ": (" It is 6, <b>six</b> <tool ", []),
    '{"six": 6}\n': ('{"six": 6}\n', []),
    "<tool_cal": ("<tool_cal", []),
    "": ("", []),
}


@pytest.mark.parametrize("reply", REPLIES)
def test_the_calls_of_a_reply_are_told_whole_and_streamed(client, model, reply):
    model.reply = reply
    content, calls = REPLIES[reply]
    choice = ask(client).choices[0]
    assert said(choice.message) == (content, calls)
    assert choice.finish_reason == ("tool_calls" if calls else "stop")
    chunks = [chunk.choices[0] for chunk in ask(client, stream=True)]
    texts = [chunk.delta.content for chunk in chunks if chunk.delta.content]
    assert "".join(texts) == (content or "")
    told = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert [(call.function.name, call.function.arguments) for call in told] == calls
    assert [call.index for call in told] == list(range(len(calls)))
    assert len({call.id for call in told}) == len(calls)
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [choice.finish_reason]
    assert not (calls and any("<" in text for text in texts))


PIECES = st.sampled_from(
    [
        "<tool",
        "_call>",
        "</tool_call>",
        '{"name": "f", ',
        '"arguments": {}}',
        "<",
        " ",
        "\n",
        "```",
        "[",
        "]",
        ",",
        "Hm.",
    ]
)


@given(st.lists(PIECES | st.text(max_size=2), min_size=1, max_size=12))
@example(["Hm. <tool", "_call>", '{"name": "f"}', "x"])
@settings(max_examples=120, deadline=None)
def test_any_stream_tells_what_the_whole_reply_does(model, pieces):
    reader = CallReader(SampledCalls(), model.tokenizer, [], one=False)
    streamed = StreamedCalls(reader)
    events = [TokenEvent(0, 5, 0.0, text, None if i < len(pieces) else "stop") for i, text in enumerate(pieces, 1)]
    shown = [streamed.take(event) for event in events]
    content, calls = reader.read("".join(pieces), [5])
    assert "".join(text for text, _ in shown) == content
    assert [call.arguments for call in shown[-1][1]] == [call.arguments for call in calls]
    assert not any(calls for _, calls in shown[:-1])


def test_text_before_a_call_streams_as_it_comes(client, model):
    model.reply = f"One, two, three.\n{CALL}"
    with client.chat.completions.stream(model="scripted", messages=ASK, tools=[CALCULATOR]) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
    assert len(pieces) > 3
    assert "".join(pieces) == "One, two, three."
    message = stream.get_final_completion().choices[0].message
    assert said(message) == ("One, two, three.", [ARGUMENTS])


@pytest.mark.parametrize("n", [1, 3])
def test_samples_and_log_probabilities_come_with_calls(client, model, n):
    model.reply = ODD
    whole = ask(client, n=n, logprobs=True)
    assert [said(choice.message) for choice in whole.choices] == [REPLIES[ODD]] * n
    assert len({choice.message.tool_calls[0].id for choice in whole.choices}) == n
    drawn = len(model.sampled) + 1
    assert all(len(choice.logprobs.content) == drawn for choice in whole.choices)
    texts, tokens = [""] * n, [0] * n
    for chunk in ask(client, n=n, logprobs=True, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        tokens[choice.index] += len(choice.logprobs.content) if choice.logprobs else 0
    assert (texts, tokens) == (["Let me see."] * n, [drawn] * n)


def test_a_reply_that_was_cut_off_says_so(client, model):
    model.reply = TWO
    one = len(model.with_control.encode(CALL, add_special_tokens=False).ids)
    choice = ask(client, max_tokens=one).choices[0]
    assert (said(choice.message), choice.finish_reason) == ((None, [ARGUMENTS]), "length")
    choice = ask(client, max_tokens=one - 8).choices[0]
    assert choice.message.tool_calls is None
    assert choice.message.content.startswith("<tool_call>")
    assert choice.finish_reason == "length"


def told_again(reply):
    call = reply.choices[0].message.tool_calls[0]
    return [*ASK, reply.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "6"}]


@pytest.mark.parametrize("reply", [CALL, ODD, TWO])
@pytest.mark.parametrize("options", [{}, {"parallel_tool_calls": False}], ids=["any", "one"])
def test_a_history_has_the_ids_that_were_sampled(client, model, reply, options):
    model.reply = reply
    history = told_again(ask(client, **options))
    before = [*model.prompts[-1], *model.sampled[: None if not options else model.sampled.index(151658) + 1]]
    ask(client, history)
    after = model.prompts[-1][len(before) :]
    assert model.prompts[-1][: len(before)] == before
    assert (after[0], after.count(after[0])) == (model.tokenizer.eos_ids[0], 2)  # of the call, and of its result
    assert model.tokenizer.decode(model.prompts[-1]).endswith("</tool_response>\nassistant\n")


def test_a_history_of_another_server_is_written_by_the_template(client, model):
    calls = [{"id": "call_x", "type": "function", "function": {"name": "calculator", "arguments": ARGUMENTS[1]}}]
    result = {"role": "tool", "tool_call_id": "call_x", "content": [{"type": "text", "text": "6"}]}
    model.reply = "6"
    ask(client, [*ASK, {"role": "assistant", "content": None, "tool_calls": calls}, result])
    messages = [Message("user", ("2*3?",)), Message("assistant", (), (ToolCall("call_x", *ARGUMENTS),))]
    expected = model.tokenizer.render([*messages, Message("tool", ("6",))], tools=[CALCULATOR, SEARCH])
    assert model.prompts[-1] == expected
    drawn = model.with_control.encode(CALL, add_special_tokens=False).ids
    assert str(drawn)[1:-1] in str(expected)  # as the model writes it


async def test_our_own_client_is_given_the_text_that_was_drawn(client, model):
    ours = HttpClient("scripted", model.tokenizer, url=str(client.base_url))
    try:
        for model.reply in REPLIES:
            prompt = Prompt((Message("user", ("2*3?",)),), tools=(CALCULATOR,))
            text = (await ours.complete(prompt, SamplingParams(max_tokens=200)))[0].text
            assert parse_tool_calls(text, "") == parse_tool_calls(model.reply, "")
            assert model.prompts[-1] == model.tokenizer.render_prompt(prompt).ids
        reply, result = Message("assistant", (CALL,)), Message("tool", ("6",))
        prompt = Prompt((*prompt.messages, reply, result), tools=prompt.tools)
        await ours.complete(prompt, SamplingParams(max_tokens=200))
        with_ids = Message("assistant", (model.with_control.encode(CALL, add_special_tokens=False).ids,))
        same = Prompt((prompt.messages[0], with_ids, result), tools=prompt.tools)
        assert model.prompts[-1] == model.tokenizer.render_prompt(same).ids
    finally:
        await ours.close()


def test_only_calls_told_unchanged_are_taken_for_those_that_were_drawn():
    call, sampled = ToolCall("1", "f", "{}"), SampledCalls()
    sampled.keep("Hm", (call,), [5])
    assert sampled.ids("Hm", (call,)) == [5]
    assert sampled.ids("", (call,)) is None
    assert sampled.ids("Hm", (replace(call, arguments='{"a": 1}'),)) is None
    for i in range(1023):
        sampled.keep("", (ToolCall(f"x{i}", "f", "{}"),), [i])
        assert sampled.ids("Hm", (call,)) == [5]
    sampled.keep("", (ToolCall("y", "f", "{}"),), [0])
    assert sampled.ids("", (ToolCall("x0", "f", "{}"),)) is None
    assert sampled.ids("Hm", (call,)) == [5]


def test_no_tools_are_shown_and_no_calls_read_where_none_are_wanted(client, model):
    model.reply = CALL
    choice = ask(client, tool_choice="none").choices[0]
    assert (said(choice.message), choice.finish_reason) == ((CALL, []), "stop")
    assert model.prompts[-1] == model.tokenizer.render([Message("user", ("2*3?",))])


@pytest.mark.parametrize(
    ("choice", "opening"),
    [
        ("auto", ""),
        ("required", '<tool_call>\n{"name":'),
        ({"type": "function", "function": {"name": "_search"}}, '<tool_call>\n{"name": "_search", "arguments":'),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_that_must_call_begins_as_a_call(client, model, choice, opening, stream):
    call = '<tool_call>\n{"name": "_search", "arguments": {}}\n</tool_call>'
    model.reply = call.removeprefix(opening)
    if stream:
        with client.chat.completions.stream(
            model="scripted", messages=ASK, tools=[CALCULATOR, SEARCH], tool_choice=choice
        ) as events:
            reply = events.get_final_completion()
        assert reply.choices[0].message.content in (None, "")
    else:
        reply = ask(client, tool_choice=choice)
        assert reply.choices[0].message.content is None
    assert said(reply.choices[0].message)[1] == [("_search", "{}")]
    assert reply.choices[0].finish_reason == "tool_calls"
    prompt, shown = model.prompts[-1], model.tokenizer.render([Message("user", ("2*3?",))], tools=[CALCULATOR, SEARCH])
    assert prompt[: len(shown)] == shown
    assert model.tokenizer.decode(prompt[len(shown) :]) == opening
    natural = model.with_control.encode(call, add_special_tokens=False).ids
    assert [*prompt[len(shown) :], *model.sampled] == natural  # nothing is forced that the model would not draw
    ask(client, told_again(reply))
    assert model.prompts[-1][: len(shown) + len(natural)] == [*shown, *natural]


def test_what_cannot_be_read_after_a_forced_opening_is_content(client, model):
    model.reply = " no idea"
    for stream in (False, True):
        reply = ask(client, tool_choice="required", stream=stream)
        if stream:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in reply)
        else:
            text = reply.choices[0].message.content
        assert text == '<tool_call>\n{"name": no idea'


def test_one_call_at_most_where_calls_may_not_be_parallel(client, model):
    as_list = f"<tool_call>[{', '.join([CALL.splitlines()[1]] * 2)}]</tool_call>"
    for model.reply in (TWO, as_list, "The answer is 6."):
        content, calls = REPLIES[CALL] if "tool_call" in model.reply else (model.reply, [])
        assert said(ask(client, parallel_tool_calls=False).choices[0].message) == (content, calls)


def deep(levels):
    return {"a": deep(levels - 1)} if levels else {}


def changed(**function):
    return [CALCULATOR | {"function": CALCULATOR["function"] | function}]


BROKEN = [
    {"tools": changed(description="\ud800")},
    {"tools": changed(parameters={"a": "\ud800"})},
    {"tools": changed(parameters={"\ud800": 1})},
    {"messages": [*ASK, {"role": "tool", "tool_call_id": "\ud800", "content": "a"}]},
    {"messages": [*ASK, {"role": "tool", "tool_call_id": "1", "content": "\ud800"}]},
    {"messages": [*ASK, {"role": "user", "name": "\ud800", "content": "a"}]},
    {"\ud800": 1},
]


@pytest.mark.parametrize("fields", BROKEN)
def test_half_a_surrogate_pair_anywhere_is_read_as_the_replacement_character(client, model, fields):
    model.reply = "6"
    body = {"model": "scripted", "messages": ASK, "tools": [CALCULATOR]} | fields
    url = str(client.base_url) + "chat/completions"
    response = httpx.post(url, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert response.status_code == 200, response.text


USED = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "6"}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"tool_choice": "required", "tools": []}, "there are no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "sing"}}}, "'sing', but the tools are: calculator"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required", "messages": [*ASK, {"role": "assistant", "content": "I"}]}, "is continued"),
        ({"tools": changed(name="two words")}, "tools.0.function.name"),
        ({"tools": changed(parameters="x")}, "tools.0.function.parameters"),
        ({"tools": changed(parameters=deep(900))}, "nested too deeply"),
        ({"tools": changed(description="x" * 300_000)}, "262144 are the most"),
        ({"tools": [CALCULATOR] * 129}, "tools"),
        ({"tools": [{"type": "retrieval"}]}, "tools.0.type"),
        ({"tools": [], "functions": [CALCULATOR["function"]]}, "send tools instead"),
        ({"function_call": "auto"}, "send tool_choice"),
        ({"messages": [{"role": "function", "name": "f", "content": "6"}]}, "messages.0.role"),
        ({"messages": [*ASK, {"role": "assistant", "content": "", "function_call": {"name": "f"}}]}, "function_call"),
        ({"messages": [*ASK, {"role": "assistant", "content": None}]}, "messages.1.content is missing"),
        ({"messages": [*ASK, {"role": "assistant", "tool_calls": [USED]}]}, "cannot end with tool calls"),
        ({"messages": [ASK[0] | {"tool_calls": [USED]}]}, "messages.0.role is user"),
        ({"messages": [*ASK, RESULT | {"tool_call_id": None}]}, "tool_call_id is missing"),
        ({"messages": [*ASK, RESULT | {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "text parts"),
        ({"messages": [*ASK, {"role": "assistant", "tool_calls": [USED | {"type": "custom"}]}]}, "tool_calls.0.type"),
        ({"messages": [*ASK, {"role": "assistant", "tool_calls": [USED | {"function": {
            "name": "f", "arguments": '{"a":' * 20_000 + "1" + "}" * 20_000}}]}, RESULT]}, "nested too deeply"),
        ({"messages": [*ASK, {"role": "assistant", "tool_calls": [USED] * 129}, RESULT]}, "messages.1.tool_calls"),
        ({"messages": [*ASK, {"role": "assistant", "tool_calls": [USED | {"function": {
            "name": "f", "arguments": '{"a": "\\ud800"}'}}]}, RESULT]}, "surrogate pair"),
        ({"model": "memory/scripted"}, "memory/scripted reads without tools: ask the model scripted"),
        ({"model": "memory/scripted", "tools": [], "messages": [
            *ASK, {"role": "assistant", "tool_calls": [USED]}, RESULT]}, "reads without tools"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_with_tools_is_refused_in_a_sentence(client, fields, sentence):
    body = {"model": "scripted", "messages": ASK, "tools": [CALCULATOR], "max_tokens": 4} | fields
    with pytest.raises(openai.BadRequestError, match=sentence):
        client.post("/chat/completions", body=body, cast_to=object)


def test_that_no_schema_is_enforced_is_told(client, model):
    model.reply = "6"
    assert ask(client, tools=changed(strict=True)).ignored_fields == ["tools.function.strict"]
    assert model.prompts[-1] == model.tokenizer.render([Message("user", ("2*3?",))], tools=[CALCULATOR])


TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}{% for call in message.tool_calls %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer(directory, template):
    path = write_tiny_tokenizer(directory) / "tokenizer_config.json"
    write_json(path, (read_json(path) or {}) | {"chat_template": template})
    return Tokenizer.load(directory)


@pytest.fixture(scope="module")
def tiny(engine, loaded, tmp_path_factory):
    tokenizer = tiny_tokenizer(tmp_path_factory.mktemp("tools"), TEMPLATE)
    with (
        serving(engine, replace(loaded, tokenizer=tokenizer), tmp_path_factory.mktemp("tiny")) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60) as client,
    ):
        yield server, client


def test_the_tiny_model_is_shown_tools_and_their_results(tiny):
    server, client = tiny
    options = {"tools": [CALCULATOR], "model": "tiny", "max_tokens": 12, "seed": 1}
    forced = ask(client, tool_choice="required", **options)
    assert forced.choices[0].message.content.startswith('<tool_call>\n{"name":')  # it has never learned to go on
    shown = [Message("user", ("2*3?",)), Message("assistant", (), (ToolCall("1", "f", "{}"),)), Message("tool", ("6",))]
    history = [*ASK, {"role": "assistant", "content": None, "tool_calls": [USED]}, RESULT]
    ids = server.post("/tokenize", {"messages": history, "tools": [CALCULATOR]}).json()["token_ids"]
    assert ids == server.parts.service.tokenizer.render(shown, tools=[CALCULATOR])
    whole = ask(client, history, **options)
    drawn = server.post("/generate", {"token_ids": ids, "max_tokens": 12, "seed": 1}).json()["samples"][0]
    assert whole.choices[0].message.content == drawn["text"]
    assert whole.usage.prompt_tokens == len(ids)
    streamed = ask(client, history, stream=True, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == drawn["text"]


@pytest.mark.parametrize(
    ("template", "fields", "sentence"),
    [
        (None, {}, "tiny has no chat template, so it cannot show tools"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", {}, "template of tiny ignores tools"),
        (TEMPLATE.replace("<tool_call>", "<call>"), {"tool_choice": "required"}, "tiny writes calls in a form"),
        (TEMPLATE.replace("name", "function_name", 1), {"tool_choice": "required"}, "tiny writes calls in a form"),
    ],
)
def test_a_template_that_cannot_do_it_is_refused_by_the_models_name(
    tiny, tmp_path, monkeypatch, template, fields, sentence
):
    server, client = tiny
    monkeypatch.setattr(server.parts.service, "tokenizer", tiny_tokenizer(tmp_path, template))
    with pytest.raises(openai.BadRequestError, match=sentence) as refused:
        ask(client, model="tiny", tools=[CALCULATOR], **fields)
    assert str(tmp_path) not in str(refused.value)
