"""The data sets `memjax_hotpotqa` and `memjax_ruler`: what `memjax data` makes, prepared by tensorflow-datasets."""

from __future__ import annotations

import dataclasses
import hashlib
import tempfile
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tensorflow_datasets as tfds

from memjax.data.generate import MultihopPlan, RulerPlan, generate_multihop, generate_ruler
from memjax.data.ruler import QUESTIONS
from memjax.data.seeds import derive_seed
from memjax.data.tasks import read_tasks
from memjax.data.tfds.records import features, record_of

SplitName = Literal["train", "eval"]
_SPLITS: tuple[SplitName, ...] = ("train", "eval")


@dataclass(frozen=True)
class Counts:
    """How many tasks are made for each split (of each RULER task), and by how many processes."""

    train: int
    evaluation: int
    workers: int = 1

    def of(self, split: SplitName) -> int:
        """The tasks of a split."""
        return self.train if split == "train" else self.evaluation


class _TaskBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]  # (untyped)
    """Writes task files split by split and stores their tasks as array_record.

    That is the only format: tensorflow-datasets 4.9.10 loses rows of a parquet without a word (1000 written, 400 read),
    and its tfrecord needs TensorFlow. A data set is known by what it was made from, so that a directory never passes
    for one of other lengths.
    """

    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, label: str, made_from: Any, *, data_dir: str | Path | None = None):
        digest = hashlib.sha256(repr(made_from).encode()).hexdigest()
        super().__init__(
            config=tfds.core.BuilderConfig(name=f"{label}-{digest[:8]}", description=repr(made_from)),
            data_dir=data_dir,
            file_format=tfds.core.FileFormat.ARRAY_RECORD,
        )

    @abstractmethod
    def write(self, split: SplitName, out: Path) -> None:
        """Make a split as a task file."""

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(builder=self, description=type(self).__doc__, features=features())

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        return {split: self._generate_examples(split) for split in _SPLITS}

    def _generate_examples(self, split: SplitName) -> Iterator[tuple[str, dict[str, Any]]]:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"{split}.jsonl"
            self.write(split, file)
            for task in read_tasks(file):
                yield task.id, record_of(task)


class MemjaxHotpotqa(_TaskBuilder):
    """Multi-hop questions in long contexts: their own paragraphs among distractors. The splits share no paragraph."""

    def __init__(self, plan: MultihopPlan, counts: Counts, *, data_dir: str | Path | None = None):
        self._plan, self._counts = plan, counts
        made_from = (plan, counts.train, counts.evaluation)
        super().__init__(f"{plan.kind}-{plan.size}-{plan.unit}", made_from, data_dir=data_dir)

    def write(self, split: SplitName, out: Path) -> None:
        """Make a split as a task file."""
        plan = dataclasses.replace(self._plan, split=split, eval_count=self._counts.evaluation)
        generate_multihop(plan, self._counts.of(split), out, workers=self._counts.workers)


class MemjaxRuler(_TaskBuilder):
    """RULER's tasks but for its questions, which would be the same in both splits: each split has a seed of its own."""

    def __init__(self, plan: RulerPlan, tasks: tuple[str, ...], counts: Counts, *, data_dir: str | Path | None = None):
        if asking := [name for name in tasks if name in QUESTIONS]:
            raise ValueError(f"{asking[0]} asks the same questions in every split: take MemjaxHotpotqa for questions")
        self._plan, self._tasks, self._counts = plan, tasks, counts
        made_from = (plan, tasks, counts.train, counts.evaluation)
        super().__init__(f"{plan.length}-tokens", made_from, data_dir=data_dir)

    def write(self, split: SplitName, out: Path) -> None:
        """Make a split as a task file."""
        plan = dataclasses.replace(self._plan, seed=derive_seed(self._plan.seed, split))
        generate_ruler(plan, self._tasks, self._counts.of(split), out, workers=self._counts.workers)
