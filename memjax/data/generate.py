"""RULER and long multi-hop data sets as task files, made by several processes.

Beside FILE.jsonl stand the texts of long contexts (FILE.contexts/) and the documents that contexts are made of
(FILE*.documents.jsonl); the tasks refer to both by relative path.
"""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from memjax.data.corpus import Corpus
from memjax.data.haystack import Haystack
from memjax.data.hotpotqa import Pool, apart, sample_seed, split_examples, with_documents, with_length, write_pool
from memjax.data.multihop import Example, Format, read_examples
from memjax.data.ruler import QUESTIONS, Questions, Suite
from memjax.data.ruler.draft import DraftText
from memjax.data.tasks import TextFile, read_tasks, write_tasks
from memjax.tokenizer import Tokenizer
from memjax.trajectory import Task

_CHUNK = 8  # samples that a process makes before it reports
_INLINE_TOKENS = 1 << 18  # longer contexts become files of their own, so that no reader has to hold a line that long

Progress = Callable[[int], None]
"""Told how many more samples are done."""


@dataclass(frozen=True)
class RulerPlan:
    """What a RULER file is made from. `questions` are (task, file of its data set)."""

    tokenizer: str
    length: int
    seed: int
    haystack: tuple[Path, ...]
    questions: tuple[tuple[str, Path], ...]

    def read(self, name: str, path: Path) -> list[Example]:
        """The questions of qa_1 or qa_2."""
        return read_examples(path, QUESTIONS[name])


@dataclass(frozen=True)
class MultihopPlan:
    """What a file of long multi-hop contexts is made from: `size` documents, or at most `size` tokens.

    With `split`, `eval_count` questions are set aside for evaluation and the splits share no paragraph. The paragraphs
    of `distractors` join the pool. No paragraph of a question in `apart_from` occurs.
    """

    tokenizer: str
    seed: int
    path: Path
    kind: Format
    unit: Literal["documents", "tokens"]
    size: int
    split: Literal["train", "eval"] | None = None
    eval_count: int = 0
    distractors: tuple[Path, ...] = ()
    apart_from: Path | None = None

    def read(self) -> list[Example]:
        """The questions, those of the split where there is one."""
        examples = self._read_apart(self.path)
        if self.split is None:
            return examples
        if self.distractors:
            raise ValueError("the splits would share the paragraphs of the distractor files: split or add, not both")
        train, held_out = split_examples(examples, self.eval_count, self.seed)
        return train if self.split == "train" else held_out

    def read_distractors(self) -> list[Example]:
        """The examples of which only the paragraphs count."""
        return [example for path in self.distractors for example in self._read_apart(path)]

    def _read_apart(self, path: Path) -> list[Example]:
        examples = read_examples(path, self.kind)
        return examples if self.apart_from is None else apart(examples, read_examples(self.apart_from, self.kind))


def generate_ruler(
    plan: RulerPlan,
    names: Sequence[str],
    samples: int,
    out: Path,
    *,
    workers: int = 1,
    progress: Progress = lambda _: None,
) -> None:
    """Write `samples` samples of each task to `out`, task by task.

    The bytes depend on the plan only, not on the workers. Raises ValueError for what a plan asks that cannot be.
    """
    for name, path in plan.questions:
        write_pool(_corpus_path(out, name), plan.read(name, path))
    chunks = _chunks(samples)
    with _parts(out, len(names) * len(chunks)) as parts, _pool(workers) as pool:
        guesses = pool.map(_guess, [plan] * len(names), [out] * len(names), names)
        work = [(name, guess, chunk) for name, guess in zip(names, guesses, strict=True) for chunk in chunks]
        jobs = [pool.submit(_ruler_part, plan, out, part, *which) for part, which in zip(parts, work, strict=True)]
        for job in jobs:
            progress(job.result())
    _remove_leftovers(out, {_corpus_path(out, name) for name, _ in plan.questions})


