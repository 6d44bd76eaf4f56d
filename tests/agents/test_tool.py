"""The agent with tools: one growing conversation, in which only what the model sampled carries loss."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from memjax.agents.scripted import TeacherClient, demonstrate, said
from memjax.agents.tool import ToolAgent
from memjax.episodes.run import run_episode
from memjax.rollout.fake import ByteTokenizer, ScriptedClient
from memjax.tokenizer import Tokenizer
from memjax.tokenizer_files import read_json, write_json
from memjax.trajectory import SamplingParams, Task
from tests.episodes.drive import drive, drive_with, task
from tests.qwen_tokenizer import write_qwen_tokenizer
from tests.tiny_model import write_tiny_tokenizer

AGENT = ToolAgent(answer=200)
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6 * 7"}}\n</tool_call>'
TWO = f"Both.\n{CALL}\n{CALL.replace('6 * 7', '1 / 0')}"
ANSWER = "It is \\boxed{42}."
OTHER_TEMPLATE = (  # results as a role of their own, tools at the end of the first message
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% if loop.first %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer_of(kind: str, directory: Path) -> Tokenizer:
    if kind == "qwen":
        return Tokenizer.load(write_qwen_tokenizer(directory))
    write_tiny_tokenizer(directory)
    path = directory / "tokenizer_config.json"
    write_json(path, (read_json(path) or {}) | {"chat_template": OTHER_TEMPLATE})
    return Tokenizer.load(directory)


# By hand: what a model samples stands between ⟦ and ⟧, all else is given to it.
MARKED = {
    "qwen": (
        "<|im_start|>system\nBe exact.\n\n# Tools\n\n{preamble}<|im_end|>\n"
        "<|im_start|>user\nWhat is 6 times 7?<|im_end|>\n"
        "<|im_start|>assistant\n⟦{TWO}<|im_end|>⟧\n"
        "<|im_start|>user\n<tool_response>\n42\n</tool_response>\n<tool_response>\n"
        "Error: division by zero.\n</tool_response><|im_end|>\n<|im_start|>assistant\n⟦{CALL}<|im_end|>⟧\n"
        "<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n⟦{ANSWER}<|im_end|>⟧"
    ),
    "other": (
        "<|im_start|>system\nBe exact.{preamble}<|im_end|>\n<|im_start|>user\nWhat is 6 times 7?<|im_end|>\n"
        "<|im_start|>assistant\n⟦{TWO}<|im_end|>⟧\n<|im_start|>tool\n42<|im_end|>\n"
        "<|im_start|>tool\nError: division by zero.<|im_end|>\n<|im_start|>assistant\n⟦{CALL}<|im_end|>⟧\n"
        "<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n⟦{ANSWER}<|im_end|>⟧"
    ),
}


@pytest.mark.parametrize("kind", MARKED)
async def test_the_mask_equals_a_conversation_marked_by_hand(kind: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(kind, tmp_path)
    agent = AGENT.model_copy(update={"system": "Be exact."})
    trajectory = await demonstrate(agent, Task("t", "What is 6 times 7?", ""), [TWO, CALL, ANSWER], tokenizer)
    assert "broken_conversations" not in trajectory.counters
    (conversation,) = trajectory.conversations
    names = {token_id: name for name, token_id in tokenizer._added_ids.items()}
    shown = "".join(names.get(i) or tokenizer.decode([i]) for i in conversation.token_ids.tolist())
    runs = np.flatnonzero(np.diff(np.concatenate([[0], conversation.loss_mask.astype(int), [0]]))).reshape(-1, 2)
    ids = conversation.token_ids.tolist()
    sampled = [ids[start:end] for start, end in runs.tolist()]
    end = tokenizer.eos_ids[0]
    assert sampled == [[*tokenizer.encode_reply(text), end] for text in (TWO, CALL, ANSWER)]
    assert tokenizer._added_ids["<tool_call>"] in sampled[1]
    head = shown.index("Be exact.") + len("Be exact.")
    preamble = shown[head : shown.index("<|im_end|>")].removeprefix("\n\n# Tools\n\n" if kind == "qwen" else "")
    assert '"name": "calculator"' in preamble
    texts = {"preamble": preamble, "TWO": TWO, "CALL": CALL, "ANSWER": ANSWER}
    by_hand = re.sub(r"\{(\w+)\}", lambda found: texts[found[1]], MARKED[kind])
    assert shown == by_hand.replace("⟦", "").replace("⟧", "")
    rest = re.split("⟦.*?⟧", by_hand, flags=re.DOTALL)
    assert conversation.loss_mask.sum() == sum(map(len, sampled))
    starts = [0, *(end for _, end in runs.tolist())]
    for text, start, (stop, _) in zip(rest, starts, runs.tolist(), strict=False):
        assert tokenizer.decode(ids[start:stop]) == re.sub(r"<\|im_\w+\|>", "", text)


def scripted(*replies, **options):
    given = iter(replies)
    return ScriptedClient(lambda prompt, params: next(given), **options)


async def test_wrong_calls_are_told_to_the_model_and_the_conversation_goes_on(tmp_path: Path) -> None:
    replies = [
        '<tool_call>{"name": "calculator", "arguments": {"expr',
        '<tool_call>{"name": "python", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "calculator", "arguments": {"expression": 6}}</tool_call>',
        ANSWER,
    ]
    tokenizer, given = tokenizer_of("other", tmp_path), iter(replies)
    prompts = []

    async def write(prompt, params):
        prompts.append(prompt)
        return [said(next(given))]

    client = TeacherClient(write, tokenizer)
    trajectory = await run_episode(AGENT, task(question="6 times 7?"), client, tokenizer, SamplingParams(seed=0))
    assert (trajectory.answer, trajectory.error) == (ANSWER, None)
    told = [message for message in prompts[-1].messages if message.role == "tool"]
    assert told[0].content[0].startswith('This tool call cannot be read: {"name": "calculator"')
    assert told[1].content == ("There is no tool 'python': call calculator.",)
    assert told[2].content == ("The argument 'expression' of calculator must be of type string, not 6.",)
    assert len(trajectory.conversations) == 1
    assert "broken_conversations" not in trajectory.counters
    assert trajectory.counters["tool_calls"] == 2


async def test_it_ends_at_max_steps_and_shows_a_context_whole():
    client = scripted(*[CALL] * 9)
    trajectory = await drive(AGENT.model_copy(update={"max_steps": 3}), task("The text.", "Why?"), client)
    assert trajectory.answer == CALL
    assert len(client.prompts) == 3
    assert client.prompts[0].messages[1].text(ByteTokenizer().decode) == "The text.\n\nWhy?"
    assert client.prompts[0].tools[0]["function"]["name"] == "calculator"


async def test_replies_and_results_keep_to_the_conversation_s_budget():
    agent, tokenizer = AGENT.model_copy(update={"answer": 500, "conversation": 550}), ByteTokenizer()
    window = sum(agent.longest_turn("q", tokenizer).values())
    client = scripted(CALL, ANSWER, window=window)
    trajectory = await drive(agent, task(question="q"), client)
    assert trajectory.error is None
    assert client.params[0].max_tokens == 500 > client.params[1].max_tokens > 0
    rendered = tokenizer.render(client.prompts[1].messages, tools=client.prompts[1].tools)
    assert len(rendered) + client.params[1].max_tokens == window
    full = await drive(agent, task(question="q"), scripted(*[CALL] * 9, window=window))
    assert full.error == "replies and results took the 550 tokens of the conversation"


def test_the_conversation_is_fitted_to_a_small_window():
    fitted = AGENT.fitted((), "q", ByteTokenizer(), 2048)
    parts = fitted.longest_turn("q", ByteTokenizer()) | {"question": fitted.question}
    assert sum(parts.values()) == 2048
    assert (
        fitted.conversation
        < AGENT.conversation
        == AGENT.fitted(["conversation"], "q", ByteTokenizer(), 2048).conversation
    )


async def test_a_resumed_tool_episode_continues(tmp_path):
    def failing(prompt, params):
        if "42" in prompt:
            raise OSError("down")
        return CALL

    broken = await drive_with(tmp_path / "j", AGENT, task(question="q"), ScriptedClient(failing))
    assert broken.error == "down"
    client = scripted(ANSWER)
    resumed = await drive_with(tmp_path / "j", AGENT, task(question="q"), client)
    assert (resumed.answer, len(client.prompts)) == (ANSWER, 1)


async def test_a_service_without_ids_is_served_too():
    trajectory = await drive(AGENT, task(question="q"), scripted(CALL, ANSWER, text_only=True))
    assert trajectory.answer == ANSWER


async def test_a_teacher_may_be_cut(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("other", tmp_path)

    async def write(prompt, params):
        return [said(CALL)]

    agent = AGENT.model_copy(update={"answer": 4, "max_steps": 2})
    trajectory = await run_episode(
        agent, task(question="q"), TeacherClient(write, tokenizer), tokenizer, SamplingParams(seed=0)
    )
    assert trajectory.error is None
    assert trajectory.conversations[0].truncated
