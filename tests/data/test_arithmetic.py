"""Small sums: their values are the calculator's, and its tokenizer writes calls as its template does."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from memjax.agents.scripted import demonstrate
from memjax.agents.tool import ToolAgent
from memjax.data import arithmetic
from memjax.data.arithmetic import MOST, OPERATIONS, POLICIES, ArithmeticTasks, replies
from memjax.environments.calculator import CALCULATOR, calculate
from memjax.rewards import score
from memjax.rewards.answers import extract_answer
from memjax.rollout.client import Message, ToolCall
from memjax.rollout.tool_calls import parse_tool_calls
from memjax.tokenizer import Tokenizer

AGENT = ToolAgent(question=8, answer=16, max_steps=3, system="")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("arithmetic")
    arithmetic.write_tokenizer(directory)
    return Tokenizer.load(directory)


def test_values_are_the_calculators_and_so_are_those_of_every_beginning() -> None:
    tasks = ArithmeticTasks(min_numbers=2, max_numbers=4, seed=3)
    for task in map(tasks.task, range(200)):
        words = task.question.split()
        for end in range(3, len(words) + 1, 2):
            value = calculate(" ".join(OPERATIONS.get(word, word) for word in words[:end]))
            assert value == str(arithmetic.value_of(words[:end]))
            assert 0 <= int(value) <= MOST
        assert task.answers == (value,)
        assert task == tasks.task(int(task.id.rpartition("-")[2]))


def test_the_count_of_numbers_must_agree() -> None:
    with pytest.raises(ValueError, match=r"min_numbers \(4\) must not exceed max_numbers \(3\)"):
        ArithmeticTasks(min_numbers=4)


@pytest.mark.parametrize("policy", POLICIES)
async def test_demonstrations_are_one_conversation_and_worth_what_their_policy_is(tokenizer, policy) -> None:
    tasks, rng, rewards = ArithmeticTasks(seed=1), random.Random(0), []
    unknown = tokenizer.encode("<unk>")[0]
    for task in map(tasks.task, range(40)):
        texts = replies(task, policy, rng)
        trajectory = await demonstrate(AGENT, task, texts, tokenizer)
        assert "broken_conversations" not in trajectory.counters
        (conversation,) = trajectory.conversations
        assert len(conversation.token_ids) <= 72
        written = [*map(tokenizer.encode_reply, texts)]
        sampled = [token_id for ids in written for token_id in [*ids, tokenizer.eos_ids[0]]]
        assert conversation.token_ids[conversation.loss_mask].tolist() == sampled
        if policy == "whole":
            assert unknown not in conversation.token_ids
        rewards.append(score(task.metric, extract_answer(trajectory.answer), task.answers))
    expected = {"whole": (1.0, 1.0), "hasty": (0.0, 0.3), "swapped": (0.0, 0.3), "guess": (0.0, 0.2)}[policy]
    assert expected[0] <= np.mean(rewards) <= expected[1]


def test_the_template_writes_a_call_in_the_ids_of_the_reply_that_makes_it(tokenizer: Tokenizer) -> None:
    text = replies(ArithmeticTasks().task(0), "whole", random.Random(0))[0]
    (call,) = parse_tool_calls(text).calls
    user, result = Message("user", ("1 plus 1",)), Message("tool", ("2",))
    arguments = {"expression": json.loads(call.json)["expression"]}
    as_call = [user, Message("assistant", (), (ToolCall("1", "calculator", arguments),)), result]
    as_reply = [user, Message("assistant", (tokenizer.encode_reply(text),)), result]
    ids = tokenizer.render(as_call, tools=[CALCULATOR])
    assert ids == tokenizer.render(as_reply, tools=[CALCULATOR])
    assert tokenizer.decode(ids).startswith(" tool calculator user 1 plus 1 assistant<tool_call>")
    assert tokenizer.encode("<unk>")[0] not in ids
