import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from train_samples import conversation, trajectories, trajectory

from memjax.train.packing import PackedStep, PackingConfig, first_fit, pack
from memjax.trajectory import Conversation, Trajectory


def unpack(step: PackedStep) -> list[tuple[int, Conversation]]:
    """The conversations of a step, with their trajectories, read back from the rows."""
    found = []
    for i in range(step.conversations):
        at = step.conversation == i
        (owner,) = set(step.trajectory[at].tolist())
        assert len(set(zip(*np.nonzero(at)[:2], step.rows.segment_ids[at], strict=True))) == 1
        np.testing.assert_array_equal(step.rows.positions[at], np.arange(at.sum()))
        arrays = (step.rows.tokens[at], step.rows.loss_mask[at], step.rollout_logprobs[at])
        found.append((owner, Conversation(*arrays, "memory")))
    return found


def contents(conversation: Conversation) -> tuple[bytes, ...]:
    return conversation.token_ids.tobytes(), conversation.loss_mask.tobytes(), conversation.logprobs.tobytes()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 99), steps=st.integers(1, 4), rows=st.integers(1, 3), multiple=st.integers(1, 2))
def test_what_is_packed_is_what_was_rolled_out(seed, steps, rows, multiple):
    given_ = trajectories(groups=4, size=2, seed=seed)
    config = PackingConfig(12, 12 * rows * multiple, optimizer_steps=steps, row_multiple=multiple)
    packed = pack(given_, config)
    assert len(packed) == steps
    found = [item for step in packed for item in unpack(step)]
    expected = sorted((i, contents(c)) for i, t in enumerate(given_) for c in t.conversations)
    assert sorted((i, contents(c)) for i, c in found) == expected
    assert len({step.rows.tokens.shape for step in packed}) == 1
    assert packed[0].rows.tokens.shape[1:] == (rows * multiple, 12)


@given(lengths=st.lists(st.integers(1, 10), max_size=40))
def test_rows_never_overflow_and_all_but_one_are_over_half_full(lengths):
    rows = np.array(first_fit(lengths, 10), int)
    filled = np.bincount(rows, lengths) if lengths else np.zeros(0)
    assert (filled <= 10).all()
    assert (filled > 5).sum() >= len(filled) - 1


def test_the_longest_are_placed_first_each_where_it_first_fits():
    assert first_fit([3, 6, 2, 5, 4], 10) == [1, 0, 1, 1, 0]


def test_a_group_is_in_one_optimizer_step_only():
    packed = pack(trajectories(groups=5, size=3), PackingConfig(12, 24, optimizer_steps=3))
    owners = [set(step.trajectory[step.trajectory >= 0].tolist()) for step in packed]
    assert [sorted(step) for step in owners] == [list(range(6)), list(range(6, 12)), list(range(12, 15))]


def test_the_number_of_steps_does_not_depend_on_the_number_of_turns():
    short = [trajectory(0.0, f"{i}", [(2, 1)], i) for i in range(4)]
    long = [trajectory(0.0, f"{i}", [(2, 1)] * 9, i) for i in range(4)]
    config = PackingConfig(8, 8, optimizer_steps=2)
    assert len(pack(short, config)) == len(pack(long, config)) == 2


def test_the_number_of_micro_batches_is_a_power_of_two():
    for turns in range(1, 12):
        (step,) = pack([trajectory(0.0, "a", [(4, 4)] * turns)], PackingConfig(8, 8))
        m = len(step.rows.tokens)
        assert m & (m - 1) == 0
        assert turns <= m < 2 * turns or turns == m


def test_padding_is_segment_zero_and_nobody_s():
    (step,) = pack([trajectory(0.0, "a", [(3, 2)])], PackingConfig(8, 16))
    padding = step.rows.segment_ids == 0
    assert padding.sum() == 11
    assert not step.rows.loss_mask[padding].any()
    assert (step.trajectory[padding] == -1).all()
    assert (step.conversation[padding] == -1).all()


def test_conversations_with_nothing_to_learn_make_no_row():
    rng = np.random.default_rng(0)
    cut, whole, silent = conversation(2, 2, rng, truncated=True), conversation(2, 3, rng), conversation(4, 0, rng)
    given_ = [Trajectory("task", "a", (cut, whole, silent), "", 0.0)]
    config = PackingConfig(8, 8)
    assert pack(given_, config)[0].conversations == 2
    (only_whole,) = pack(given_, config, mask_truncated=True)
    assert [contents(c) for _, c in unpack(only_whole)] == [contents(whole)]


def test_a_step_may_turn_out_empty():
    failed = Trajectory("task", "b", (), "", 0.0, error="engine stopped")
    packed = pack([trajectory(1.0, "a", [(2, 1)]), failed], PackingConfig(8, 8, optimizer_steps=2))
    assert [step.conversations for step in packed] == [1, 0]


@pytest.mark.parametrize(
    ("lengths", "steps", "message"),
    [
        ([(6, 3)], 1, "9 tokens, more than a row of 8"),
        ([(0, 3)], 1, "starts with a sampled token"),
        ([(2, 3)], 2, "1 groups cannot be split over 2"),
    ],
)
def test_what_cannot_be_packed_is_refused_with_its_numbers(lengths, steps, message):
    with pytest.raises(ValueError, match=message):
        pack([trajectory(0.0, "a", lengths)], PackingConfig(8, 8, optimizer_steps=steps))


def test_logprobs_that_are_no_numbers_are_refused():
    made = trajectory(0.0, "a", [(2, 2)])
    made.conversations[0].logprobs[2] = np.nan
    with pytest.raises(ValueError, match="no numbers"):
        pack([made], PackingConfig(8, 8))


def test_a_token_budget_under_one_row_per_device_is_refused():
    with pytest.raises(ValueError, match="at least 64"):
        PackingConfig(row_tokens=16, micro_batch_tokens=60, row_multiple=4)
    assert PackingConfig(row_tokens=16, micro_batch_tokens=150, row_multiple=4).rows == 8
