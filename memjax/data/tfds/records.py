"""A task as a record of a data set and back, and the prepared data set as a sequence of tasks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds
from array_record.python.array_record_module import ArrayRecordReader

from memjax.trajectory import Task


def features() -> tfds.features.FeaturesDict:
    """The fields of a record; what a data set knows beyond them is one JSON text, as nested lists need TensorFlow."""
    text = tfds.features.Text()
    return tfds.features.FeaturesDict(
        {
            "id": text,
            "question": text,
            "context": text,
            "answers": tfds.features.Sequence(text),
            "metric": text,
            "group": text,
            "extra": text,
        }
    )


def record_of(task: Task) -> dict[str, Any]:
    """The record of a task, its context as one text."""
    context = task.context if isinstance(task.context, str) else "".join(task.context.pieces())
    return {
        "id": task.id,
        "question": task.question,
        "context": context,
        "answers": list(task.answers),
        "metric": task.metric,
        "group": task.group or "",
        "extra": json.dumps(dict(task.extra), ensure_ascii=False),
    }


def task_of(record: Mapping[str, Any]) -> Task:
    """The task of a record as a data source gives it, which is in bytes."""
    text = {name: value.decode() for name, value in record.items() if name != "answers"}
    return Task(
        id=text["id"],
        question=text["question"],
        context=text["context"],
        answers=tuple(answer.decode() for answer in record["answers"]),
        metric=text["metric"],
        group=text["group"] or None,
        extra=json.loads(text["extra"]),
    )


class TaskSource:
    """A split of a prepared data set as a sequence of tasks, each read when it is asked for.

    `split` is what tensorflow-datasets takes: "train", "eval", "train[:10%]". ValueError where the directory holds no
    such data set, or fewer records than it says.
    """

    def __init__(self, directory: str | Path, split: str = "train"):
        if not (Path(directory) / "dataset_info.json").is_file():
            raise ValueError(f"{directory} holds no prepared data set: give the directory with dataset_info.json")
        builder = tfds.builder_from_directory(directory)
        name = split.partition("[")[0]
        if name not in builder.info.splits:
            raise ValueError(f"{directory} has no split {split!r} (splits: {', '.join(builder.info.splits)})")
        promised, held = builder.info.splits[name].num_examples, _records_in(builder.info.splits[name].filepaths)
        if promised != held:  # the data source itself believes dataset_info.json
            raise ValueError(f"{directory} promises {promised} tasks in {name!r} and holds {held}: prepare it again")
        self._records = builder.as_data_source(split)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, position: int) -> Task:
        if not 0 <= position < len(self):
            raise IndexError(f"there are {len(self)} tasks, so no number {position}")
        return task_of(self._records[position])


def _records_in(files: Iterable[Path]) -> int:
    return sum(ArrayRecordReader(str(file)).num_records() for file in files)
