"""What runs say side by side: scores and how sure they are, cost, where evidence was lost, what differs."""

from __future__ import annotations

import itertools
import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memjax.episodes.diagnosis import STAGES, Stage, counters, losses_by_tenth
from memjax.eval.results import Key, Row, read_samples, slim
from memjax.eval.statistics import compare, interval, samples_needed
from memjax.eval.suites import SUITES
from memjax.eval.verdicts import Verdict, judged, read_verdicts

if TYPE_CHECKING:
    from rich.table import Table as RichTable

_HEAD_WIDTH = 7  # characters of a line in a printed column's head: most values are as short
_LOSS: Mapping[Stage, str] = {"capture": "not captured", "retention": "dropped"}


@dataclass(frozen=True)
class Table:
    """A titled table of texts, with a note under it."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def to_markdown(self) -> str:
        """The table as GitHub shows it."""
        lines = [self.header, ("---",) * len(self.header), *self.rows]
        body = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
        return f"### {self.title}\n\n{body}\n" + (f"\n{self.note}\n" if self.note else "")

    def to_rich(self) -> RichTable:
        """The table for a terminal, kept narrow: of the two columns that name a line, one that never changes goes into
        the title, and where both change the first becomes a line above the lines that it names."""
        from rich.box import SIMPLE_HEAD
        from rich.markup import escape
        from rich.table import Table as Terminal

        firsts, seconds = ({row[column] for row in self.rows} for column in (0, 1))
        title, names = self.title, [0, 1]
        if len(firsts) == 1:
            title, names = f"{title}: {firsts.pop()}", [1]
        elif len(seconds) == 1:
            title, names = f"{title}: {seconds.pop()}", [0]
        table = Terminal(
            title=escape(title),
            caption=escape(self.note) or None,
            box=SIMPLE_HEAD,
            collapse_padding=True,
            pad_edge=False,
        )
        table.title_justify = table.caption_justify = "left"
        for column in [names[-1], *range(2, len(self.header))]:
            head = escape("\n".join(textwrap.wrap(self.header[column], _HEAD_WIDTH, break_long_words=False)))
            table.add_column(head, justify="left" if column < 2 else "right", overflow="fold", no_wrap=column < 2)
        above = None
        for row in self.rows:
            if len(names) == 2 and row[0] != above:
                above = row[0]
                table.add_row(escape(above), style="bold")
            table.add_row(("  " if len(names) == 2 else "") + escape(row[names[-1]]), *map(escape, row[2:]))
        return table


@dataclass(frozen=True)
class Run:
    """A results directory as a report sees it. An unfinished one counts with what it has."""

    name: str
    config: Mapping[str, Any]
    rows: Mapping[Key, Row]
    chunks: Mapping[Key, int]  # memories written in each sample
    verdicts: Mapping[Key, Verdict]  # of a judge, where there was one
    finished: bool

    @property
    def cells(self) -> dict[str, list[Row]]:
        """The rows by cell, in the order in which the run's config has the cells."""
        lengths = self.config["lengths"] or [""]
        names = [f"{task}_{length.lower()}" if length else task for length in lengths for task in self.config["tasks"]]
        found: dict[str, list[Row]] = {name: [] for name in names}
        for key in sorted(self.rows):
            found.setdefault(key[0], []).append(self.rows[key])
        return {name: rows for name, rows in found.items() if rows}


def load_run(directory: Path) -> Run:
    """Read a results directory; ValueError where it is none."""
    if not (directory / "config.json").is_file():
        raise ValueError(f"{directory} has no config.json: give a directory that `memjax eval` wrote with --out")
    rows: dict[Key, Row] = {}
    chunks: dict[Key, int] = {}
    for file in sorted(directory.glob("samples_*.jsonl")):
        for row in read_samples(file):
            rows[row.key] = slim(row)
            chunks[row.key] = len(row.memories)
    if not rows:
        raise ValueError(f"{directory} holds no finished sample yet")
    config = json.loads((directory / "config.json").read_text("utf-8"))
    finished = (directory / "results.json").is_file()
    return Run(directory.name, config, rows, chunks, read_verdicts(directory), finished)


