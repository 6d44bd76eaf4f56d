"""A Ray cluster of two nodes on this machine; `uv sync --extra ray` first."""

import asyncio
import os
import pickle
import signal
import threading
import time
from collections import Counter
from functools import partial

import pytest

from memjax.agents.oracle import own_text
from memjax.data.corpus import Corpus, Documents, write_corpus
from memjax.eval.results import ResultsDirectory
from memjax.eval.run import run_jobs
from memjax.eval.tasks import Job
from memjax.rewards.pool import RewardPool
from memjax.trajectory import Task
from tests.eval.forgetful import SlowEvaluator, evaluator, fact_task, forgetful, jobs
from tests.ray_cluster import two_nodes

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.filterwarnings("ignore::Warning")]


@pytest.fixture
def cluster():
    with two_nodes() as nodes:
        yield nodes


def run(directory, marks, every, losses, on_row=lambda row: None):
    from memjax.eval.ray_runner import RayEvaluator

    with (
        ResultsDirectory(directory, {"model": "scripted"}) as results,
        RayEvaluator(partial(SlowEvaluator, str(marks)), 3, losses.append) as remote,
    ):
        assert remote.replicas == 2
        asyncio.run(run_jobs(every, remote, results, concurrency=6, on_row=on_row))
        return results.finish(), list(results.rows.values())


def test_a_node_that_dies_in_the_middle_loses_no_sample_and_scores_none_twice(tmp_path, cluster):
    nodes, second = cluster
    every = jobs("cell", [fact_task(i, 4) for i in range(30)])
    losses, rows_seen = [], []

    def on_row(row):
        rows_seen.append(row.number)
        if len(rows_seen) == 6:
            threading.Thread(target=nodes.remove_node, args=(second,), kwargs={"allow_graceful": False}).start()

    results, rows = run(tmp_path / "out", tmp_path / "marks", every, losses, on_row)
    begun = [line.split() for line in (tmp_path / "marks").read_text().splitlines()]
    assert len({process for _, process in begun}) == 2
    assert len(losses) == 1
    assert losses[0].startswith("lost the replica on node")
    assert max(Counter(number for number, _ in begun).values()) == 2  # what the dead node was reading was read again
    assert sorted(rows_seen) == sorted(row.number for row in rows) == list(range(30))
    assert all(row.attempt == 1 and row.error is None for row in rows)
    lines = (tmp_path / "out" / "samples_cell.jsonl").read_text().splitlines()
    assert len(lines) == results["n-samples"]["cell"]["effective"] == 30

    alone = evaluator(forgetful(0.1), RewardPool(workers=1))
    with ResultsDirectory(tmp_path / "alone", {"model": "scripted"}) as directory:
        asyncio.run(run_jobs(every, alone, directory, 1))
        assert directory.finish()["results"]["cell"]["score"] == results["results"]["cell"]["score"]
    alone.pool.close()


def test_when_every_replica_dies_finished_samples_stay_and_the_next_run_goes_on(tmp_path, cluster):
    every = jobs("cell", [fact_task(i, 2) for i in range(12)])
    marks = tmp_path / "marks"

    def kill_all(row):
        if row.number < 100 and not getattr(kill_all, "done", False):
            kill_all.done = True
            for process in {int(line.split()[1]) for line in marks.read_text().splitlines()}:
                os.kill(process, signal.SIGKILL)

    with pytest.raises(RuntimeError, match="every replica has died"):
        run(tmp_path / "out", marks, every, [], kill_all)
    time.sleep(1)
    results, rows = run(tmp_path / "out", tmp_path / "more", every, [])
    assert len(rows) == 12
    assert results["results"]["cell"]["failed"] == 0
    assert len((tmp_path / "more").read_text().splitlines()) < 12


def test_a_context_made_of_documents_keeps_them_on_its_way_to_a_replica(tmp_path):
    from memjax.eval.ray_runner import _movable

    write_corpus(tmp_path / "pool.jsonl", ["Far\nNothing.", "Own\nThe answer is x.", "Mine\nAlso ours."])
    corpus = Corpus(tmp_path / "pool.jsonl")
    task = Task("t", "Which?", Documents(corpus, (0, 2, 1)), ("x",), extra={"own": [2, 3]})
    moved = pickle.loads(pickle.dumps(_movable(Job.of("cell", 0, task)))).task
    assert (own_text(moved), moved.context.name) == (own_text(task), task.context.name)
    assert list(moved.context.pieces()) == list(task.context.pieces())
    corpus.close()
