import asyncio
import json
import random
from dataclasses import replace

import pytest

from memjax.episodes.diagnosis import counters
from memjax.eval.results import ResultsDirectory
from memjax.eval.run import run_jobs
from memjax.eval.statistics import wilson
from memjax.eval.tasks import Job
from memjax.rewards.pool import RewardPool
from memjax.rollout.client import ClientError
from memjax.rollout.fake import ScriptedClient
from memjax.trajectory import Task
from tests.eval.forgetful import IDENTITY, READER, Wrapped, evaluator, fact_task, forgetful, jobs

FORGET = 0.1


@pytest.fixture(scope="module")
def pool():
    with RewardPool(workers=1) as pool:
        yield pool


def run(directory, all_jobs, evaluate, concurrency=4, on_row=lambda row: None):
    with ResultsDirectory(directory, {"model": "scripted"}) as results:
        asyncio.run(run_jobs(all_jobs, evaluate, results, concurrency, on_row))
        return results.finish(), list(results.rows.values())


def test_a_reader_that_forgets_at_a_known_rate_scores_on_the_analytic_curve(tmp_path, pool):
    samples = 120
    lengths = (1, 3, 8, 15)
    tasks = {f"n_{n}": [fact_task(1000 * n + i, n) for i in range(samples)] for n in lengths}
    every = [job for cell, made in tasks.items() for job in jobs(cell, made)]
    results, rows = run(tmp_path, every, evaluator(forgetful(FORGET), pool))
    for n in lengths:
        expected = (1 - FORGET) ** (n - 1)
        # Four standard errors: a right runner fails once in 4,000 draws of the seed.
        low, high = wilson(expected * samples, samples, confidence=0.99994)
        assert low <= results["results"][f"n_{n}"]["score"] <= high, n
    fates = [fate for row in rows for fate in row.fates]
    rates = counters(fates)
    assert rates["memory/capture_rate"] == rates["memory/use_rate"] == 1
    updates = sum(fate.updates for fate in fates)
    low, high = wilson((1 - FORGET) * updates, updates, confidence=0.99994)
    assert low <= rates["memory/retention_rate_per_update"] <= high


@pytest.mark.parametrize("dropped_at", [2, 5])
def test_the_diagnosis_names_the_chunk_at_which_a_fact_was_dropped(tmp_path, pool, dropped_at):
    def drop(prompt, params):
        if "<section>" not in prompt:
            return r"\boxed{unknown}"
        page = next((k for k in range(8) if f"page {k}." in prompt.partition("<section>")[2]), 1)
        return "- 107919" if 1 <= page < dropped_at else "- nothing"

    _, (row,) = run(tmp_path, jobs("cell", [fact_task(1, 8, place=1)]), evaluator(ScriptedClient(drop), pool))
    (fate,) = row.fates
    assert (fate.stage, fate.shown_in, fate.captured_at, fate.lost_at) == ("retention", (1,), 1, dropped_at)


def test_a_client_that_fails_one_request_in_ten_lowers_the_score_by_what_it_should(tmp_path, pool):
    chance = random.Random(3)

    def fail(call):
        if chance.random() < 0.1:
            raise ClientError("the service answered 500")

    samples, calls = 200, 3  # two chunks and the answer
    tasks = [fact_task(i, chunks=calls - 1) for i in range(samples)]
    results, rows = run(tmp_path, jobs("cell", tasks), evaluator(Wrapped(forgetful(0.0), fail), pool))
    cell = results["results"]["cell"]
    failed = [row for row in rows if row.error]
    assert len(rows) == samples == results["n-samples"]["cell"]["effective"]
    assert cell["failed"] == len(failed)
    assert cell["score"] == 1 - len(failed) / samples  # the reader is perfect otherwise
    low, high = wilson(0.9**calls * samples, samples, confidence=0.99994)
    assert low <= cell["score"] <= high
    assert all(row.error == "the service answered 500" and row.score == 0 for row in failed)


@pytest.mark.parametrize("fault", [RuntimeError("broken agent"), KeyError("x")])
def test_whatever_an_agent_raises_is_that_samples_failure_and_no_other(tmp_path, pool, fault):
    async def breaking(task, episode):
        if task.id == "box1":
            raise fault
        return await READER(task, episode)

    broken = evaluator(forgetful(0.0), pool, breaking)
    _, rows = run(tmp_path, jobs("cell", [fact_task(i, 2) for i in range(3)]), broken)
    assert [row.score for row in sorted(rows, key=lambda row: row.number)] == [1, 0, 1]
    assert type(fault).__name__ in next(row for row in rows if row.task_id == "box1").error


