"""Turns become conversations by their ids: what extends one is part of it, and only what was sampled carries loss."""

import numpy as np

from memjax.episodes.conversations import conversations_of
from memjax.episodes.episode import Reply, Turn
from memjax.rollout.client import Message, Prompt
from memjax.trajectory import Completion


def turn(key, prompt, sampled, *, kind="turn", trained=True, continues=False, finish="stop"):
    completion = Completion(
        np.asarray(prompt, np.int32), np.asarray(sampled, np.int32), -np.arange(1, len(sampled) + 1, dtype=np.float32),
        "text", finish,
    )  # fmt: skip
    role = "assistant" if continues else "user"
    said = Prompt((Message(role, ("said",)), Message("user", ("x",))))
    return Turn((key,), kind, said, Reply.of(completion, (key,), (0,)), trained=trained)


def ids(conversations):
    return [(c.token_ids.tolist(), c.loss_mask.astype(int).tolist()) for c in conversations]


def test_independent_prompts_are_independent_conversations_in_the_order_of_their_keys():
    made, broken = conversations_of([turn(2, [5, 6], [7, 0]), turn(1, [5, 5], [8, 0], kind="memory")])
    assert ids(made) == [([5, 5, 8, 0], [0, 0, 1, 1]), ([5, 6, 7, 0], [0, 0, 1, 1])]
    assert [c.kind for c in made] == ["memory", "turn"]
    assert broken == 0
    assert made[0].logprobs.tolist() == [0, 0, -1, -2]


def test_a_prompt_that_begins_with_a_conversation_extends_it():
    grown = [turn(1, [5], [6, 0]), turn(2, [5, 6, 0, 9, 9], [7, 0]), turn(3, [5, 6, 0, 9, 9, 7, 0, 8], [1, 0])]
    made, broken = conversations_of(grown)
    assert ids(made) == [([5, 6, 0, 9, 9, 7, 0, 8, 1, 0], [0, 1, 1, 0, 0, 1, 1, 0, 1, 1])]
    assert broken == 0


def test_a_second_extension_opens_a_new_conversation_without_loss_on_what_was_trained_before():
    made, _ = conversations_of([turn(1, [5], [6, 0]), turn(2, [5, 6, 0, 2], [7]), turn(3, [5, 6, 0, 3], [8])])
    assert ids(made) == [([5, 6, 0, 2, 7], [0, 1, 1, 0, 1]), ([5, 6, 0, 3, 8], [0, 0, 0, 0, 1])]


def test_a_turn_that_should_extend_and_does_not_is_counted():
    made, broken = conversations_of([turn(1, [5], [6, 0]), turn(2, [5, 6, 9], [7, 0], continues=True)])
    assert (len(made), broken) == (2, 1)


def test_the_reward_of_a_turn_is_a_span_over_what_it_sampled():
    grown = [turn(1, [5], [6, 0]), turn(2, [5, 6, 0, 9, 9], [7, 0]), turn(3, [5, 6, 0, 9, 9, 7, 0, 8], [1])]
    (made,), _ = conversations_of(grown, {(1,): 0.5, (3,): -1.0})
    assert made.spans == ((1, 3, "1", 0.5), (8, 9, "3", -1.0))
    assert all(made.loss_mask[start:end].all() for start, end, *_ in made.spans)
    last_two = [turn(1, [5], [6, 0]), turn(2, [5, 6, 0, 2], [7]), turn(3, [5, 6, 0, 3], [8])]
    (first, second), _ = conversations_of(last_two, {(1,): 1.0, (2,): 2.0, (3,): 3.0})
    assert first.spans == ((1, 3, "1", 1.0), (4, 5, "2", 2.0))
    assert second.spans == ((4, 5, "3", 3.0),), "what was trained before has its span where it has its loss"
    (silent,), _ = conversations_of([turn(1, [5], [6], trained=False)], {(1,): 1.0})
    assert silent.spans == ()


def test_untrained_turns_carry_no_loss_and_turns_without_ids_make_no_conversation():
    made, _ = conversations_of([turn(1, [5], [6, 0], trained=False), turn(2, [5, 6, 0, 9], [7]), turn(3, [], [])])
    assert ids(made) == [([5, 6, 0, 9, 7], [0, 0, 0, 0, 1])]


def test_a_reply_that_was_cut_marks_its_conversation_until_it_is_extended():
    cut, _ = conversations_of([turn(1, [5], [6, 7], finish="length")])
    assert cut[0].truncated
    extended, _ = conversations_of([turn(1, [5], [6, 7], finish="length"), turn(2, [5, 6, 7, 0, 9], [8, 0])])
    assert not extended[0].truncated
