"""Episodes by a teacher, or by the model itself, in a journal from which the good ones are learned."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from memjax.agents.scripted import TeacherClient
from memjax.data.seeds import derive_seed
from memjax.episodes.conversations import trajectory_of
from memjax.episodes.journal import EpisodeJournal, Journal
from memjax.episodes.recorded import RecordedEpisode, Recording
from memjax.rewards.pool import RewardPool
from memjax.rollout.client import Client
from memjax.rollout.connect import LocalModel, ModelChoice, open_client
from memjax.rollout.identity import ModelIdentity
from memjax.tokenizer import Tokenizer
from memjax.tokenizer_files import read_tokenizer_files
from memjax.train.config import FRESH_MODELS, TaskConfig, TrainConfig
from memjax.train.rollouts import Sampler, TaskSource
from memjax.trajectory import Task, Trajectory

_PROBE = "".join(map(chr, range(32, 0x2FF)))


@dataclass(frozen=True)
class Plan:
    """Which episodes are made, by whom, and from which reward on one is kept."""

    tasks: TaskConfig
    teacher: ModelIdentity
    limit: int | None = None  # tasks; by default all
    samples: int = 1
    min_reward: float = 1.0
    fresh: bool = False  # start the journal over


def open_teacher(config: TrainConfig, choice: ModelChoice, student: Tokenizer) -> Client:
    """A client that replies in the student's ids. ValueError for a local model that has others."""
    is_local = isinstance(choice, LocalModel)
    if is_local and _ids_of(Tokenizer(*read_tokenizer_files(choice.model))) != _ids_of(student):
        raise ValueError(
            f"{choice.model} has other token ids than the model that is to learn ({student.source}): run it behind an "
            "endpoint (memjax serve) and give that with --url, so that its text is encoded again"
        )
    client = open_client(choice, student, length=config.rollout.max_length, slots=config.rollout.slots, dtype=None)
    if is_local:
        return client
    return TeacherClient(client.complete, student, client.model, client.window, client.close)


def make_demonstrations(
    config: TrainConfig,
    student: Tokenizer,
    teacher: Client,
    plan: Plan,
    out: Path,
    progress: Callable[[int, int], None] = lambda made, kept: None,
) -> tuple[int, int]:
    """Work the plan's tasks as the config's agent does, into the journal `out`; how many are kept, how many failed.

    What the journal holds is not made again unless it failed; an episode that was cut short is resumed. `progress` is
    told how many are made and kept. The teacher is closed. JournalMismatch for a journal of another teacher or config.
    """
    source = TaskSource(plan.tasks, config.seed)
    if (count := source.size if plan.limit is None else plan.limit) is None:
        raise ValueError("a generator of tasks has no end: say with --limit how many to work")
    slots, counts = asyncio.Semaphore(config.rollout.slots), Counter[str]()
    identity = replace(plan.teacher, tokenizer=_ids_of(student))
    with Journal(out, fresh=plan.fresh) as journal, RewardPool(timeout=config.reward_seconds) as pool:
        before = Recording(out, student).episodes
        sampler = Sampler(config, teacher, student, pool, source)
        journals = partial(EpisodeJournal, journal, identity=identity, tokenizer=student)

        async def make(task: Task, number: int) -> None:
            episode = before.get(f"{task.id}/{number}", RecordedEpisode())
            seed = derive_seed(config.seed, "sample", task.id, number)
            wanted = {"agent": config.agent.model_dump(mode="json"), "identity": asdict(identity), "seed": seed}
            score = episode.score or {"error": "it was not made"}
            stands = episode.begin | wanted == episode.begin and "error" not in score
            if not stands or score["kept"] != (score["reward"] >= plan.min_reward):
                async with slots:
                    (one,) = await sampler.group(task, [number], journals=journals, min_reward=plan.min_reward)
                score = one.score(plan.min_reward)
            counts.update(made=1, kept=score["kept"], failed="error" in score)
            progress(counts["made"], counts["kept"])

        async def make_all() -> None:
            try:
                tasks = [replace(task, group=task.id) for task in source.first(count)]
                wanted = [(task, number) for task in tasks for number in range(plan.samples)]
                called = {name for name, episode in before.items() if episode.digests}
                for known in (True, False):  # what has calls first: another teacher's is refused before any is made
                    chosen = [one for one in wanted if (f"{one[0].id}/{one[1]}" in called) == known]
                    await asyncio.gather(*(make(*one) for one in chosen))
            finally:
                await teacher.close()

        asyncio.run(make_all())
    return counts["kept"], counts["failed"]


def read_demonstrations(path: Path, tokenizer: Tokenizer) -> list[Trajectory]:
    """The episodes of a journal that are kept or written by hand, to learn from; ValueError where there is none."""
    if not path.exists():
        raise ValueError(f"there is no journal {path}: `memjax train demonstrations` makes one")
    recording, found = Recording(path, tokenizer), []
    for name, episode in recording.episodes.items():
        if episode.demonstrations or (episode.score and episode.score["kept"]):
            try:
                trajectory = trajectory_of(recording.turns(name), name, name, counters={}, answer="")
                if any(c.loss_mask[0] or c.token_ids.max() >= tokenizer.size for c in trajectory.conversations):
                    raise ValueError("a turn has no prompt, or ids of another model")
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}: the episode {name} cannot be learned from: {error!r}") from error
            found.append(trajectory)
    if not found:
        raise ValueError(f"{path} holds no episode to learn from: none was good enough")
    return found


def student_tokenizer(config: TrainConfig) -> Tokenizer:
    """The tokenizer of the model that a config trains."""
    if config.model not in FRESH_MODELS:
        return Tokenizer.load(config.model)
    FRESH_MODELS[config.model].write_tokenizer(config.out / config.model)
    return Tokenizer.load(config.out / config.model)


def _ids_of(tokenizer: Tokenizer) -> str:
    """A hash that tells tokenizers with other ids apart."""
    ids = tokenizer.size, tokenizer.eos_ids, tokenizer.encode(_PROBE)
    return hashlib.sha256(repr(ids).encode()).hexdigest()[:24]
