"""Groups are sampled, scored and refilled as the config says, whatever fails on the way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from memjax.agents.own import own_class
from memjax.data.tasks import write_tasks
from memjax.episodes.conversations import conversations_of
from memjax.episodes.recorded import Recording
from memjax.rewards.pool import RewardPool
from memjax.rollout.client import ClientError, Prompt
from memjax.rollout.fake import ByteTokenizer, ScriptedClient
from memjax.train.config import TrainConfig
from memjax.train.rollouts import RolloutBatch, Sampler, StepError, TaskSource, batch_metrics
from memjax.train.scored import ScoredTrajectory, from_bytes, to_bytes
from memjax.trajectory import Completion, SamplingParams, Task

GOLD = "forty-two"
SAMPLES = 4
# The second scores an answer that is not there as right, which must not help a reading that failed.
METRIC = defaultdict(lambda: "em", impossible="memagent_sub_em")


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(workers=1) as pool:
        yield pool


def reply(prompt: str, params: SamplingParams) -> str:
    """Right, except on tasks that are hopeless and half of the time on tasks that are hard."""
    if "impossible" in prompt:
        raise ValueError("this prompt cannot be answered")
    assert params.seed is not None
    right = "easy" in prompt or ("hard" in prompt and params.seed % 2)
    return f"\\boxed{{ {GOLD} }}" if right else "\\boxed{no idea}"


def sampler(
    tmp_path: Path,
    pool: RewardPool,
    kinds: str,
    *,
    dynamic: bool = False,
    text: str = "A text.",
    metric: str | None = None,
    memory: int = 64,
    **config: int,
) -> Sampler:
    """A sampler of one task for each word of `kinds`."""
    tasks = [Task(f"{i}", f"The {kind} one?", text, (GOLD,), METRIC[kind]) for i, kind in enumerate(kinds.split())]
    write_tasks(tmp_path / "tasks.jsonl", tasks)
    values = {
        "out": tmp_path,
        "model": "tiny",
        "steps": 1,
        "data": {"path": tmp_path / "tasks.jsonl", "metric": metric},
        "agent": {"question": 64, "chunk": 64, "memory": memory, "answer": 64},
        "rollout": {"samples": SAMPLES, **config},
        "batch": {"optimizer_steps": 1},
        "objective": {"dynamic_sampling": dynamic},
        "validation": {"samples": SAMPLES},
    }
    settings = TrainConfig.model_validate(values)
    return Sampler(settings, ScriptedClient(reply), ByteTokenizer(), pool, TaskSource(settings.data, seed=0))


def questions(batch: RolloutBatch, one: Sampler) -> list[str]:
    """The question of each trajectory that is kept."""
    return [one.source.training(int(trajectory.group_id)).question for trajectory in batch.trajectories]


def test_without_dynamic_sampling_every_group_is_kept(tmp_path: Path, pool: RewardPool) -> None:
    one = sampler(tmp_path, pool, "easy hopeless hard", groups=3)
    batch = one.collect(0)
    assert batch.kept == batch.sampled
    assert batch.tasks_drawn == 3
    groups = [trajectory.group_id for trajectory in batch.trajectories]
    assert groups == [group for group in "012" for _ in range(SAMPLES)]
    rewards = dict(zip(questions(batch, one), [a.reward for a in batch.kept], strict=True))
    assert (rewards["The easy one?"], rewards["The hopeless one?"]) == (1, 0)


def test_groups_without_variance_give_way_to_the_next_tasks(tmp_path: Path, pool: RewardPool) -> None:
    many = sampler(tmp_path, pool, "easy hard " * 20, groups=4, refills=9, dynamic=True)
    batch = many.collect(0)
    assert len(batch.kept) == 4 * SAMPLES
    assert all("hard" in question for question in questions(batch, many))
    assert len(batch.sampled) == batch.tasks_drawn * SAMPLES
    assert batch_metrics(batch, 1.0)["rollout/groups_dropped"] == batch.tasks_drawn - 4 > 0


def test_refilling_is_bounded(tmp_path: Path, pool: RewardPool) -> None:
    batch = sampler(tmp_path, pool, "easy " * 4, groups=4, refills=2, dynamic=True).collect(0)
    assert batch.kept == []
    assert batch.tasks_drawn == 3 * 4


def test_samples_depend_on_the_task_s_number_alone(tmp_path: Path, pool: RewardPool) -> None:
    one = sampler(tmp_path, pool, "hard " * 8, groups=4)
    whole, later = one.collect(0), one.collect(2)
    assert [a.reward for a in whole.sampled][2 * SAMPLES :] == [a.reward for a in later.sampled][: 2 * SAMPLES]
    by_group = {tuple(a.reward for a in whole.sampled[i : i + SAMPLES]) for i in range(0, 4 * SAMPLES, SAMPLES)}
    assert len(by_group) > 1, "tasks with one question have seeds of their own"


def test_a_task_that_comes_again_is_sampled_with_other_noise(tmp_path: Path, pool: RewardPool) -> None:
    one, seeds = sampler(tmp_path, pool, "hard", groups=1), list[int | None]()

    def noted(prompt: str, params: SamplingParams) -> str:
        seeds.append(params.seed)
        return reply(prompt, params)

    again = replace(one, client=ScriptedClient(noted))
    for epoch in range(2):  # of the only task
        assert again.source.training(epoch).id == "0"
        again.collect(epoch)
    first, second = seeds[: len(seeds) // 2], seeds[len(seeds) // 2 :]
    assert len(set(first)) == len(first)
    assert not set(first) & set(second)


def test_a_batch_comes_back_from_its_bytes_as_it_was(tmp_path: Path, pool: RewardPool) -> None:
    one = sampler(tmp_path, pool, "easy hard impossible " * 4, groups=2, refills=5, dynamic=True)
    found = one.collect(0)
    whole = found.kept[0].trajectory
    cut = replace(whole, conversations=tuple(replace(c, truncated=True) for c in whole.conversations))
    sampled = [replace(a, trajectory=cut) if a.trajectory is whole else a for a in found.sampled]
    batch = one.batch(sampled, {"a": 0.1})
    again = one.batch(*from_bytes(to_bytes(batch.sampled, batch.metrics)))
    assert (again.tasks_drawn, again.metrics) == (batch.tasks_drawn, {"a": 0.1})
    assert len(again.kept) == len(batch.kept) > 0
    for ours, theirs in zip(again.sampled, batch.sampled, strict=True):
        assert replace(ours.trajectory, conversations=()) == replace(theirs.trajectory, conversations=())
        assert (ours.reward_error, ours.fates) == (theirs.reward_error, theirs.fates)
        for mine, yours in zip(ours.trajectory.conversations, theirs.trajectory.conversations, strict=True):
            assert (mine.kind, mine.truncated) == (yours.kind, yours.truncated)
            for name in ("token_ids", "loss_mask", "logprobs"):
                np.testing.assert_array_equal(getattr(mine, name), getattr(yours, name))


def test_a_share_that_was_sampled_ahead_makes_the_same_batch(tmp_path: Path, pool: RewardPool) -> None:
    one = sampler(tmp_path, pool, "easy hard " * 20, groups=4, refills=9, dynamic=True)
    ahead, now = one.collect(3, one.local_groups(3)), one.collect(3)
    groups = [[(a.trajectory.group_id, a.reward) for a in batch.sampled] for batch in (ahead, now)]
    assert groups[0] == groups[1]


def test_a_failed_trajectory_scores_0_and_is_counted(tmp_path: Path, pool: RewardPool) -> None:
    batch = sampler(tmp_path, pool, "impossible easy", groups=2).collect(0)
    metrics = batch_metrics(batch, 1.0)
    assert metrics["rollout/failed"] == SAMPLES
    assert metrics["critic/rewards/mean"] == 0.5


def test_a_batch_in_which_everything_failed_ends_the_run(tmp_path: Path, pool: RewardPool) -> None:
    with pytest.raises(StepError, match=r"none of 4 trajectories came to its end: this prompt cannot be answered"):
        sampler(tmp_path, pool, "impossible", groups=1).collect(0)


class Unreliable(ScriptedClient):
    """An engine that does not get the replies with these seeds to their end."""

    def __init__(self, loses: Callable[[int], bool]) -> None:
        super().__init__(reply)
        self._loses = loses

    async def complete(self, prompt: Prompt, params: SamplingParams) -> list[Completion]:
        assert params.seed is not None
        if self._loses(params.seed):
            raise ClientError("the engine was restarted")
        return await super().complete(prompt, params)


def test_what_the_engine_loses_is_tried_once_more(tmp_path: Path, pool: RewardPool) -> None:
    one = sampler(tmp_path, pool, "easy hard", groups=2, memory=65)
    undisturbed = one.collect(0)
    unlucky = [params.seed for params in one.client.params if params.max_tokens == 65]  # one call of each episode
    batch = replace(one, client=Unreliable(lambda seed: seed in unlucky and not unlucky.remove(seed))).collect(0)
    assert unlucky == []
    assert [a.reward for a in batch.sampled] == [a.reward for a in undisturbed.sampled]
    assert batch_metrics(batch, 1.0)["rollout/lost"] == 0


def test_what_is_lost_in_validation_is_tried_once_more_and_told(tmp_path: Path, pool: RewardPool) -> None:
    one, said = sampler(tmp_path, pool, "easy", groups=1, text="x" * 64 * 3, memory=65), list[str]()
    one.validate(one.source.first(1))
    first = one.client.params[-1].seed
    unlucky = [first]
    judging = replace(
        one, client=Unreliable(lambda seed: seed in unlucky and not unlucky.remove(seed)), say=said.append
    )
    metrics = judging.validate(one.source.first(1))
    assert (metrics[f"val/reward/mean@{SAMPLES}"], metrics["val/failed"], said, unlucky) == (1, 0, [], [])

    metrics = replace(judging, client=Unreliable(lambda seed: seed == first)).validate(one.source.first(1))
    assert (metrics[f"val/reward/mean@{SAMPLES}"], metrics["val/failed"]) == (0.75, 1)
    assert said == ["1 of 4 trajectories of the validation were lost: the engine was restarted"]


def test_a_scorer_that_is_broken_in_validation_is_told(tmp_path: Path, pool: RewardPool) -> None:
    said = list[str]()
    one = sampler(tmp_path, pool, "easy", groups=1, metric="tests.train.odd_rewards:crashes")
    metrics = replace(one, say=said.append).validate(one.source.first(1))
    assert metrics["val/failed"] == 4
    assert said[0].startswith(
        "4 of 4 trajectories of the validation were lost: metric 'tests.train.odd_rewards:crashes'"
    )


def test_a_failure_that_the_agent_hides_is_no_wrong_answer(tmp_path: Path, pool: RewardPool) -> None:
    (tmp_path / "hides.py").write_text(
        "async def agent(task, episode):\n"
        "    try:\n"
        "        return (await episode.chat(task.question, max_tokens=64)).text\n"
        "    except Exception:\n"
        "        return 'sorry'\n"
    )
    one = sampler(tmp_path, pool, "easy", groups=1)
    config = one.config.model_copy(update={"agent": own_class(f"{tmp_path}/hides.py:agent")()})
    one = replace(one, config=config)
    one.collect(0)
    unlucky = one.client.params[0].seed
    batch = replace(one, client=Unreliable(lambda seed: seed == unlucky)).collect(0)
    (lost,) = [a for a in batch.sampled if a.lost]
    assert (lost.trajectory.answer, len(batch.kept)) == ("sorry", SAMPLES - 1)


def test_fifteen_right_answers_and_one_that_the_engine_lost_teach_nothing(tmp_path: Path, pool: RewardPool) -> None:
    one = sampler(tmp_path, pool, "easy", groups=1, samples=16, dynamic=True, refills=0)
    one.collect(0)
    unlucky = one.client.params[0].seed
    batch = replace(one, client=Unreliable(lambda seed: seed == unlucky)).collect(0)
    assert [a.lost for a in batch.sampled if a.lost or a.reward < 1] == ["the engine was restarted"]
    assert batch.kept == []
    metrics = batch_metrics(batch, 1.0)
    assert (metrics["rollout/lost"], metrics["critic/rewards/mean"]) == (1, 1.0)
    again = one.batch(*from_bytes(to_bytes(batch.sampled)))
    assert [a.lost for a in again.sampled] == [a.lost for a in batch.sampled]


def test_a_step_of_which_most_is_lost_ends_the_run(tmp_path: Path, pool: RewardPool) -> None:
    one = sampler(tmp_path, pool, "easy hard", groups=2)
    with pytest.raises(StepError, match=r"8 of 8 trajectories could not be finished or scored: the engine was rest"):
        replace(one, client=Unreliable(lambda seed: True)).collect(0)


def test_a_scorer_that_fails_on_some_answers_changes_nothing_for_the_others(tmp_path: Path, pool: RewardPool) -> None:
    one = sampler(
        tmp_path, pool, "easy hard hopeless hopeless", groups=4, metric="tests.train.odd_rewards:crashes_on_right"
    )
    batch = one.collect(0)
    lost = [a for a in batch.sampled if a.lost]
    assert 0 < len(lost) < len(batch.sampled) / 2
    assert all("judge service unreachable" in str(a.lost) for a in lost)
    assert batch.kept == [a for a in batch.sampled if not a.lost]


def test_validation_means_and_bests(tmp_path: Path, pool: RewardPool) -> None:
    one = sampler(tmp_path, pool, "easy hopeless hard hard", groups=1)
    metrics = one.validate(one.source.first(9))
    assert 0.25 < metrics[f"val/reward/mean@{SAMPLES}"] < 0.75
    assert metrics[f"val/reward/best@{SAMPLES}"] == 0.75
    again = one.validate(one.source.first(9))
    assert metrics[f"val/reward/mean@{SAMPLES}"] == again[f"val/reward/mean@{SAMPLES}"]
    assert one.validate([]) == {}


def test_what_became_of_the_evidence_is_logged(tmp_path: Path, pool: RewardPool) -> None:
    one = sampler(tmp_path, pool, "easy hopeless", groups=2, text=f"It is {GOLD}.")
    batch = one.collect(0)
    wanted = {"memory/evidence_seen": 1.0, "memory/capture_rate": 0.5, "memory/use_rate": 1.0}
    assert wanted.items() <= batch_metrics(batch, 1.0).items()
    again = one.batch(*from_bytes(to_bytes(batch.sampled)))
    assert wanted.items() <= batch_metrics(again, 1.0).items(), "also what another process sampled"
    assert {f"val/{name}": rate for name, rate in wanted.items()}.items() <= one.validate(one.source.first(2)).items()


def test_a_training_document_loses_its_middle_and_a_validation_document_nothing(
    tmp_path: Path, pool: RewardPool
) -> None:
    one = sampler(tmp_path, pool, "easy", groups=1, text="x" * 64 * 10, max_chunks=3)
    batch = one.collect(0)
    assert all(len(trajectory.conversations) == 3 + 1 for trajectory in batch.trajectories)
    assert batch_metrics(batch, 1.0)["rollout/truncated_document_tokens"] == SAMPLES * 64 * 7
    one.client.prompts.clear()
    one.validate(one.source.first(1))
    assert len(one.client.prompts) == SAMPLES * (10 + 1)


def test_a_dump_is_a_journal_of_what_would_be_sampled_without_it(tmp_path: Path, pool: RewardPool) -> None:
    one = sampler(tmp_path, pool, "easy hard impossible " * 4, groups=2, refills=5, dynamic=True)
    path = tmp_path / "rollouts" / "step_1.jsonl"
    dumped, silent = one.collect(0, dump=path), one.collect(0)
    assert to_bytes([without_seconds(a) for a in dumped.sampled]) == to_bytes(
        [without_seconds(a) for a in silent.sampled]
    )
    recording = Recording(path, ByteTokenizer())
    assert sorted(recording.episodes) == sorted(
        f"{group}/{sample}" for group in range(dumped.tasks_drawn) for sample in range(SAMPLES)
    )
    for number, scored in enumerate(dumped.sampled):
        name = f"{scored.trajectory.group_id}/{number % SAMPLES}"
        assert recording.episodes[name].score["reward"] == scored.reward
        conversations, _ = conversations_of(recording.turns(name))
        assert [c.token_ids.tolist() for c in conversations] == [
            c.token_ids.tolist() for c in scored.trajectory.conversations
        ]


def without_seconds(scored: ScoredTrajectory) -> ScoredTrajectory:
    return replace(scored, trajectory=replace(scored.trajectory, seconds=0.0))


def test_a_text_that_cannot_be_read_ends_the_run(tmp_path: Path, pool: RewardPool) -> None:
    class Gone:
        name = "gone"

        def pieces(self) -> Iterator[str]:
            raise FileNotFoundError("the disk is gone")

    one = sampler(tmp_path, pool, "easy", groups=1)
    with pytest.raises(FileNotFoundError, match="the disk is gone"):
        one.groups([Task("0", "The easy one?", Gone(), (GOLD,))], SAMPLES)


def test_every_epoch_has_every_task_once_in_its_own_order(tmp_path: Path, pool: RewardPool) -> None:
    source = sampler(tmp_path, pool, "a b c d e f g h", groups=1).source
    epochs = [[source.training(epoch * 8 + i).id for i in range(8)] for epoch in range(3)]
    assert all(sorted(ids) == list("01234567") for ids in epochs)
    assert len({tuple(ids) for ids in epochs}) == 3
    assert [task.id for task in source.first(3)] == ["0", "1", "2"]