def test_failed_samples_are_tried_again_and_finished_ones_are_not(tmp_path, pool):
    def fail_early(call):
        if call < 4:
            raise ClientError("starting up")

    client = Wrapped(forgetful(0.0), fail_early)
    every = jobs("cell", [fact_task(i, 1) for i in range(6)])
    first, _ = run(tmp_path, every, evaluator(client, pool), concurrency=1)
    assert first["results"]["cell"]["failed"] == 4
    before = client.calls
    second, rows = run(tmp_path, every, evaluator(client, pool), concurrency=1)
    assert client.calls - before == 4 * 2
    assert (second["results"]["cell"]["failed"], second["results"]["cell"]["score"]) == (0, 1.0)
    assert sorted(row.attempt for row in rows) == [1, 1, 2, 2, 2, 2]


def test_an_interrupted_sample_continues_with_the_call_that_was_under_way(tmp_path, pool):
    def stop_at_third(call):
        if call == 2:
            raise KeyboardInterrupt

    every = jobs("cell", [fact_task(1, 6)])
    stopped, client = Wrapped(forgetful(0.1), stop_at_third), Wrapped(forgetful(0.1), lambda call: None)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, every, evaluator(stopped, pool, journals=tmp_path / "journals"))
    results, (resumed,) = run(tmp_path, every, evaluator(client, pool, journals=tmp_path / "journals"))
    assert (stopped.calls, client.calls) == (3, 5)
    whole, (row,) = run(tmp_path / "whole", every, evaluator(Wrapped(forgetful(0.1), lambda call: None), pool))
    assert results == whole
    assert resumed.replayed_calls == 2
    assert replace(resumed, replayed_calls=0, started=0, seconds=0) == replace(row, started=0, seconds=0)


def test_the_retry_of_a_failed_sample_replays_what_it_had(tmp_path, pool):
    def fail_third(call):
        if call == 2:
            raise ClientError("overloaded")

    client = Wrapped(forgetful(0.0), fail_third)
    every, reading = jobs("cell", [fact_task(1, 4)]), evaluator(client, pool, journals=tmp_path / "journals")
    _, (failed,) = run(tmp_path, every, reading)
    assert (failed.error, failed.fates) == ("overloaded", ())
    assert [file.name for file in (tmp_path / "journals").iterdir()] == ["cell_0.jsonl"]
    _, (row,) = run(tmp_path, every, reading)
    assert (client.calls, row.score, row.attempt, row.fates[0].stage) == (3 + 3, 1, 2, "kept")


def test_a_finished_sample_leaves_no_text_of_its_document_among_the_journals(tmp_path, pool):
    reading = evaluator(forgetful(0.0), pool, journals=tmp_path / "journals")
    every, left = jobs("cell", [fact_task(i, 2) for i in range(3)]), tmp_path / "journals" / "cell_1.jsonl"
    on_disk = []
    run(tmp_path, every, reading, concurrency=1, on_row=lambda row: on_disk.append(len(list(left.parent.iterdir()))))
    assert on_disk == [0, 0, 0]
    left.write_text("what a kill between row and journal leaves")
    run(tmp_path, every, reading)
    assert list(left.parent.iterdir()) == []


def test_a_journal_of_which_nothing_can_be_replayed_makes_way_and_that_is_said(tmp_path, pool):
    every, journals = jobs("cell", [fact_task(1, 3)]), tmp_path / "journals"

    def stop(call):
        if call == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, every, evaluator(Wrapped(forgetful(0.0), stop), pool, journals=journals))
    said = []
    changed = replace(
        evaluator(forgetful(0.0), pool, journals=journals),
        identity=replace(IDENTITY, dtype="bfloat16"),
        say=said.append,
    )
    _, (row,) = run(tmp_path, every, changed)
    assert (row.score, row.replayed_calls, row.model_calls) == (1, 0, 4)
    assert len(said) == 1
    assert "cell 0 starts over: " in said[0]
    assert "dtype was None, is 'bfloat16'" in said[0]


def test_a_journal_that_is_damaged_ends_the_run_with_its_name(tmp_path, pool):
    (tmp_path / "journals").mkdir()
    (tmp_path / "journals" / "cell_0.jsonl").write_text("garbage\n")
    reading = evaluator(forgetful(0.0), pool, journals=tmp_path / "journals")
    with pytest.raises(ValueError, match=r"journals/cell_0.jsonl is not a journal of memjax"):
        run(tmp_path, jobs("cell", [fact_task(1, 1)]), reading)


def test_the_prompt_hash_tells_other_prompts_from_these(tmp_path, pool):
    tasks = [fact_task(1, 2), fact_task(1, 2), fact_task(2, 2)]
    _, rows = run(tmp_path, jobs("cell", tasks), evaluator(forgetful(0.0), pool))
    first, same, other = (row.prompt_hash for row in sorted(rows, key=lambda row: row.number))
    assert first == same != other


