"""`memjax data`: makes RULER and long multi-hop task files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from statistics import mean
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from memjax.data.generate import MultihopPlan, RulerPlan, generate_multihop, generate_ruler
from memjax.data.haystack import BOOKS
from memjax.data.lengths import parse_length
from memjax.data.multihop import Format
from memjax.data.ruler import ANSWER_TOKENS, QUESTIONS

app = typer.Typer(help="Make and inspect task files.", no_args_is_help=True, add_completion=False)


class QuestionFormat(StrEnum):
    """The data sets whose files are read."""

    hotpotqa = "hotpotqa"
    two_wiki = "2wiki"
    musique = "musique"
    squad = "squad"


class SplitName(StrEnum):
    """The halves of a data set that share no paragraph."""

    train = "train"
    eval = "eval"


Out = Annotated[Path, typer.Option(help="The task file to write (JSON lines).")]
TokenizerName = Annotated[str, typer.Option(help="Model directory, .gguf file or hub id whose tokens are counted.")]
Samples = Annotated[int, typer.Option(min=1, help="How many samples; RULER: of each task.")]
Seed = Annotated[int, typer.Option(help="Every sample draws from a stream of its own under this seed.")]
Workers = Annotated[int, typer.Option(min=1, help="Processes. The bytes do not depend on it.")]
_CORES = os.cpu_count() or 1


@app.command()
def ruler(
    out: Out,
    tokenizer: TokenizerName,
    length: Annotated[str, typer.Option(help="Most tokens of context, question and answer together: 8192, 128k, 4m.")],
    tasks: Annotated[str, typer.Option(help="Names with commas between, or all.")] = "all",
    samples: Samples = 128,
    seed: Seed = 0,
    haystack: Annotated[list[Path] | None, typer.Option(help="Essay text instead of the bundled books.")] = None,
    squad: Annotated[Path | None, typer.Option(help="SQuAD's JSON, for qa_1.")] = None,
    hotpotqa: Annotated[Path | None, typer.Option(help="HotpotQA's JSON, for qa_2.")] = None,
    workers: Workers = _CORES,
) -> None:
    """Make RULER tasks: needles, variable tracking, word counting and questions among documents."""
    names = list(ANSWER_TOKENS) if tasks == "all" else [name.strip() for name in tasks.split(",")]
    files = {"qa_1": squad, "qa_2": hotpotqa}
    questions = tuple((name, path) for name in QUESTIONS if name in names and (path := files[name]) is not None)

    def make(progress: Callable[[int], None]) -> None:
        essay = tuple(haystack or BOOKS)
        plan = RulerPlan(tokenizer, parse_length(length), seed, essay, questions)
        generate_ruler(plan, names, samples, out, workers=workers, progress=progress)

    _run(make, len(names) * samples, out, seed)


@app.command()
def hotpotqa(
    questions: Annotated[Path, typer.Argument(help="The data set's file as published, plain or .gz.")],
    out: Out,
    tokenizer: TokenizerName,
    length: Annotated[str | None, typer.Option(help="Most tokens of context and question: 7k, 3.5m.")] = None,
    docs: Annotated[int | None, typer.Option(min=1, help="Number of documents instead of a length.")] = None,
    format: Annotated[QuestionFormat, typer.Option(help="Whose file it is.")] = QuestionFormat.hotpotqa,
    samples: Samples = 128,
    seed: Seed = 0,
    split: Annotated[SplitName | None, typer.Option(help="Only one of two halves that share no paragraph.")] = None,
    eval_count: Annotated[int, typer.Option(help="Questions in the evaluation half.")] = 128,
    distractors: Annotated[list[Path] | None, typer.Option(help="More files of this format for the pool.")] = None,
    apart_from: Annotated[Path | None, typer.Option(help="Use no paragraph of this file (evaluation).")] = None,
    workers: Workers = _CORES,
) -> None:
    """Make long contexts: a question's own paragraphs among distractors, to a number of tokens or of documents."""
    if (length is None) == (docs is None):
        raise typer.BadParameter("give --length or --docs, one of the two")

    def make(progress: Callable[[int], None]) -> None:
        kind: Format = format.value
        plan = MultihopPlan(
            tokenizer,
            seed,
            questions,
            kind,
            "tokens" if length is not None else "documents",
            parse_length(length) if length is not None else docs or 0,
            None if split is None else split.value,
            eval_count,
            tuple(distractors or ()),
            apart_from,
        )
        generate_multihop(plan, samples, out, workers=workers, progress=progress)

    _run(make, samples, out, seed)


def _run(make: Callable[[Callable[[int], None]], None], total: int, out: Path, seed: int) -> None:
    """Make a file while a bar shows how far it is, then say what is in it; a ValueError ends with its message."""
    console = Console(stderr=True)
    columns = (TextColumn("samples"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("", total=total)
            make(lambda done: bar.advance(task, done))
    except (ValueError, OSError) as error:
        console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
    Console().print(_statistics(out, seed))


def _statistics(out: Path, seed: int) -> Table:
    """Samples and tokens of a written file, by task."""
    lengths: dict[str, list[int]] = {}
    with out.open(encoding="utf-8") as file:
        for line in file:
            extra = json.loads(line)["extra"]
            lengths.setdefault(extra.get("task", "questions"), []).append(extra["length"])
    table = Table(title=f"{out} (seed {seed})")
    for column in ("task", "samples", "least tokens", "mean tokens", "most tokens"):
        table.add_column(column, justify="left" if column == "task" else "right")
    for name, values in lengths.items():
        table.add_row(name, *(f"{value:,}" for value in (len(values), min(values), round(mean(values)), max(values))))
    return table


if __name__ == "__main__":
    app()