def report(runs: Sequence[Run]) -> list[Table]:
    """Every table that the runs give rise to."""
    tables = [scores_table(runs), cost_table(runs)]
    optional = [judged_table(runs), diagnosis_table(runs), losses_table(runs), published_table(runs)]
    optional.append(comparison_table(runs))
    return tables + [table for table in optional if table.rows]


def scores_table(runs: Sequence[Run]) -> Table:
    """One line per run and cell: the score, how sure it is, and how many samples failed."""
    lines = []
    for run, cell, rows in _every_cell(runs):
        scores = interval([row.score for row in rows])
        # One right and one wrong sample are added (Laplace), or 0 right of 5 would promise that one sample is enough.
        shrunk = (scores.mean * scores.count + 1) / (scores.count + 2)
        lines.append(
            (
                run.name,
                cell,
                rows[0].metric,
                _percent(scores.mean),
                f"{_percent(scores.low)} .. {_percent(scores.high)}",
                str(scores.count),
                str(sum(row.error is not None for row in rows)),
                str(samples_needed(2 * shrunk * (1 - shrunk))),
            )
        )
    header = ("run", "cell", "metric", "score %", "95 % interval", "samples", "failed", "n for 3 points")
    note = (
        "Failed samples count as 0. Intervals: Wilson for right-or-wrong metrics, bootstrap for graded ones. "
        "n for 3 points: samples per run with which two unpaired runs near this score would show a 3-point difference "
        "(power 0.8)."
    )
    if unfinished := [run.name for run in runs if not run.finished]:
        note += f" Not finished, so that only the samples done so far count: {', '.join(unfinished)}."
    return Table("Scores", header, tuple(lines), note)


def cost_table(runs: Sequence[Run]) -> Table:
    """What the scores took."""
    lines = []
    for run, cell, rows in _every_cell(runs):
        document = sum(row.document_tokens for row in rows)
        seconds = busy_seconds(rows)
        generated = sum(row.generated_tokens for row in rows)
        lines.append(
            (
                run.name,
                cell,
                f"{document:,}",
                f"{document / seconds:,.0f}" if seconds else "",
                f"{sum(row.model_calls for row in rows) / len(rows):.1f}",
                f"{generated / len(rows):,.0f}",
                f"{sum(row.prompt_tokens for row in rows) / len(rows):,.0f}",
                f"{seconds:,.0f}",
                str(sum(row.truncated_replies for row in rows)),
                f"{sum(row.dropped_tokens for row in rows):,}",
            )
        )
    header = (
        "run", "cell", "document", "per s", "calls", "generated", "prompt", "seconds", "cut replies", "left out",
    )  # fmt: skip
    note = (
        "Document tokens read, and per second; calls, generated and prompt tokens per sample; seconds in which at "
        "least one sample was being read; replies that ended at their budget; document tokens cut out to fit a window."
    )
    return Table("Cost", header, tuple(lines), note)


def judged_table(runs: Sequence[Run]) -> Table:
    """The scores that a judging model gives; without rows where none was asked."""
    lines = []
    for run, cell, rows in _every_cell([run for run in runs if run.verdicts]):
        of_cell = judged(rows, run.verdicts)
        lines.append(
            (
                run.name,
                cell,
                _percent(of_cell.score.mean),
                f"{_percent(of_cell.score.low)} .. {_percent(of_cell.score.high)}",
                str(len(rows)),
                *(str(of_cell.rulings.get(name, 0)) for name in ("no answer", "unclear", "failed", "missing")),
                _percent(of_cell.agreement),
            )
        )
    judges = dict.fromkeys(verdict.judge for run in runs for verdict in run.verdicts.values())
    header = (
        "run", "cell", "judge %", "95 % interval", "samples", "no answer", "unclear", "failed", "missing", "agrees %",
    )  # fmt: skip
    note = (
        f"Judged by {', '.join(judges)}. No answer, an unclear verdict, a judge that failed and a missing verdict "
        "count as wrong. Agrees: samples on which judge and metric say the same."
    )
    return Table("Judged", header, tuple(lines), note)