def test_tasks_are_made_only_when_there_is_a_place_for_them(tmp_path, pool):
    made, reading, most_ahead, most_reading = 0, set(), 0, 0

    def stream():
        nonlocal made
        for job in jobs("cell", [fact_task(i, 1) for i in range(12)]):
            made += 1
            yield job

    inner = evaluator(forgetful(0.0), pool)
    done = 0

    async def evaluate(job):
        nonlocal most_ahead, most_reading, done
        reading.add(job.number)
        most_reading = max(most_reading, len(reading))
        most_ahead = max(most_ahead, made - done)
        row = await inner(job)
        reading.remove(job.number)
        done += 1
        return row

    run(tmp_path, stream(), evaluate, concurrency=3)
    assert most_reading == 3
    assert most_ahead <= 4  # three being read, one made while one of them finishes


def test_every_sample_is_on_disk_when_it_is_announced(tmp_path, pool):
    seen = []

    def on_row(row):
        text = (tmp_path / "samples_cell.jsonl").read_text()
        assert f'"id": "{row.task_id}"' in text
        assert text.endswith("\n")
        seen.append(row.task_id)

    run(tmp_path, jobs("cell", [fact_task(i, 1) for i in range(4)]), evaluator(forgetful(0.0), pool), on_row=on_row)
    assert len(seen) == 4


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Task("t", "q", "text", ("a",), metric="f2"), "no metric 'f2'; did you mean 'f1'"),
        (Task("t", "q", "text", ()), "task 't' has no gold answer"),
        (Task("t", "q", "text", ("  ",)), "task 't' has no gold answer"),
    ],
)
def test_a_task_that_cannot_be_scored_ends_the_run_with_one_sentence(tmp_path, pool, task, message):
    with pytest.raises(ValueError, match=message):
        run(tmp_path, jobs("cell", [task]), evaluator(forgetful(0.0), pool))


def test_a_metric_that_crashes_costs_its_sample_and_is_counted(tmp_path, pool):
    task = fact_task(1, 1)
    crashing = Task(task.id, task.question, task.context, task.answers, metric="tests.eval.forgetful:broken_metric")
    results, (row,) = run(tmp_path, jobs("cell", [crashing]), evaluator(forgetful(0.0), pool))
    assert row.score == 0
    assert row.error is None
    assert row.metric_errors
    assert results["results"]["cell"]["metric_errors"] == 1
    assert row.metrics["sub_em"] == 1


def test_a_row_holds_what_it_takes_to_check_the_score_by_hand(tmp_path, pool):
    run(tmp_path, jobs("cell", [fact_task(1, 3)]), evaluator(forgetful(0.0), pool))
    (line,) = map(json.loads, (tmp_path / "samples_cell.jsonl").read_text().splitlines())
    assert line["resps"] == [[r"\boxed{107919}"]]
    assert (line["filtered_resps"], line["filter"], line["target"]) == (["107919"], "box", ["107919"])
    assert line["memories"] == ["- 107919"] * 3
    assert (line["document_tokens"], line["model_calls"]) == (3 * 64, 4)
    assert line["evidence"][0]["stage"] == "kept"
    assert {"em", "f1", "sub_em", "memagent_sub_em", "recall"} <= set(line["metrics"])
    assert line["sub_em"] == line["memagent_reward"] == 1
    assert all(line[name] for name in ("prompt_hash", "doc_hash", "target_hash", "model", "commit", "config_hash"))


def test_memagents_preset_scores_with_its_own_metric_and_extraction(tmp_path, pool):
    answer = ScriptedClient(lambda prompt, params: "So I think it is 107919.")
    results, (row,) = run(tmp_path, jobs("cell", [fact_task(1, 1)]), evaluator(answer, pool, preset="memagent"))
    assert (row.metric, row.extracted, row.score) == ("memagent_sub_em", "", 0)
    assert results["configs"]["cell"]["metric"] == "memagent_sub_em"


def test_the_number_of_samples_at_a_time_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="concurrency must be at least 1, got 0"):
        run(tmp_path, iter([Job.of("cell", 0, fact_task(1, 1))]), None, concurrency=0)


def test_a_metric_of_the_user_s_own_sees_the_whole_episode(tmp_path, pool):
    task = replace(fact_task(1, 3), metric="tests.eval.forgetful:chunks_read")
    _, (row,) = run(tmp_path, jobs("cell", [task]), evaluator(forgetful(0.0), pool))
    assert (row.score, row.metric_errors) == (3, ())