def generate_multihop(
    plan: MultihopPlan, samples: int, out: Path, *, workers: int = 1, progress: Progress = lambda _: None
) -> None:
    """Write the first `samples` questions of the plan, in file order, to `out`. Raises ValueError as generate_ruler."""
    examples = plan.read()
    if samples > len(examples):
        raise ValueError(f"{samples} samples were asked for, but there are {len(examples)} questions")
    write_pool(_corpus_path(out), [*examples, *plan.read_distractors()])
    chunks = _chunks(samples)
    with _parts(out, len(chunks)) as parts, _pool(workers) as pool:
        jobs = [pool.submit(_multihop_part, plan, out, part, chunk) for part, chunk in zip(parts, chunks, strict=True)]
        for job in jobs:
            progress(job.result())
    _remove_leftovers(out, {_corpus_path(out)})


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that are started afresh; what has not begun when an error ends the block is dropped."""
    pool = ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("spawn"), initializer=_end_with_the_parent
    )
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_the_parent() -> None:
    """Let this process end when the one that started it is killed: it would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _parts(out: Path, count: int) -> Iterator[list[Path]]:
    """Names for the parts of `out`, which are joined in order when the block ends well and removed in any case."""
    parts = [out.with_name(f"{out.name}.part-{i:05}") for i in range(count)]
    joined = out.with_name(f"{out.name}.partial")
    try:
        yield parts
        with joined.open("wb") as file:
            for part in parts:
                with part.open("rb") as source:
                    shutil.copyfileobj(source, file)
        joined.replace(out)
    finally:
        for path in (*parts, joined):
            path.unlink(missing_ok=True)


def _remove_leftovers(out: Path, corpora: Collection[Path]) -> None:
    """Remove what stands beside `out` from a task file that it replaced."""
    for path in {_corpus_path(out), *(_corpus_path(out, name) for name in QUESTIONS)} - set(corpora):
        path.unlink(missing_ok=True)
    folder = _contexts_folder(out)
    if folder.is_dir():
        wanted = {task.context.path.name for task in read_tasks(out) if isinstance(task.context, TextFile)}
        for path in folder.iterdir():
            if path.name not in wanted:
                path.unlink()
        if not wanted:
            folder.rmdir()


@functools.cache  # a process reads the files of its plan once, not for every chunk
def _suite(plan: RulerPlan, out: Path) -> Suite:
    tokenizer = Tokenizer.load(plan.tokenizer)
    questions = {
        name: Questions(tuple(plan.read(name, path)), Pool(Corpus(_corpus_path(out, name)), tokenizer))
        for name, path in plan.questions
    }
    return Suite(tokenizer, plan.length, plan.seed, Haystack.open(plan.haystack), questions)


@functools.cache
def _questions(plan: MultihopPlan, out: Path) -> Questions:
    pool = Pool(Corpus(_corpus_path(out)), Tokenizer.load(plan.tokenizer))
    return Questions(tuple(plan.read()), pool)


def _guess(plan: RulerPlan, out: Path, name: str) -> int:
    return _suite(plan, out).guess(name)


def _ruler_part(plan: RulerPlan, out: Path, part: Path, name: str, guess: int, indices: Sequence[int]) -> int:
    suite = _suite(plan, out)
    tasks = (suite.sample(name, index, guess) for index in indices)
    return write_tasks(part, (_stored(task, _contexts_folder(out)) for task in tasks))


def _multihop_part(plan: MultihopPlan, out: Path, part: Path, indices: Sequence[int]) -> int:
    questions = _questions(plan, out)
    build = with_documents if plan.unit == "documents" else with_length
    examples = [questions.examples[index] for index in indices]
    return write_tasks(
        part,
        (build(example, questions.pool, plan.size, sample_seed(plan.seed, example, plan.size)) for example in examples),
    )


def _stored(task: Task, folder: Path) -> Task:
    """The task with a context that can be written: inline, or a text file in `folder` when it is long."""
    if not isinstance(task.context, DraftText):
        return task
    if task.extra["context_tokens"] <= _INLINE_TOKENS:
        return dataclasses.replace(task, context="".join(task.context.pieces()))
    folder.mkdir(exist_ok=True)
    path = folder / f"{task.id}.txt"
    with path.open("w", encoding="utf-8") as file:
        file.writelines(task.context.pieces())
    return dataclasses.replace(task, context=TextFile(path))


def _chunks(samples: int) -> list[range]:
    return [range(start, min(start + _CHUNK, samples)) for start in range(0, samples, _CHUNK)]


def _contexts_folder(out: Path) -> Path:
    return out.with_name(f"{out.stem}.contexts")


def _corpus_path(out: Path, name: str = "") -> Path:
    return out.with_name(f"{out.stem}{f'.{name}' if name else ''}.documents.jsonl")
