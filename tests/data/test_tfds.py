"""Data sets on disk as tensorflow-datasets; `uv sync --extra tfds` first."""

import itertools
import json
import shutil
import sys

import pytest

from memjax.data.generate import MultihopPlan, RulerPlan, generate_ruler
from memjax.data.haystack import BOOKS
from memjax.data.seeds import derive_seed
from memjax.data.tasks import read_tasks
from tests.data.multihop_data import HOTPOTQA
from tests.tiny_model import write_tiny_tokenizer

pytest.importorskip("tensorflow_datasets")
grain = pytest.importorskip("grain")
pytestmark = [pytest.mark.tfds, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

RULER_TASKS = ("niah_single_1", "vt")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return str(write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def ruler(tokenizer, tmp_path_factory):
    """A prepared `memjax_ruler`, and the plan it was made from."""
    from memjax.data.tfds.builders import Counts, MemjaxRuler

    plan = RulerPlan(tokenizer, 1024, 7, BOOKS, ())
    builder = MemjaxRuler(plan, RULER_TASKS, Counts(train=9, evaluation=2), data_dir=tmp_path_factory.mktemp("data"))
    builder.download_and_prepare()
    return builder, plan


def texts(tasks):
    """The tasks by id, with their contexts as one text."""
    return {
        task.id: (task.question, context_of(task), task.answers, task.metric, task.group, dict(task.extra))
        for task in tasks
    }


def context_of(task):
    return task.context if isinstance(task.context, str) else "".join(task.context.pieces())


def test_a_prepared_ruler_holds_every_task_that_the_generator_makes(ruler, tmp_path):
    from memjax.data.tfds.records import TaskSource

    builder, plan = ruler
    assert builder.info.full_name.startswith("memjax_ruler/1024-tokens-")
    for split, samples in (("train", 9), ("eval", 2)):
        seeded = RulerPlan(plan.tokenizer, plan.length, derive_seed(plan.seed, split), plan.haystack, ())
        generate_ruler(seeded, RULER_TASKS, samples, tmp_path / f"{split}.jsonl")
        source = TaskSource(builder.data_path, split)
        assert len(source) == len(RULER_TASKS) * samples
        assert texts(source) == texts(read_tasks(tmp_path / f"{split}.jsonl"))
    assert "tensorflow" not in sys.modules


def test_a_prepared_hotpotqa_has_splits_that_share_no_paragraph(tokenizer, tmp_path):
    from memjax.data.tfds.builders import Counts, MemjaxHotpotqa
    from memjax.data.tfds.records import TaskSource

    plan = MultihopPlan(tokenizer, 3, HOTPOTQA, "hotpotqa", "documents", 12)
    builder = MemjaxHotpotqa(plan, Counts(train=12, evaluation=5), data_dir=tmp_path / "data")
    builder.download_and_prepare()
    sources = {split: TaskSource(builder.data_path, split) for split in ("train", "eval")}
    assert {split: len(source) for split, source in sources.items()} == {"train": 12, "eval": 5}
    paragraphs = {
        split: {part.partition(":\n")[2].strip() for task in source for part in context_of(task).split("\nDocument ")}
        for split, source in sources.items()
    }
    assert min(map(len, paragraphs.values())) > 12
    assert not paragraphs["train"] & paragraphs["eval"]
    assert all(len(task.extra["evidence"]) >= 2 for task in sources["eval"])


def test_grain_reads_it_shuffled_and_resumes_where_it_was(ruler):
    from memjax.data.tfds.records import TaskSource

    def batches():
        shuffled = grain.MapDataset.source(TaskSource(ruler[0].data_path)).seed(5).shuffle().repeat()
        return iter(shuffled.batch(4, batch_fn=list).to_iter_dataset())

    straight = [[task.id for task in batch] for batch in itertools.islice(batches(), 12)]
    assert sorted(set(itertools.chain(*straight))) == sorted(TaskSource(ruler[0].data_path)[i].id for i in range(18))
    first = batches()
    began = [[task.id for task in next(first)] for _ in range(5)]
    state = json.loads(json.dumps(first.get_state()))
    resumed = batches()
    resumed.set_state(state)
    assert began + [[task.id for task in next(resumed)] for _ in range(7)] == straight


def test_ranks_read_disjoint_shares(ruler):
    from memjax.data.tfds.records import TaskSource

    shuffled = grain.MapDataset.source(TaskSource(ruler[0].data_path)).seed(5).shuffle()
    shares = [{task.id for task in shuffled[rank::2]} for rank in range(2)]
    assert [len(share) for share in shares] == [9, 9]
    assert not shares[0] & shares[1]


def test_a_training_run_draws_its_tasks_from_it(ruler):
    from memjax.train.config import TaskConfig
    from memjax.train.rollouts import TaskSource as TrainingTasks

    builder, _ = ruler
    source = TrainingTasks(TaskConfig(tfds=str(builder.data_path)), seed=0)
    assert source.size == 9 * len(RULER_TASKS)
    epochs = [[source.training(i).id for i in range(start, start + source.size)] for start in (0, source.size)]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]
    judged = TrainingTasks(TaskConfig(tfds=str(builder.data_path), split="eval"), seed=0).first(99)
    assert len(judged) == 2 * len(RULER_TASKS)
    assert not {task.context for task in judged} & {source.training(i).context for i in range(source.size)}


def test_what_was_made_otherwise_lies_elsewhere(ruler, tokenizer, tmp_path):
    from memjax.data.tfds.builders import Counts, MemjaxRuler

    builder, plan = ruler
    longer = RulerPlan(tokenizer, 1024, 8, BOOKS, ())
    other = MemjaxRuler(longer, RULER_TASKS, Counts(train=9, evaluation=2), data_dir=builder.data_path.parents[2])
    assert other.data_path.parents[1] == builder.data_path.parents[1]
    assert not other.is_prepared()
    with pytest.raises(ValueError, match="qa_2 asks the same questions in every split: take MemjaxHotpotqa"):
        MemjaxRuler(plan, ("vt", "qa_2"), Counts(1, 1), data_dir=tmp_path)


def test_what_cannot_be_read_is_refused(ruler, tmp_path):
    from memjax.data.tfds.records import TaskSource

    with pytest.raises(ValueError, match=r"holds no prepared data set: give the directory with dataset_info\.json"):
        TaskSource(tmp_path)
    with pytest.raises(ValueError, match=r"has no split 'trian' \(splits: train, eval\)"):
        TaskSource(ruler[0].data_path, "trian")
    assert len(TaskSource(ruler[0].data_path, "train[:50%]")) == 9

    damaged = shutil.copytree(ruler[0].data_path, tmp_path / "damaged")
    info = damaged / "dataset_info.json"
    info.write_text(info.read_text().replace('"18"', '"20"'))
    with pytest.raises(ValueError, match=r"promises 20 tasks in 'train' and holds 18"):
        TaskSource(damaged)
