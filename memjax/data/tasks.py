"""Task files: one task a line in our own JSON lines, and the files of other projects as they are: RULER, MemAgent,
HotpotQA, SQuAD, GSM8K.

A line of ours has the fields of `Task`. Its context is a text, `{"file": PATH}` for a UTF-8 text file, or
`{"corpus": PATH, "documents": [NUMBERS]}`; paths are relative to the task file.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from memjax.data import task_formats
from memjax.data.corpus import Corpus, Documents
from memjax.data.json_rows import read_rows
from memjax.trajectory import Task, TextSource

_FIELDS = tuple(field.name for field in dataclasses.fields(Task))
_PIECE = 1 << 16  # characters


@dataclass(frozen=True)
class TextFile:
    """A TextSource: a UTF-8 text file."""

    path: Path

    @property
    def name(self) -> str:
        """What people call it."""
        return str(self.path)

    def pieces(self) -> Iterator[str]:
        """Yield the text in pieces."""
        with self.path.open(encoding="utf-8") as file:
            while piece := file.read(_PIECE):
                yield piece


def read_tasks(path: str | Path, *, corpus: str | Path | None = None, metric: str | None = None) -> Iterator[Task]:
    """Yield the tasks of a file, one at a time, whatever its format is.

    `corpus` is what the numbers in MemAgent's longest files refer to (hotpotqa_dev.json). `metric` replaces the one
    that the format implies. ValueError, naming file and line, for what is malformed, an id that was there before, and a
    task without an answer.
    """
    path = Path(path)
    open_corpus = cache(Corpus)
    shared = open_corpus(Path(corpus)) if corpus is not None else None
    rows = _parquet_rows(path) if path.suffix == ".parquet" else read_rows(path)
    places: dict[str, str] = {}
    for position, (place, row) in enumerate(rows):
        try:
            for task in _tasks_of(row, position, path, shared, open_corpus):
                _check(task, places)
                places[task.id] = place
                yield task if metric is None else dataclasses.replace(task, metric=metric)
        except KeyError as error:
            raise ValueError(f"{place}: the field {error} is missing") from error
        except (TypeError, AttributeError) as error:
            raise ValueError(f"{place}: not laid out as its format wants: {error}") from error
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error


def write_tasks(path: str | Path, tasks: Iterable[Task]) -> int:
    """Write tasks in our format and say how many they were. The file appears when all of them are written."""
    path = Path(path)
    partial = path.with_name(f"{path.name}.partial")
    count = 0
    with partial.open("w", encoding="utf-8") as file:
        for task in tasks:
            row = {name: getattr(task, name) for name in _FIELDS}
            row["context"] = _context_field(task.context, path.parent)
            row["extra"] = dict(task.extra)
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    partial.replace(path)
    return count


def _tasks_of(
    row: Mapping[str, Any], position: int, path: Path, corpus: Corpus | None, open_corpus: Callable[[Path], Corpus]
) -> Iterator[Task]:
    if "data" in row and "question" not in row:
        yield from task_formats.squad(row)
    elif "reward_model" in row:
        yield task_formats.memagent_training(row, position, corpus)
    elif "input" in row:
        yield task_formats.ruler(row, position, path, corpus)
    elif "_id" in row:
        yield task_formats.hotpotqa(row)
    elif row.keys() >= {"question", "answer"} and not row.keys() & {"id", "answers", "context"}:
        yield task_formats.gsm8k(row, position)
    else:
        yield _own_task(row, path, open_corpus)


def _own_task(row: Mapping[str, Any], path: Path, open_corpus: Callable[[Path], Corpus]) -> Task:
    for key in row:
        if key not in _FIELDS:
            near = difflib.get_close_matches(key, _FIELDS, n=1, cutoff=0.0)[0]
            raise ValueError(f"a task has no field {key!r}; did you mean {near!r}?")
    context = row["context"]
    if isinstance(context, Mapping):
        context = _source(context, path.parent, open_corpus)
    fields = {**row, "context": context, "answers": task_formats.answers_of(row["answers"])}
    return Task(id=fields.pop("id"), question=fields.pop("question"), **fields)


def _source(reference: Mapping[str, Any], folder: Path, open_corpus: Callable[[Path], Corpus]) -> TextSource:
    if reference.keys() == {"file"}:
        return TextFile(folder / reference["file"])
    if reference.keys() == {"corpus", "documents"}:
        return Documents(open_corpus(folder / reference["corpus"]), tuple(reference["documents"]))
    raise ValueError(f'a context is a text, {{"file"}} or {{"corpus", "documents"}}, not {dict(reference)}')


def _context_field(context: str | TextSource, folder: Path) -> str | dict[str, Any]:
    if isinstance(context, str):
        return context
    if isinstance(context, TextFile):
        return {"file": os.path.relpath(context.path, folder)}
    if isinstance(context, Documents):
        return {"corpus": os.path.relpath(context.corpus.path, folder), "documents": list(context.numbers)}
    raise ValueError(f"a context of type {type(context).__name__} cannot be written; write its text to a file first")


def _check(task: Task, places: Mapping[str, str]) -> None:
    for name in ("id", "question"):
        value = getattr(task, name)
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"the {name} must be a text, got {value!r}")
    for name, kind in (("context", str | TextSource), ("metric", str), ("group", str | None), ("extra", Mapping)):
        value = getattr(task, name)
        if not isinstance(value, kind):
            raise ValueError(f"the {name} must not be of type {type(value).__name__}")
    if not task.answers:
        raise ValueError(f"task {task.id!r} has no answers")
    for answer in task.answers:
        if not isinstance(answer, str) or not answer.strip():
            raise ValueError(f"task {task.id!r} has the answer {answer!r}; an answer must be a text that is not empty")
    if task.id in places:
        raise ValueError(f"the id {task.id!r} was used before, by {places[task.id]}")


def _parquet_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError as error:
        raise ValueError(f"{path}: parquet needs pyarrow; install it with: uv sync --extra parquet") from error
    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=16):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except ArrowInvalid as error:
        raise ValueError(f"{path} is not a parquet file: {error}") from error
