"""`memjax data`: makes RULER, long multi-hop and tiny task files."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from statistics import mean
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from memjax.data.generate import MultihopPlan, RulerPlan, generate_multihop, generate_ruler
from memjax.data.haystack import BOOKS
from memjax.data.lengths import parse_length
from memjax.data.multihop import Format
from memjax.data.ruler import ANSWER_TOKENS, QUESTIONS
from memjax.data.tasks import write_tasks
from memjax.data.tiny import CHUNK_WORDS, TinyTasks
from memjax.trajectory import Task

USAGE, FAILURE = 2, 1
_QUESTION_FILES = ", ".join(f"--{kind} FILE for {name}" for name, kind in QUESTIONS.items())

app = typer.Typer(
    help="Make task files: RULER's tasks, multi-hop questions in long contexts, and the bundled tiny model's task.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
Seed = Annotated[int, typer.Option(help="Every sample draws from a stream of its own under this seed.")]
Workers = Annotated[int, typer.Option(min=1, help="Processes. The bytes do not depend on it.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the task file if there is one.")]
_CORES = os.cpu_count() or 1


@app.command()
def ruler(
    out: Out,
    tokenizer: TokenizerName,
    length: Annotated[str, typer.Option(help="Most tokens of context, question and answer together: 8192, 128k, 4m.")],
    tasks: Annotated[
        str | None, typer.Option(help=f"Names with commas between; by default all ({_QUESTION_FILES}).")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples of each task.")] = 128,
    seed: Seed = 0,
    haystack: Annotated[list[Path] | None, typer.Option(help="Essay text instead of the bundled books.")] = None,
    squad: Annotated[Path | None, typer.Option(help="SQuAD's JSON, for qa_1.")] = None,
    hotpotqa: Annotated[Path | None, typer.Option(help="HotpotQA's JSON, for qa_2.")] = None,
    workers: Workers = _CORES,
    force: Force = False,
) -> None:
    """Make RULER tasks: needles, variable tracking, word counting and questions among documents.

    Examples:

    memjax data ruler --tasks niah_single_1,vt --length 8k --tokenizer DIR --out ruler-8k.jsonl

    memjax data ruler --squad dev-v1.1.json --hotpotqa dev.json --length 128k --tokenizer DIR --out ruler-128k.jsonl
    """
    files = {name: path for name, path in (("qa_1", squad), ("qa_2", hotpotqa)) if path is not None}
    with _errors_as_sentences():
        tokens, essay = parse_length(length), tuple(haystack or BOOKS)
        _check_files([*essay, *files.values()], out, force)
        names = _chosen_tasks(tasks, files)
        questions = tuple((name, path) for name, path in files.items() if name in names)
        plan = RulerPlan(tokenizer, tokens, seed, essay, questions)
        with _bar(len(names) * samples) as progress:
            generate_ruler(plan, names, samples, out, workers=workers, progress=progress)
        Console().print(_statistics(out, seed))


@app.command()
def hotpotqa(
    questions: Annotated[Path, typer.Argument(help="The data set's file as published, plain or .gz.")],
    out: Out,
    tokenizer: TokenizerName,
    length: Annotated[str | None, typer.Option(help="Most tokens of context and question: 7k, 3.5m.")] = None,
    docs: Annotated[int | None, typer.Option(min=1, help="Number of documents instead of a length.")] = None,
    format: Annotated[QuestionFormat, typer.Option(help="Whose file it is.")] = QuestionFormat.hotpotqa,
    samples: Annotated[int, typer.Option(min=1, help="The first so many questions of the file.")] = 128,
    seed: Seed = 0,
    split: Annotated[SplitName | None, typer.Option(help="Only one of two halves that share no paragraph.")] = None,
    eval_count: Annotated[int, typer.Option(help="Questions in the evaluation half.")] = 128,
    distractors: Annotated[list[Path] | None, typer.Option(help="More files of this format for the pool.")] = None,
    apart_from: Annotated[Path | None, typer.Option(help="Use no paragraph of this file (evaluation).")] = None,
    workers: Workers = _CORES,
    force: Force = False,
) -> None:
    """Make long contexts: a question's own paragraphs among distractors, to a number of tokens or of documents.

    Examples:

    memjax data hotpotqa dev.json --length 28k --tokenizer DIR --out hotpotqa-28k.jsonl

    memjax data hotpotqa train.json --docs 200 --split train --tokenizer DIR --out train.jsonl
    """
    kind: Format = format.value
    with _errors_as_sentences():
        if (length is None) == (docs is None):
            raise ValueError("give --length or --docs, one of the two")
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
        _check_files([questions, *plan.distractors, *([apart_from] if apart_from else [])], out, force)
        with _bar(samples) as progress:
            generate_multihop(plan, samples, out, workers=workers, progress=progress)
        Console().print(_statistics(out, seed))


@app.command()
def tiny(
    out: Out,
    chunks: Annotated[int, typer.Option(min=1, help="Length of a document, in chunks of 24 words.")],
    samples: Annotated[int, typer.Option(min=1, help="Documents.")] = 128,
    hops: Annotated[int, typer.Option(min=1, max=2, help="Facts from the question to the answer.")] = 1,
    distractors: Annotated[
        float, typer.Option(min=0, max=1, help="Chance that a half chunk holds a fact that is not needed.")
    ] = 0.7,
    seed: Seed = 0,
    force: Force = False,
) -> None:
    """Make tasks that the bundled tiny model reads: facts among filler, one of them asked for.

    Example:

    memjax data tiny --chunks 64 --samples 256 --out tiny-64.jsonl
    """
    with _errors_as_sentences():
        _check_files([], out, force)
        source = TinyTasks(min_chunks=chunks, max_chunks=chunks, hops=hops, distractors=distractors, seed=seed)
        with _bar(samples) as progress:
            write_tasks(out, _counted(map(source.task, range(samples)), progress))
        typer.echo(f"{out}: {samples} documents of {chunks * CHUNK_WORDS:,} words (seed {seed})")


def _counted(tasks: Iterable[Task], progress: Callable[[int], None]) -> Iterator[Task]:
    for task in tasks:
        yield task
        progress(1)


@app.command("filter")
def closed_book(
    tasks: Annotated[Path, typer.Argument(help="A task file, ours or MemAgent's, RULER's, HotpotQA's, SQuAD's.")],
    out: Out,
    model: Annotated[
        str | None, typer.Option(help="Who is asked: HF directory, .gguf file or hub id; with --url the name there.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="OpenAI-compatible service; its key comes from API_KEY.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Whose tokens are counted; by default the model's.")] = None,
    attempts: Annotated[int, typer.Option(min=1, help="Replies to each question; one right one is enough.")] = 2,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Of the sampling.")] = 0.7,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Budget of a reply.")] = 512,
    concurrency: Annotated[int, typer.Option(min=1, help="Questions at a time.")] = 8,
    seed: Seed = 0,
    force: Force = False,
) -> None:
    """Drop the tasks that a model answers without their context: they would not test how it reads.

    The replies are kept beside the task file (FILE.asked.jsonl), each at once: after a kill the same command goes on.

    Example:

    memjax data filter train.jsonl --model DIR --out train-unknown.jsonl
    """
    from memjax.eval.closed_book import Attempts, asked_file, run_filter

    with _errors_as_sentences():
        _check_files([tasks], out, force)
        how = Attempts(attempts, temperature, top_p, answer_tokens, seed=seed)
        with _bar(None) as progress:
            outcome = asyncio.run(
                run_filter(tasks, out, model, url, tokenizer, how, concurrency, lambda asked: progress(1))
            )
        if outcome.failed:
            why = f"see {asked_file(out)}; the same command asks them again"
            raise RuntimeError(f"{outcome.failed} questions could not be asked ({why})")
        typer.echo(f"{outcome.kept} tasks kept, {outcome.known} dropped: their answers were known without the context")


def _chosen_tasks(asked: str | None, files: Mapping[str, Path]) -> list[str]:
    """The RULER tasks to make; those whose data set was not given are left out unless they were asked for by name."""
    if asked is None or asked == "all":
        left_out = [name for name in QUESTIONS if name not in files]
        for name in left_out:
            typer.echo(f"{name} is left out: --{QUESTIONS[name]} FILE brings it", err=True)
        return [name for name in ANSWER_TOKENS if name not in left_out]
    names = [name.strip() for name in asked.split(",")]
    for name in names:
        if name not in ANSWER_TOKENS:
            raise ValueError(f"unknown RULER task {name!r}: choose among {', '.join(ANSWER_TOKENS)}")
        if name in QUESTIONS and name not in files:
            raise ValueError(f"{name} asks questions of a {QUESTIONS[name]} file: give --{QUESTIONS[name]} FILE")
    return names


def _check_files(sources: list[Path], out: Path, force: bool) -> None:
    """Refuse, before any work, sources that are not there and a task file that would be lost."""
    for path in sources:
        if not path.is_file():
            raise ValueError(f"there is no file {path}")
    if out.exists() and not force:
        raise ValueError(f"{out} exists: give another --out, or --force to replace it")
    if not out.parent.is_dir():
        raise ValueError(f"there is no directory {out.parent} for --out {out}: make it first")


@contextmanager
def _bar(total: int | None) -> Iterator[Callable[[int], None]]:
    """Shows in a terminal how many samples are done; after an error nothing of it stays."""
    columns = (TextColumn("samples"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_interactive) as bar:
        task = bar.add_task("", total=total)
        try:
            yield lambda done: bar.advance(task, done)
        except Exception:
            bar.live.transient = True
            raise


@contextmanager
def _errors_as_sentences() -> Iterator[None]:
    """Bad input ends with exit code 2, failure with 1; each in one sentence."""
    try:
        yield
    except ValueError as error:
        _stop(str(error), USAGE)
    except (OSError, RuntimeError) as error:
        _stop(str(error), FAILURE)


def _stop(message: str, code: int) -> NoReturn:
    typer.echo(f"memjax: {message}", err=True)
    raise typer.Exit(code)


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
