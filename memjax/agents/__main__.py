"""`memjax agents`: list the agents with their keys, and try one of your own without a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="List the agents with their keys; `check` tries one of your own before a model is loaded.",
)

_MOST_CALLS = 12  # that are shown of a trial


@app.callback(invoke_without_command=True)
def agents(context: typer.Context) -> None:
    """List the built-in agents with their keys."""
    if context.invoked_subcommand is not None:
        return
    from memjax.agents.registry import AGENTS

    for name, agent in AGENTS.items():
        typer.echo(f"{name}: {(agent.__doc__ or '').splitlines()[0]}")
        for line in _keys(agent):
            typer.echo(f"    {line}")
    typer.echo("FILE.py:NAME or MODULE:NAME: your own: an async function, or a pydantic model.")
    typer.echo("    `memjax agents check FILE.py:NAME` tries it without a model.")


@app.command()
def check(
    agent: Annotated[str, typer.Argument(metavar="FILE.py:NAME", help="The agent.", show_default=False)],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A key of the agent; repeatable.", show_default=False),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|FILE.gguf|HF_ID",
            help="Whose tokens and chat template count. Without it tokens are estimated, on the high side.",
        ),
    ] = None,
    window: Annotated[int | None, typer.Option(min=64, help="Most tokens of a prompt and its reply.")] = None,
) -> None:
    """Let an agent read a made-up document with scripted replies, short, empty and cut, and say what it asked.

    Ends with "fine", or with what is wrong and exit code 1.

    Example:

    memjax agents check examples/bullets.py:Bullets --set bullets=512
    """
    from memjax.agents.check import check as try_out
    from memjax.agents.registry import agent_class, agent_keys
    from memjax.config import load_config
    from memjax.data.token_estimate import EstimatedTokenizer
    from memjax.episodes.limits import Limits
    from memjax.tokenizer import Tokenizer

    try:
        keys = agent_keys({"name": agent}, settings or ())
        made = load_config(agent_class(agent), given=keys)
        counts = EstimatedTokenizer() if tokenizer is None else Tokenizer.load(tokenizer)
    except (ValueError, OSError) as error:
        _stop(str(error), 2)
    trials, problems = try_out(made, counts, window, Limits())
    console = Console()
    for trial in trials:
        if trial is trials[1]:  # as the first, or it is told
            continue
        console.print(_table(trial), soft_wrap=True)
        ended = f"answer: {trial.answer.strip()[:100]!r}" if trial.error is None else f"error: {trial.error}"
        console.print(f"  {ended}\n", markup=False, highlight=False, soft_wrap=True)
    calls = [call for trial in trials for call in trial.calls]
    if calls:
        longest = max(calls, key=lambda call: call.prompt + call.max_tokens)
        parts, total = f"{longest.prompt} + {longest.max_tokens}", longest.prompt + longest.max_tokens
        typer.echo(f"longest call: {parts} = {total} tokens{'' if tokenizer else ' (estimated)'}")
        if all(call.reads is None for call in calls):
            typer.echo("no call says what it shows of the document: chunk=chunk in episode.chat makes progress visible")
    for problem in problems:
        typer.echo(problem)
    if problems:
        raise typer.Exit(1)
    typer.echo("fine")


def _keys(agent: Any) -> Sequence[str]:
    fields = {key: field for key, field in agent.model_fields.items() if key != "name"}
    return [f"{key}: {field.default!r}  {field.description or ''}".rstrip() for key, field in fields.items()]


def _table(trial: Any) -> Table:
    table = Table("call", "kind", "prompt tokens", "max_tokens", "reads chunk", box=None, title_justify="left")
    table.title = f"{trial.replies} replies: {len(trial.calls)} calls"
    shown = trial.calls if len(trial.calls) <= _MOST_CALLS else (*trial.calls[: _MOST_CALLS - 1], trial.calls[-1])
    for call in shown:
        reads = "" if call.reads is None else str(call.reads)
        table.add_row(call.key, call.kind, str(call.prompt), str(call.max_tokens), reads)
    return table


def _stop(message: str, code: int) -> NoReturn:
    typer.echo(f"memjax: {message}", err=True)
    raise typer.Exit(code)


if __name__ == "__main__":
    app()
