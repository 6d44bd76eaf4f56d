import json
import os
from dataclasses import replace

import pytest

from memjax.eval.results import ResultsDirectory, Row, commit, read_samples, summarise

CONFIG = {"suite": "smoke", "model": "m", "agent.chunk": 512}


def row(number, score=1.0, **changes):
    fields = {
        "cell": "cell",
        "number": number,
        "task_id": f"task{number}",
        "metric": "sub_em",
        "metrics": {"sub_em": score, "f1": score / 2},
        "answers": ("a",),
        "response": "r",
        "extracted": "a",
        "extraction": "box",
        "model": "m",
        "commit": "c",
        "config_hash": "h",
        "doc_hash": f"doc{number}",
        "prompt_hash": "p",
    }
    return Row(**{**fields, **changes})


def test_a_row_survives_the_file(tmp_path):
    written = row(3, metric_errors=("slow",), memories=("one", "two"), seconds=1.5, error=None, generated_tokens=7)
    (tmp_path / "samples_cell.jsonl").write_text(json.dumps(written.to_json()) + "\n")
    assert list(read_samples(tmp_path / "samples_cell.jsonl")) == [written]


def test_finishing_out_of_order_and_in_two_runs_gives_the_bytes_of_one_run_in_order(tmp_path):
    graded = [1 / 3, 0.1, 1 / 7, 0.9]  # a sum that depends on the order
    with ResultsDirectory(tmp_path / "one", CONFIG) as results:
        for number in range(4):
            results.append(row(number, graded[number]))
        results.append(row(0, cell="last"))
        results.finish()
    with ResultsDirectory(tmp_path / "two", CONFIG) as results:
        results.append(row(0, cell="last"))
        results.append(row(3, graded[3], seconds=9.0))
        results.append(row(1, 0.0, error="failed"))
    with ResultsDirectory(tmp_path / "two", CONFIG) as results:
        assert [results.finished(("cell", n), f"doc{n}") for n in range(4)] == [False, False, False, True]
        for number in (2, 1, 0):
            results.append(row(number, graded[number]))
        results.finish()
    one, two = ((tmp_path / name / "results.json").read_bytes() for name in ("one", "two"))
    assert one == two
    numbers = [line.number for line in read_samples(tmp_path / "two" / "samples_cell.jsonl")]
    assert numbers == [0, 1, 2, 3]


@pytest.mark.parametrize("torn", [b'{"doc_id": 1, "id', b"\xc3", b"x" * 200_000])
def test_the_half_line_of_a_kill_is_dropped_and_its_sample_run_again(tmp_path, torn):
    with ResultsDirectory(tmp_path, CONFIG) as results:
        results.append(row(0))
    with (tmp_path / "samples_cell.jsonl").open("ab") as file:
        file.write(torn)
    with ResultsDirectory(tmp_path, CONFIG) as results:
        assert results.finished(("cell", 0), "doc0")
        assert not results.finished(("cell", 1), "doc1")
        results.append(row(1))
    assert [line.number for line in read_samples(tmp_path / "samples_cell.jsonl")] == [0, 1]


def test_a_line_that_is_no_sample_is_refused_by_file_and_line(tmp_path):
    with ResultsDirectory(tmp_path, CONFIG) as results:
        results.append(row(0))
    with (tmp_path / "samples_cell.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(ValueError, match=r"samples_cell.jsonl:2 is not a sample"), ResultsDirectory(tmp_path, CONFIG):
        pass


def test_another_config_is_refused_with_the_fields_that_differ(tmp_path):
    with ResultsDirectory(tmp_path, CONFIG):
        pass
    other = {**CONFIG, "agent.chunk": 256, "agent.name": "single"}
    with pytest.raises(ValueError, match="made with another config") as refused, ResultsDirectory(tmp_path, other):
        pass
    assert 'agent.chunk was 512, is 256; agent.name was null, is "single"' in str(refused.value)
    assert "suite" not in str(refused.value)


def test_samples_without_a_config_are_not_adopted(tmp_path):
    (tmp_path / "samples_cell.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"holds samples but no config.json"), ResultsDirectory(tmp_path, CONFIG):
        pass


def test_a_task_that_changed_under_a_finished_sample_is_refused(tmp_path):
    with ResultsDirectory(tmp_path, CONFIG) as results:
        results.append(row(0))
        with pytest.raises(ValueError, match=r"sample 0 of cell .* was another task \(task0\): the data has changed"):
            results.finished(("cell", 0), "other")


def test_two_evaluations_do_not_write_to_one_directory(tmp_path):
    refused = pytest.raises(
        ValueError, match=f"in use by process {os.getpid()} on .*: wait for it or give another --out"
    )
    with ResultsDirectory(tmp_path, CONFIG), refused, ResultsDirectory(tmp_path, CONFIG):
        pass
    with ResultsDirectory(tmp_path, CONFIG):
        pass


def test_results_have_lm_evals_shape_with_failures_in_the_denominator():
    rows = [row(0), row(1, 0.0, error="down"), row(2, document_tokens=10), row(3, 0.0)]
    results = summarise(rows, CONFIG)
    cell = results["results"]["cell"]
    assert cell["sub_em,none"] == cell["score"] == 0.5
    assert cell["sub_em_stderr,none"] == pytest.approx((1 / 3) ** 0.5 / 2)
    assert (cell["f1,none"], cell["failed"], cell["document_tokens"]) == (0.25, 1, 10)
    assert cell["score_95"] == pytest.approx([0.15004, 0.84996], abs=1e-5)  # Wilson of 2 in 4
    assert results["n-samples"]["cell"] == {"original": 4, "effective": 4}
    assert results["higher_is_better"]["cell"] == {"sub_em": True, "f1": True}
    assert (results["model_name"], results["git_hash"], results["n-shot"]) == ("m", "c", {"cell": 0})


def test_memory_does_not_keep_the_texts_of_finished_samples(tmp_path):
    with ResultsDirectory(tmp_path, CONFIG) as results:
        results.append(replace(row(0), memories=("long",), response="long"))
        assert (results.rows["cell", 0].memories, results.rows["cell", 0].response) == ((), "")


def test_the_commit_of_a_checkout_is_known():
    assert len(commit().removesuffix("-dirty")) in (40, len("unknown"))
