import io

import pytest
from rich.console import Console

from memjax.episodes.diagnosis import Fate
from memjax.eval.plot import curve, plot_accuracy
from memjax.eval.report import Table, busy_seconds, comparison_table, load_run, report, scores_table
from memjax.eval.results import ResultsDirectory
from tests.eval.test_results import row

CONFIG = {"suite": "ruler-hotpotqa", "model": "m", "tasks": ["ruler-hotpotqa"], "lengths": ["7k", "14K"]}
SHORT, LONG = "ruler-hotpotqa_7k", "ruler-hotpotqa_14k"


def write(directory, scores, **changes):
    with ResultsDirectory(directory, CONFIG) as results:
        for cell, values in scores.items():
            for number, score in enumerate(values):
                results.append(row(number, score, cell=cell, **changes))
    return load_run(directory)


def test_a_run_is_reported_with_hand_worked_numbers_in_the_order_of_its_lengths(tmp_path):
    with ResultsDirectory(tmp_path / "mine", CONFIG) as results:
        results.append(row(0, 0.0, cell=LONG, error="down"))
        for number, score in enumerate([1.0, 1.0, 0.0, 0.0]):
            results.append(row(number, score, cell=SHORT))
    table = scores_table([load_run(tmp_path / "mine")])
    # (1.959964 + 0.841621)^2 / 0.03^2 = 8720.98, times 2 * 1/2 * 1/2, and times 2 * 1/3 * 2/3: with one right and one
    # wrong sample added, 0 of 1 is 1 of 3.
    assert table.rows == (
        ("mine", SHORT, "sub_em", "50.0", "15.0 .. 85.0", "4", "0", "4361"),
        ("mine", LONG, "sub_em", "0.0", "0.0 .. 79.3", "1", "1", "3876"),
    )


def test_a_run_that_is_not_finished_is_named(tmp_path):
    part = write(tmp_path / "part", {SHORT: [1.0]})
    with ResultsDirectory(tmp_path / "whole", CONFIG) as results:
        results.append(row(0, 1.0, cell=SHORT))
        results.finish()
    note = scores_table([part, load_run(tmp_path / "whole")]).note
    assert note.endswith("Not finished, so that only the samples done so far count: part.")
    assert "Not finished" not in scores_table([load_run(tmp_path / "whole")]).note


def test_runs_are_compared_on_the_samples_that_they_share(tmp_path):
    a = write(tmp_path / "a", {SHORT: [1.0, 0.0, 0.0, 0.0]})
    b = write(tmp_path / "b", {SHORT: [1.0, 1.0, 1.0], LONG: [1.0]})
    (line,) = comparison_table([a, b]).rows
    assert (line[0], line[1], line[2], line[5]) == ("b - a", SHORT, "+66.7", "3")
    assert line[6] == "1938"  # the differences 0, 1, 1 have variance 2/9


def test_other_tasks_under_the_same_number_are_not_compared(tmp_path):
    a = write(tmp_path / "a", {SHORT: [1.0]})
    b = write(tmp_path / "b", {SHORT: [1.0]}, task_id="another")
    assert comparison_table([a, b]).rows == ()


def test_overlapping_samples_count_once_and_pauses_not_at_all():
    rows = [row(0, started=0.0, seconds=10.0), row(1, started=5.0, seconds=10.0), row(2, started=100.0, seconds=5.0)]
    assert busy_seconds(rows) == 20


def test_a_report_shows_cost_losses_and_published_rows(tmp_path):
    lost = Fate("code", "retention", (0,), 0, 7, 7, 1)
    changes = {"document_tokens": 700, "seconds": 10.0, "model_calls": 9, "memories": ("m",) * 8, "fates": (lost,)}
    tables = {table.title: table for table in report([write(tmp_path / "mine", {SHORT: [0.0]}, **changes)])}
    cost = dict(zip(tables["Cost"].header, tables["Cost"].rows[0], strict=True))
    assert (cost["document"], cost["per s"], cost["calls"]) == ("700", "70", "9.0")
    lost_row = dict(
        zip(tables["Where evidence was lost"].header, tables["Where evidence was lost"].rows[0], strict=True)
    )
    assert (lost_row["dropped"], lost_row["retention %"], lost_row["per update %"]) == ("1", "0.0", "85.7")
    assert tables["Losses by tenth of the document"].rows[0][-2:] == ("1", "0")  # the eighth of eight chunks
    published = {line[1]: line[2:] for line in tables["Published"].rows}
    assert published["RL-MemAgent-7B"][0] == "82.03"
    assert published["QwenLong-L1-32B"][-1] == ""  # not run at 3.5M
    assert "2507.02259" in tables["Published"].note


