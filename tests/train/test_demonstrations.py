"""What a teacher wrote is learned from in the student's ids, if it was good; nothing is made twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memjax.agents.scripted import TeacherClient, said
from memjax.data.tiny import TinyTasks, facts_in, write_facts
from memjax.rollout.client import ClientError, Message, Prompt
from memjax.rollout.connect import LocalModel
from memjax.rollout.identity import ModelIdentity
from memjax.tokenizer import Tokenizer
from memjax.train.config import SupervisedStage, TaskConfig, TrainConfig
from memjax.train.demonstrations import (
    Plan,
    make_demonstrations,
    open_teacher,
    read_demonstrations,
    student_tokenizer,
)
from memjax.train.packing import PackingConfig
from memjax.train.sft import stage_examples, supervised_batch
from memjax.trajectory import Completion, SamplingParams
from tests.tiny_model import write_tiny_tokenizer
from tests.train.tiny_run import tiny_run

TASKS = TinyTasks(min_chunks=2, max_chunks=2, seed=5)
PLAN = Plan(TaskConfig(tiny=TASKS), ModelIdentity("teacher"), limit=6)


@dataclass
class Teacher:
    """A service that reads the tiny task without fault, except questions about `unknown`; it replies in text."""

    student: Tokenizer
    unknown: str = ""
    breaks_after: int = 1 << 30  # calls
    asked: list[str] = field(default_factory=list)

    async def write(self, prompt: Prompt, params: SamplingParams) -> list[Completion]:
        if len(self.asked) >= self.breaks_after:
            raise ClientError("the service is away")
        text = "".join(message.text(self.student.decode) for message in prompt.messages)
        self.asked.append(text)
        key = text.split()[2]
        facts = [fact for fact in facts_in(text) if fact[0] == key != self.unknown]
        if text.endswith("answer"):
            return [said(f"\\boxed{{ {facts[0][1] if facts else 'none'} }}")]
        return [said(write_facts(facts))]


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return tiny_run(tmp_path / "run")


@pytest.fixture
def student(config: TrainConfig) -> Tokenizer:
    return student_tokenizer(config)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file.jsonl"


def asked_for(task: int) -> str:
    return TASKS.task(task).question.split()[1]


def make(config: TrainConfig, teacher: Teacher, plan: Plan = PLAN) -> tuple[int, int]:
    client = TeacherClient(teacher.write, teacher.student)
    return make_demonstrations(config, teacher.student, client, plan, config.out.parent / "file.jsonl")


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Write a journal again with every line changed."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        change(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_good_episodes_are_kept_and_learned_from_as_the_student_s_own(
    config: TrainConfig, student: Tokenizer, path: Path
) -> None:
    key = asked_for(3)
    others = [i for i in range(6) if asked_for(i) != key]
    assert make(config, Teacher(student, unknown=key)) == (len(others), 0)
    found = {t.task_id: t for t in read_demonstrations(path, student)}
    assert sorted(found) == sorted(f"{TASKS.task(i).id}/0" for i in others)
    for i in others:
        task, trajectory = TASKS.task(i), found[f"{TASKS.task(i).id}/0"]
        assert [c.kind for c in trajectory.conversations] == ["memory", "memory", "final"]
        replies = [c.token_ids[c.loss_mask] for c in trajectory.conversations]
        assert all(ids[-1] == student.eos_ids[0] for ids in replies)
        assert student.decode(replies[-1]).strip() == f"\\boxed{{ {task.answers[0]} }}"
        prompt = trajectory.conversations[1].token_ids[~trajectory.conversations[1].loss_mask]
        assert f"memory {student.decode(replies[0]).strip()} text" in student.decode(prompt), "its own ids, verbatim"


def test_nothing_is_made_twice_but_what_failed_or_was_cut(config: TrainConfig, student: Tokenizer, path: Path) -> None:
    assert make(config, Teacher(student, breaks_after=4)) == (0, 6)
    with pytest.raises(ValueError, match="holds no episode to learn from"):
        read_demonstrations(path, student)
    again = Teacher(student)
    assert make(config, again) == (6, 0)
    assert len(again.asked) == 6 * 3 - 4, "two chunks and an answer each, without what was written before"
    whole = read_demonstrations(path, student)
    idle = Teacher(student)
    assert make(config, idle) == (6, 0)
    assert idle.asked == []
    lines = path.read_bytes().splitlines(keepends=True)
    last = max(i for i, line in enumerate(lines) if b'"call"' in line)
    path.write_bytes(b"".join(lines[:last]) + lines[last][:-40])
    torn = Teacher(student)
    assert make(config, torn) == (6, 0)
    assert len(torn.asked) == 1, "the reply that was cut"
    for ours, theirs in zip(read_demonstrations(path, student), whole, strict=True):
        for mine, yours in zip(ours.conversations, theirs.conversations, strict=True):
            assert np.array_equal(mine.token_ids, yours.token_ids)


@pytest.mark.parametrize("started", [4, 18], ids=["unfinished", "finished"])
def test_another_teacher_or_config_is_refused_unless_it_starts_over(
    config: TrainConfig, student: Tokenizer, path: Path, started: int
) -> None:
    make(config, Teacher(student, breaks_after=started))
    agent = config.agent.model_copy(update={"memory": 9})
    others = [
        (config.model_copy(update={"seed": 1}), PLAN, "seed was"),
        (config.model_copy(update={"agent": agent}), PLAN, "agent.memory was 10, is 9"),
        (config, replace(PLAN, teacher=ModelIdentity("another")), "identity.model was 'teacher', is 'another'"),
    ]
    for changed, plan, told in others:
        teacher = Teacher(student)
        with pytest.raises(ValueError, match=rf"holds another run \(.*{told}"):
            make(changed, teacher, plan)
        assert teacher.asked == []
    changed, plan, _ = others[0]
    assert make(changed, Teacher(student), replace(plan, fresh=True)) == (6, 0)


def test_another_least_reward_judges_the_same_episodes_again(
    config: TrainConfig, student: Tokenizer, path: Path
) -> None:
    kept, _ = make(config, Teacher(student, unknown=asked_for(3)))
    teacher = Teacher(student)
    assert make(config, teacher, replace(PLAN, min_reward=0.0)) == (6, 0)
    assert len(read_demonstrations(path, student)) == 6 > kept
    assert make(config, teacher) == (kept, 0)
    assert len(read_demonstrations(path, student)) == kept
    assert teacher.asked == []


async def test_a_reply_over_the_student_s_budget_is_cut_where_its_own_would_be(student: Tokenizer) -> None:
    async def verbose(prompt: Prompt, params: SamplingParams) -> list[Completion]:
        return [said("w01 w02 w03 w04")]

    prompt = Prompt((Message("user", ("ask value k01 memory none text w01 update",)),))
    (cut,) = await TeacherClient(verbose, student).complete(prompt, SamplingParams(max_tokens=3))
    assert (cut.finish_reason, cut.text.split(), len(cut.token_ids)) == ("length", ["w01", "w02", "w03"], 3)
    (whole,) = await TeacherClient(verbose, student).complete(prompt, SamplingParams(max_tokens=5))
    assert (whole.finish_reason, whole.token_ids[-1]) == ("stop", student.eos_ids[0])


def test_every_episode_is_learned_from_once_in_an_epoch_except_replies_that_were_cut(
    config: TrainConfig, student: Tokenizer, path: Path
) -> None:
    make(config, Teacher(student))
    recorded = read_demonstrations(path, student)
    values = {"name": "sft", "kind": "trajectories", "steps": 4, "examples": 3, "path": path}
    stage = SupervisedStage.model_validate(values)
    epochs = [
        [stage_examples(stage, e * 2 + i, config.agent, student, 0, recorded) for i in range(2)] for e in range(2)
    ]
    names = [[t.task_id for step in epoch for t in step] for epoch in epochs]
    assert sorted(names[0]) == sorted(names[1]) == sorted(t.task_id for t in recorded)
    assert names[0] != names[1]
    rewrite(path, lambda row: row["reply"].update(finish="length") if row.get("key") == [1] else None)
    (one, *_) = read_demonstrations(path, student)
    learned = supervised_batch([one], PackingConfig(row_tokens=128, micro_batch_tokens=512)).rows.loss_mask.sum()
    assert learned == sum(c.loss_mask.sum() for c in one.conversations[1:])


def written_by_hand(path: Path, *turns: dict[str, Any]) -> None:
    lines = [{"type": "journal", "version": 2}, *({"type": "demonstration", "episode": "1", **turn} for turn in turns)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_text_gets_the_student_s_ids_and_what_cannot_be_learned_from_is_refused(
    config: TrainConfig, student: Tokenizer, path: Path
) -> None:
    said = "ask value k01 memory none answer"
    turn = {"messages": [{"role": "user", "content": said}], "reply": "\\boxed{ none }"}
    written_by_hand(path, turn)
    (trajectory,) = read_demonstrations(path, student)
    (conversation,) = trajectory.conversations
    assert student.decode(conversation.token_ids[conversation.loss_mask]).strip() == "\\boxed{ none }"
    assert np.array_equal(conversation.token_ids[~conversation.loss_mask], student.encode(said))
    for wrong in ({"messages": [], "reply": "a"}, {"messages": [{"role": "user"}], "reply": "a"}):
        written_by_hand(path, turn, wrong)
        with pytest.raises(ValueError, match=r"file.jsonl: the episode 1 "):
            read_demonstrations(path, student)
    written_by_hand(path, {"messages": []})
    with pytest.raises(ValueError, match=r"file.jsonl:2 is not a journal line \(it has no reply\)"):
        read_demonstrations(path, student)


def test_ids_of_another_model_are_refused(config: TrainConfig, student: Tokenizer, path: Path, tmp_path: Path) -> None:
    make(config, Teacher(student))
    write_tiny_tokenizer(tmp_path / "other")
    with pytest.raises(ValueError, match=r"file.jsonl: the episode tiny-5-\d/0 cannot be learned from"):
        read_demonstrations(path, Tokenizer.load(tmp_path / "other"))


def test_a_file_of_another_kind_is_refused(student: Tokenizer, path: Path) -> None:
    with pytest.raises(ValueError, match="there is no journal"):
        read_demonstrations(path, student)
    path.write_text('{"made_with": {"teacher": "t"}}\n{"task": "7", "conversations": []}\n')
    with pytest.raises(ValueError, match="was written by another version of memjax"):
        read_demonstrations(path, student)


def test_a_local_teacher_with_other_ids_is_refused(config: TrainConfig, student: Tokenizer, tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path / "other")
    with pytest.raises(ValueError, match="other token ids"):
        open_teacher(config, LocalModel(str(tmp_path / "other")), student)
