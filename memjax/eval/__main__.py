"""`memjax eval`: run a suite, or report on runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from typer.core import TyperGroup

from memjax.agents.prompt_files import LAYOUTS
from memjax.agents.registry import AGENTS, DEFAULT
from memjax.eval.config import EvalConfig, load_config
from memjax.eval.suites import SUITES, suite_named
from memjax.rollout.client import ClientError

if TYPE_CHECKING:
    from memjax.eval.report import Run, Table

_FILE_WIDTH = 100  # of a report that is not written to a terminal, which would say its own
USAGE, FAILURE, INTERRUPTED = 2, 1, 130


class _SuiteFirst(TyperGroup):
    """A group in which a first word that is no command is the suite of `run`: `memjax eval ruler-hotpotqa ...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "--help", "-h"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


_ABOUT = "\n\n".join(f"{suite.name}: {suite.about}." for suite in SUITES.values())

app = typer.Typer(
    cls=_SuiteFirst,
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Measure how well a model reads long documents: `memjax eval SUITE ...` runs a suite, "
    f"`memjax eval report DIR...` compares runs.\n\nSuites:\n\n{_ABOUT}",
)


class Preset(StrEnum):
    """How answers are drawn and scored."""

    greedy = "greedy"
    memagent = "memagent"


@app.command(no_args_is_help=True)
def run(
    suite: Annotated[str | None, typer.Argument(help=f"One of {', '.join(SUITES)}.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with these settings; options go over it.")] = None,
    model: Annotated[
        str | None, typer.Option(help="HF directory, .gguf file or hub id; with --url the name there.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="OpenAI-compatible service; its key comes from API_KEY.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Results directory. The same one again continues where it stopped.")
    ] = None,
    lengths: Annotated[str | None, typer.Option(help="Context lengths in tokens, such as 7k,28k,1m.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Some of the suite's tasks, such as niah_single_1,vt.")] = None,
    samples: Annotated[int | None, typer.Option(help="Samples per task and length.")] = None,
    data: Annotated[list[str] | None, typer.Option(help="A file the suite needs, NAME=PATH; may be repeated.")] = None,
    agent: Annotated[
        str | None,
        typer.Option(metavar="|".join((*AGENTS, "FILE.py:NAME")), help=f"Who reads, by default {DEFAULT.name}."),
    ] = None,
    agent_settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A key of the agent, such as chunk=2000; may be repeated."),
    ] = None,
    preset: Annotated[Preset | None, typer.Option(help="greedy (default), or MemAgent's sampling and metric.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Samples at a time (8).")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Whose tokens are counted; by default the model's.")] = None,
    window: Annotated[int | None, typer.Option(help="Most tokens of prompt and reply that the model may take.")] = None,
    question_tokens: Annotated[int | None, typer.Option(help="Budget of a question.")] = None,
    chunk_tokens: Annotated[int | None, typer.Option(help="Budget of a chunk (5000).")] = None,
    memory_tokens: Annotated[int | None, typer.Option(help="Budget of the memory (1024).")] = None,
    answer_tokens: Annotated[int | None, typer.Option(help="Budget of an answer (1024).")] = None,
    layout: Annotated[
        str | None, typer.Option(metavar="|".join(LAYOUTS), help="Order of an agent's prompt that has several.")
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help="Prompt directory, or a MemAgent .py file.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the tasks that are drawn, and of the sampling (0).")] = None,
    ray: Annotated[bool | None, typer.Option("--ray", help="One engine replica per node of a Ray cluster.")] = None,
) -> None:
    """Run a suite. Every call of the model is on disk at once: after a kill, the same command continues there.

    Examples:

    memjax eval smoke --model model.gguf --out runs/smoke

    memjax eval ruler-hotpotqa --data hotpotqa=hotpot_dev.json --lengths 7k,28k --model DIR --out runs/mine

    memjax eval ruler --tasks niah_single_1,vt --lengths 8k --url http://localhost:8000/v1 --out runs/ruler
    """
    options = {name: value for name, value in locals().items() if name != "config" and value is not None}
    try:
        chosen = load_config(config, _as_settings(options))
        finished = _evaluate(chosen)
    except ValueError as error:
        _stop(str(error), USAGE)
    except (ClientError, RuntimeError, OSError) as error:
        _stop(str(error), FAILURE)
    except KeyboardInterrupt:
        _stop("interrupted; what was read is kept: run the same command again to continue", INTERRUPTED)
    failed = sum(row.error is not None for row in finished.rows.values())
    read = [row for row in finished.rows.values() if row.error is None]
    empty = sum(row.empty_replies for row in read)
    of_smoke = chosen.suite == "smoke"
    if empty:
        said = f"{empty} of {sum(row.model_calls for row in read)} replies said nothing (blank, or thinking only)"
        advice = "raise --memory-tokens and --answer-tokens if they were cut"
        typer.echo(f"{'not everything works: ' if of_smoke and not failed else ''}{said}: {advice}", err=True)
    if failed:
        verdict = "not everything works: " if of_smoke else ""
        said = f"{failed} of {len(finished.rows)} samples failed and count as wrong; run the same command to retry them"
        typer.echo(f"{verdict}{said}", err=True)
    elif of_smoke and not empty:
        typer.echo(f"everything works: all {len(finished.rows)} samples were answered, well or badly", err=True)
    if failed == len(finished.rows) or (of_smoke and empty):
        raise typer.Exit(FAILURE)


@app.command(no_args_is_help=True)
def report(
    directories: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Results directories, finished or not.")],
    plot: Annotated[Path | None, typer.Option(help="Also draw accuracy against length into this .png or .svg.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Also write the tables into this .md.")] = None,
) -> None:
    """Compare runs: scores with intervals, cost, where evidence was lost, and which differences are more than chance.

    Example:

    memjax eval report runs/memagent runs/single --plot accuracy.png --markdown report.md
    """
    from memjax.eval.plot import plot_accuracy
    from memjax.eval.report import load_run
    from memjax.eval.report import report as tables_of

    try:
        runs = [load_run(directory) for directory in directories]
        tables = tables_of(runs)
        if markdown is not None:
            markdown.write_text("\n".join(table.to_markdown() for table in tables), encoding="utf-8")
        if plot is not None:
            plot_accuracy(runs, plot)
    except ValueError as error:
        _stop(str(error), USAGE)
    except OSError as error:
        _stop(str(error), FAILURE)
    _print(tables)


@app.command(no_args_is_help=True)
def judge(
    directories: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Results directories.")],
    model: Annotated[
        str | None, typer.Option(help="The judge: HF directory, .gguf file or hub id; with --url the name there.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="OpenAI-compatible service; its key comes from API_KEY.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Answers at a time.")] = 8,
) -> None:
    """Let a model judge the answers of runs against the gold answers; the reports then show its score too.

    A verdict is on disk at once: after a kill the same command continues, and asks again where the judge failed.

    Example:

    memjax eval judge runs/memagent runs/single --url http://localhost:8000/v1 --model judge
    """
    from memjax.eval.judge import judge_runs
    from memjax.eval.report import judged_table, load_run

    try:
        asyncio.run(judge_runs(directories, model, url, concurrency))
        table = judged_table([load_run(directory) for directory in directories])
    except ValueError as error:
        _stop(str(error), USAGE)
    except (ClientError, RuntimeError, OSError) as error:
        _stop(str(error), FAILURE)
    except KeyboardInterrupt:
        _stop("interrupted; verdicts are kept: run the same command again to continue", INTERRUPTED)
    if table.rows:
        _print([table])
    else:
        typer.echo("no sample has an answer, so the judge was asked nothing", err=True)


def _evaluate(config: EvalConfig) -> Run:
    """Run it under a progress display and print what came of it."""
    from memjax.eval.progress import TerminalProgress
    from memjax.eval.report import load_run
    from memjax.eval.report import report as tables_of
    from memjax.eval.session import evaluate

    with TerminalProgress(Console(stderr=True)) as progress:
        asyncio.run(evaluate(config, progress))
    run = load_run(config.out)
    _print(tables_of([run]))
    return run


def _print(tables: Sequence[Table]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)
    for table in tables:
        console.print(table.to_rich())
        console.print()


def _as_settings(options: dict[str, Any]) -> dict[str, Any]:
    """Options as a config file would have them."""
    settings = dict(options)
    for name in ("lengths", "tasks"):
        if name in settings:
            settings[name] = [part.strip() for part in settings[name].split(",")]
    if "data" in settings:
        settings["data"] = dict(_name_and_path(entry, options.get("suite")) for entry in settings["data"])
    return settings


def _name_and_path(entry: str, suite: str | None) -> tuple[str, str]:
    name, equals, path = entry.partition("=")
    if not equals:
        chosen = suite_named(suite) if suite else None
        names = (*chosen.data, *chosen.optional_data) if chosen else ()
        hint = f", such as {names[0]}={entry}" if names else ""
        raise ValueError(f"--data takes NAME=PATH{hint}, got {entry!r}")
    return name, path


def _stop(message: str, code: int) -> NoReturn:
    typer.echo(f"memjax: {message}", err=True)
    raise typer.Exit(code)


if __name__ == "__main__":
    app()
