"""From a config to its samples: cells of task and length, and each cell's tasks, made when they are asked for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from memjax.data.corpus import Corpus
from memjax.data.haystack import BOOKS, Haystack
from memjax.data.hotpotqa import Pool, sample_seed, with_documents, with_length, write_pool
from memjax.data.json_rows import read_rows
from memjax.data.lengths import TokenCounter, measure, parse_length
from memjax.data.multihop import Example, read_examples
from memjax.data.ruler import QUESTIONS, Questions
from memjax.data.ruler import Suite as RulerLength
from memjax.data.seeds import stream
from memjax.data.tasks import read_tasks
from memjax.data.token_estimate import EstimatedTokenizer
from memjax.eval.config import EvalConfig
from memjax.eval.results import digest
from memjax.rewards import check_metric
from memjax.rewards.pool import RewardPool
from memjax.trajectory import Task

_SAME_TOKENIZER = 0.02  # share by which two counts of one tokenizer may differ (joints of pieces)


@dataclass(frozen=True)
class Cell:
    """One task at one length: what one score is about."""

    task: str
    label: str  # of the length, "" where the texts have their own
    tokens: int | None

    @property
    def name(self) -> str:
        """What the cell is called in results and file names."""
        return f"{self.task}_{self.label}" if self.label else self.task


@dataclass(frozen=True)
class Job:
    """One sample to be run: its place in the results, and its task."""

    cell: str
    number: int
    task: Task
    doc_hash: str  # tells this task from another one at the same place

    @classmethod
    def of(cls, cell: str, number: int, task: Task) -> Job:
        """The job of a task, whose context, if it streams, is known by what its data set says about it.

        ValueError for a task that could not be scored, before the model has read it.
        """
        check_metric(task.metric)
        if not any(answer.strip() for answer in task.answers):
            raise ValueError(f"task {task.id!r} has no gold answer; an evaluation needs one")
        context = task.context if isinstance(task.context, str) else task.context.name
        known = [task.id, task.question, list(task.answers), task.metric, context, dict(task.extra)]
        return cls(cell, number, task, digest(known))

    @property
    def journal(self) -> str:
        """The file name of its journal."""
        return f"{self.cell}_{self.number}.jsonl"


def cells_of(config: EvalConfig) -> list[Cell]:
    """Every task at every length. A RULER task whose data set was not given is left out, or refused if asked for."""
    suite = config.chosen
    for task in config.tasks or ():
        wanted = QUESTIONS.get(task)
        if wanted and wanted not in config.data:
            raise ValueError(f"{task} asks the questions of {wanted}: give --data {wanted}=PATH")
    tasks = config.tasks or tuple(
        task for task in suite.tasks if task not in QUESTIONS or QUESTIONS[task] in config.data
    )
    if not suite.lengths:
        return [Cell(task, "", None) for task in tasks]
    lengths = [(label.lower(), parse_length(label)) for label in config.lengths or suite.lengths]
    return [Cell(task, label, tokens) for label, tokens in lengths for task in tasks]


def check_metrics(config: EvalConfig) -> list[str]:
    """Try each metric that a task file names on a made-up answer to its first task; what is to be told.

    ValueError, in a sentence, for one that can score no answer.
    """
    if config.suite != "file":
        return []  # every other suite has metrics of ours
    found = dict[str, Task]()
    for task in islice(read_tasks(config.data["tasks"]), config.samples):
        found.setdefault(task.metric, task)
    with RewardPool(workers=1, timeout=config.reward_seconds) as pool:
        return [doubt for name, task in found.items() if (doubt := pool.check(name, task))]


@dataclass(frozen=True)
class TaskMaker:
    """The tasks of a config's cells. Data sets are read when the first cell needs them.

    `scratch` is a directory for the pools that contexts are drawn from.
    """

    config: EvalConfig
    tokenizer: TokenCounter
    scratch: Path
    _open: list[Corpus] = field(default_factory=list)

    def close(self) -> None:
        """Close the pools; no context can be read afterwards."""
        for corpus in self._open:
            corpus.close()

    def jobs(self) -> Iterator[Job]:
        """Every sample of every cell, in order, made one at a time."""
        for cell in cells_of(self.config):
            count = self.config.samples or self.config.chosen.samples
            for number, task in enumerate(islice(self._tasks(cell, count), count)):
                yield Job.of(cell.name, number, task)

    def _tasks(self, cell: Cell, count: int | None) -> Iterator[Task]:
        match self.config.suite:
            case "ruler-hotpotqa":
                return self._scattered(cell, count)
            case "hotpotqa":
                return self._own_paragraphs(count)
            case "longbench-qa":
                return longbench_tasks(self.config.data["longbench"] / f"{cell.task}.jsonl")
            case "file":
                return self._from_file(self.config.data["tasks"])
            case _:
                return self._ruler(cell, count)

    def _scattered(self, cell: Cell, count: int | None) -> Iterator[Task]:
        assert cell.tokens is not None
        for example in self._drawn(count):
            seed = sample_seed(self.config.seed, example, cell.tokens)
            yield with_length(example, self._pool, cell.tokens, seed)

    def _own_paragraphs(self, count: int | None) -> Iterator[Task]:
        for example in self._drawn(count):
            own = len(set(example.paragraphs))
            task = with_documents(example, self._pool, own, sample_seed(self.config.seed, example, own))
            yield replace(task, metric="hotpot_f1")

    def _from_file(self, path: Path) -> Iterator[Task]:
        for position, task in enumerate(read_tasks(path)):
            if position == 0 and not isinstance(self.tokenizer, EstimatedTokenizer):
                self._check_measured(task, path)
            yield task

    def _check_measured(self, task: Task, path: Path) -> None:
        """Refuse lengths counted by another tokenizer: "8k" of one is 11k of another."""
        said = task.extra.get("context_tokens")
        if not said:
            return
        counted = measure([task.context] if isinstance(task.context, str) else task.context.pieces(), self.tokenizer)
        if abs(counted - said) > said * _SAME_TOKENIZER:
            raise ValueError(
                f"{path} says that the context of its first task has {said} tokens, but this model's tokenizer counts "
                f"{counted}: make the file again with this model's tokenizer"
            )

    def _ruler(self, cell: Cell, count: int | None) -> Iterator[Task]:
        assert cell.tokens is not None
        suite = RulerLength(self.tokenizer, cell.tokens, self.config.seed, self._essay, self._questions)
        guess = suite.guess(cell.task)
        return (suite.sample(cell.task, index, guess) for index in (range(count) if count else itertools.count()))

    def _drawn(self, count: int | None) -> list[Example]:
        """The same questions for every length."""
        if count and count > len(self._examples):
            raise ValueError(
                f"{self.config.data['hotpotqa']} has {len(self._examples)} questions, but {count} samples were asked "
                "for: lower --samples"
            )
        order = list(self._examples)
        stream(self.config.seed, "questions").shuffle(order)
        return order[:count]

    @cached_property
    def _examples(self) -> list[Example]:
        return read_examples(self.config.data["hotpotqa"], "hotpotqa")

    @cached_property
    def _pool(self) -> Pool:
        return self._pool_of("hotpotqa", self._examples)

    @cached_property
    def _essay(self) -> Haystack:
        return Haystack.open((self.config.data["essay"],) if "essay" in self.config.data else BOOKS)

    @cached_property
    def _questions(self) -> dict[str, Questions]:
        """The data sets of RULER's question tasks that were given."""
        found = {}
        for task, name in QUESTIONS.items():
            if name in self.config.data:
                examples = tuple(read_examples(self.config.data[name], name))
                found[task] = Questions(examples, self._pool_of(name, examples))
        return found

    def _pool_of(self, name: str, examples: Sequence[Example]) -> Pool:
        file = self.scratch / f"{name}.jsonl"
        write_pool(file, examples)
        corpus = Corpus(file)
        self._open.append(corpus)
        return Pool(corpus, self.tokenizer)


def longbench_tasks(path: Path) -> Iterator[Task]:
    """The tasks of one LongBench JSONL file as published: input, context, answers, _id."""
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist; --data longbench=DIR names the directory with LongBench's JSONL files"
        )
    for place, row in read_rows(path):
        try:
            yield Task(
                id=row["_id"],
                question=row["input"],
                context=row["context"],
                answers=tuple(row["answers"]),
                metric="longbench_f1",
                extra=_longbench_extra(row),
            )
        except KeyError as error:
            raise ValueError(f"{place}: the field {error} is missing; is this a LongBench file?") from error


def _longbench_extra(row: Any) -> dict[str, Any]:
    return {name: row[name] for name in ("dataset", "length", "language") if name in row}