def diagnosis_table(runs: Sequence[Run]) -> Table:
    """Where evidence went, per run and cell; without rows where none was lost."""
    lines = []
    lost = any(fate.stage != "kept" for run in runs for row in run.rows.values() for fate in row.fates)
    for run, cell, rows in _every_cell(runs):
        fates = [fate for row in rows for fate in row.fates]
        if not fates or not lost:
            continue
        stages = Counter(fate.stage for fate in fates)
        rates = counters(fates)
        names = ("capture_rate", "retention_rate", "retention_rate_per_update", "use_rate")
        values = [_percent(rates[f"memory/{name}"]) if f"memory/{name}" in rates else "" for name in names]
        lines.append((run.name, cell, str(len(fates)), *(str(stages[stage]) for stage in STAGES), *values))
    header = (
        "run", "cell", "facts", "unseen", "not captured", "dropped", "not used", "kept",
        "capture %", "retention %", "per update %", "use %",
    )  # fmt: skip
    note = (
        "Facts that the answer needs, by what became of them; each rate is of those that passed the stage before. A "
        "fact that a memory paraphrases counts as not held."
    )
    return Table("Where evidence was lost", header, tuple(lines), note)


def losses_table(runs: Sequence[Run]) -> Table:
    """In which tenth of the document facts were lost."""
    lines = []
    for run, cell, rows in _every_cell(runs):
        tenths = losses_by_tenth((row.fates, run.chunks[row.key]) for row in rows)
        for stage, counts in tenths.items():
            if any(counts):
                lines.append((run.name, cell, _LOSS[stage], *map(str, counts)))
    header = ("run", "cell", "loss", *(f"{10 * k + 10}%" for k in range(10)))
    return Table("Losses by tenth of the document", header, tuple(lines))


def published_table(runs: Sequence[Run]) -> Table:
    """What others have published on the suites of these runs."""
    suites = [SUITES[name] for name in dict.fromkeys(run.config["suite"] for run in runs) if name in SUITES]
    labels = list(dict.fromkeys(label for suite in suites for label in suite.lengths if suite.published))
    lines = [
        (suite.name, row.model, *(f"{row.scores[label]:.2f}" if label in row.scores else "" for label in labels))
        for suite in suites
        for row in suite.published
    ]
    sources = "; ".join(f"{suite.name}: {suite.source}" for suite in suites if suite.source)
    return Table("Published", ("suite", "model", *labels), tuple(lines), sources)


def comparison_table(runs: Sequence[Run]) -> Table:
    """Every pair of runs on the samples that both have."""
    lines = []
    for a, b in itertools.combinations(runs, 2):
        for cell in [cell for cell in a.cells if cell in b.cells]:
            pairs = [(row, b.rows[row.key]) for row in a.cells[cell] if row.key in b.rows]
            pairs = [(mine, theirs) for mine, theirs in pairs if mine.task_id == theirs.task_id]
            if not pairs or pairs[0][0].metric != pairs[0][1].metric:
                continue
            result = compare([mine.score for mine, _ in pairs], [theirs.score for _, theirs in pairs])
            lines.append(
                (
                    f"{b.name} - {a.name}",
                    cell,
                    f"{100 * result.difference.mean:+.1f}",
                    f"{100 * result.difference.low:+.1f} .. {100 * result.difference.high:+.1f}",
                    f"{result.p_value:.3f}",
                    str(len(pairs)),
                    str(result.samples_for_3_points or ""),
                )
            )
    header = ("pair", "cell", "points", "95 % interval", "p", "shared samples", "n for 3 points")
    note = (
        "Paired bootstrap over shared samples, p by sign flips. n for 3 points: shared samples with which a true "
        "difference of 3 points would be told from none 4 times in 5."
    )
    return Table("Differences", header, tuple(lines), note)


def busy_seconds(rows: Iterable[Row]) -> float:
    """Seconds in which at least one of the samples was being read: overlaps count once, pauses between runs not."""
    total, until = 0.0, float("-inf")
    for start, end in sorted((row.started, row.started + row.seconds) for row in rows):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _every_cell(runs: Sequence[Run]) -> list[tuple[Run, str, list[Row]]]:
    return [(run, cell, rows) for run in runs for cell, rows in run.cells.items()]


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"
