"""What a teacher wrote is learned from in the student's ids, if it was good; nothing is made twice."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from memjax.data.tiny import TinyTasks, facts_in, write_facts
from memjax.rollout.client import ClientError, Message, Prompt
from memjax.rollout.connect import LocalModel
from memjax.tokenizer import Tokenizer
from memjax.train.config import SupervisedStage, TaskConfig, TrainConfig
from memjax.train.demonstrations import Plan, TeacherClient, make_demonstrations, open_teacher, student_tokenizer
from memjax.train.learner import make_agent
from memjax.train.packing import PackingConfig
from memjax.train.sft import said, stage_examples, supervised_batch
from memjax.train.trajectory_files import read_trajectories
from memjax.trajectory import Completion, SamplingParams
from tests.tiny_model import write_tiny_tokenizer
from tests.train.tiny_run import tiny_run

TASKS = TinyTasks(min_chunks=2, max_chunks=2, seed=5)
PLAN = Plan(TaskConfig(tiny=TASKS), "teacher", limit=6)


@dataclass
class Teacher:
    """A service that reads the tiny task without fault, except questions about `unknown`; it replies in text."""

    student: Tokenizer
    unknown: str = ""
    broken: bool = False
    asked: list[str] = field(default_factory=list)
    model: str = "teacher"
    window: int | None = None

    async def complete(self, prompt: Prompt, params: SamplingParams) -> list[Completion]:
        text = "".join(message.text(self.student.decode) for message in prompt.messages)
        self.asked.append(text)
        if self.broken:
            raise ClientError("the service is away")
        key = text.split()[2]
        facts = [fact for fact in facts_in(text) if fact[0] == key != self.unknown]
        if text.endswith("answer"):
            return [said(f"\\boxed{{ {facts[0][1] if facts else 'none'} }}")]
        return [said(write_facts(facts))]

    async def close(self) -> None:
        """Nothing to release."""


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return tiny_run(tmp_path / "run")


@pytest.fixture
def student(config: TrainConfig) -> Tokenizer:
    return student_tokenizer(config)


def asked_for(task: int) -> str:
    return TASKS.task(task).question.split()[1]


def make(config: TrainConfig, teacher: Teacher, plan: Plan = PLAN) -> tuple[int, int]:
    client = TeacherClient(teacher, teacher.student)
    return make_demonstrations(config, teacher.student, client, plan, config.out.parent / "file.jsonl")


def test_good_readings_are_kept_and_learned_from_as_the_student_s_own(config: TrainConfig, student: Tokenizer) -> None:
    key = asked_for(3)
    others = [i for i in range(6) if asked_for(i) != key]
    assert make(config, Teacher(student, unknown=key)) == (len(others), 0)
    found = {t.task_id: t for t in read_trajectories(config.out.parent / "file.jsonl", student)}
    assert sorted(found) == sorted(TASKS.task(i).id for i in others)
    for i in others:
        task, trajectory = TASKS.task(i), found[TASKS.task(i).id]
        assert [c.kind for c in trajectory.conversations] == ["memory", "memory", "final"]
        replies = [c.token_ids[c.loss_mask] for c in trajectory.conversations]
        assert all(ids[-1] == student.eos_ids[0] for ids in replies)
        assert student.decode(replies[-1]).strip() == f"\\boxed{{ {task.answers[0]} }}"
        prompt = trajectory.conversations[1].token_ids[~trajectory.conversations[1].loss_mask]
        assert f"memory {student.decode(replies[0]).strip()} text" in student.decode(prompt), "its own ids, verbatim"


def test_nothing_is_made_twice_but_what_failed_or_was_cut(config: TrainConfig, student: Tokenizer) -> None:
    path = config.out.parent / "file.jsonl"
    assert make(config, Teacher(student, broken=True)) == (0, 6)
    with pytest.raises(ValueError, match="holds no trajectory"):
        read_trajectories(path, student)
    assert make(config, Teacher(student)) == (6, 0)
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole[:-1]) + whole[-1][:-40])
    again = Teacher(student)
    assert make(config, again) == (6, 0)
    assert len(again.asked) == 3, "one reading of two chunks and an answer"
    assert sorted(path.read_bytes().splitlines()) == sorted(line.strip() for line in whole)
    with pytest.raises(ValueError, match="was made with"):
        make(config.model_copy(update={"seed": 1}), Teacher(student))


async def test_a_reply_over_the_student_s_budget_is_cut_where_its_own_would_be(student: Tokenizer) -> None:
    class Verbose(Teacher):
        async def complete(self, prompt: Prompt, params: SamplingParams) -> list[Completion]:
            return [said("w01 w02 w03 w04")]

    prompt = Prompt((Message("user", ("ask value k01 memory none text w01 update",)),))
    (cut,) = await TeacherClient(Verbose(student), student).complete(prompt, SamplingParams(max_tokens=3))
    assert (cut.finish_reason, cut.text.split(), len(cut.token_ids)) == ("length", ["w01", "w02", "w03"], 3)
    (whole,) = await TeacherClient(Verbose(student), student).complete(prompt, SamplingParams(max_tokens=5))
    assert (whole.finish_reason, whole.token_ids[-1]) == ("stop", student.eos_ids[0])


def test_every_reading_is_learned_from_once_in_an_epoch_except_replies_that_were_cut(
    config: TrainConfig, student: Tokenizer
) -> None:
    make(config, Teacher(student))
    path = config.out.parent / "file.jsonl"
    readings = read_trajectories(path, student)
    values = {"name": "sft", "kind": "trajectories", "steps": 4, "examples": 3, "path": path}
    stage, agent = SupervisedStage.model_validate(values), make_agent(config, student, max_chunks=None)
    epochs = [[stage_examples(stage, e * 2 + i, agent, student, 0, readings) for i in range(2)] for e in range(2)]
    names = [[t.task_id for step in epoch for t in step] for epoch in epochs]
    assert sorted(names[0]) == sorted(names[1]) == sorted(t.task_id for t in readings)
    assert names[0] != names[1]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1]["conversations"][0]["truncated"] = True
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (one, *_) = read_trajectories(path, student)
    learned = supervised_batch([one], PackingConfig(row_tokens=128, micro_batch_tokens=512)).rows.loss_mask.sum()
    assert learned == sum(c.loss_mask.sum() for c in one.conversations[1:])


def test_text_gets_the_student_s_ids_and_foreign_ids_are_refused(tmp_path: Path, student: Tokenizer) -> None:
    path = tmp_path / "own.jsonl"
    turn = {"prompt": [{"role": "user", "content": "ask value k01 memory none answer"}], "reply": "\\boxed{ none }"}
    path.write_text(json.dumps({"task": 1, "conversations": [turn]}) + "\n")
    (trajectory,) = read_trajectories(path, student)
    (conversation,) = trajectory.conversations
    assert student.decode(conversation.token_ids[conversation.loss_mask]).strip() == "\\boxed{ none }"
    assert np.array_equal(conversation.token_ids[~conversation.loss_mask], student.encode(turn["prompt"][0]["content"]))
    for wrong in ({"prompt": [1], "reply": [student.size]}, {"prompt": [], "reply": "a"}, {"reply": "a"}):
        path.write_text(json.dumps({"task": 1, "conversations": [wrong]}) + "\n")
        with pytest.raises(ValueError, match=r"own.jsonl, line 1: no trajectory"):
            read_trajectories(path, student)


def test_a_local_teacher_with_other_ids_is_refused(config: TrainConfig, student: Tokenizer, tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path / "other")
    with pytest.raises(ValueError, match="other token ids"):
        open_teacher(config, LocalModel(str(tmp_path / "other")), student)