def test_where_evidence_was_lost_is_left_out_when_none_was(tmp_path):
    kept = Fate("code", "kept", (0,), 0, None, 7, 0)
    tables = report([write(tmp_path / "mine", {SHORT: [1.0]}, memories=("m",), fates=(kept,))])
    assert [table.title for table in tables] == ["Scores", "Cost", "Published"]


@pytest.mark.parametrize("names", [("memagent-14b",), ("hotpotqa-memagent", "hotpotqa-no-context")])
def test_printed_tables_fit_100_columns_without_a_broken_word(tmp_path, names):
    fates = [Fate("code", stage, (0,), 0, 7, 7, 1) for stage in ("capture", "retention")]
    changes = {"document_tokens": 3_500_000, "prompt_tokens": 5_000_000, "seconds": 99_999.0, "fates": tuple(fates)}
    scores = {SHORT: [0.0] * 128, LONG: [1.0]}
    runs = [write(tmp_path / name, scores, memories=("m",) * 8, **changes) for name in names]
    console = Console(width=200, file=io.StringIO())
    for table in report(runs):
        measured = table.to_rich().__rich_measure__(console, console.options)
        assert measured.minimum <= 100, table.title


def test_a_printed_table_says_once_what_does_not_change():
    def printed(*rows):
        console = Console(width=100, file=io.StringIO())
        console.print(Table("Scores", ("run", "cell", "score %"), rows).to_rich())
        lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
        return lines[0], [line for line in lines[3:] if line and "─" not in line]

    assert printed(("a", "7k", "1"), ("a", "14k", "2")) == ("Scores: a", ["7k 1", "14k 2"])
    assert printed(("a", "7k", "1"), ("b", "7k", "2")) == ("Scores: 7k", ["a 1", "b 2"])
    both = printed(("a", "7k", "1"), ("a", "14k", "2"), ("b", "7k", "3"))
    assert both == ("Scores", ["a", "7k 1", "14k 2", "b", "7k 3"])


def test_a_run_named_in_brackets_is_printed_as_it_is(tmp_path):
    console = Console(width=100, file=io.StringIO())
    console.print(Table("Scores", ("run", "cell"), (("[red]", "[b] with enough words for the title"),)).to_rich())
    assert "Scores: [red]" in console.file.getvalue()
    assert "[b]" in console.file.getvalue()


def test_tables_become_markdown():
    table = Table("Scores", ("run", "a|b"), (("x", "1"),), "A note.")
    assert table.to_markdown() == "### Scores\n\n| run | a/b |\n| --- | --- |\n| x | 1 |\n\nA note.\n"


def test_the_plot_shows_each_length_with_its_interval(tmp_path):
    pytest.importorskip("matplotlib")
    run = write(tmp_path / "mine", {SHORT: [1.0, 0.0], LONG: [1.0]})
    points = curve(run)
    assert [(tokens, point.mean, point.count) for tokens, point in points.items()] == [(7000, 0.5, 2), (14000, 1.0, 1)]
    plot_accuracy([run], tmp_path / "accuracy.png")
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir()])
def test_a_directory_that_is_no_run_is_refused(tmp_path, make):
    make(tmp_path / "x")
    with pytest.raises(ValueError, match=r"x has no config.json: give a directory that `memjax eval` wrote"):
        load_run(tmp_path / "x")


def test_a_run_without_samples_says_so(tmp_path):
    with ResultsDirectory(tmp_path, CONFIG):
        pass
    with pytest.raises(ValueError, match="holds no finished sample yet"):
        load_run(tmp_path)
