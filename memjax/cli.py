"""The `memjax` command: parses what was typed, calls what does it, and turns errors into one sentence."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="memjax",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Read documents of any length with a small model and a bounded memory.\n\n"
    "Try it: `memjax quickstart --model MODEL`. Then ask about a document of yours: "
    '`memjax ask "Who did it?" book.txt --model MODEL`.',
)

_INTERRUPTED = 130

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="DIR|FILE.gguf|HF_ID",
        help="A directory in Hugging Face's layout, a .gguf file, or a hub id; with --url the served model's name.",
        show_default=False,
        rich_help_panel="Model",
    ),
]
Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="Ask an OpenAI-compatible or Azure service instead, e.g. http://localhost:8000/v1 (or the variable URL). "
        "The key is read from the variable API_KEY only.",
        show_default=False,
        rich_help_panel="Model",
    ),
]
TokenizerOption = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        metavar="DIR|FILE.gguf|HF_ID",
        help="With --url: the served model's tokenizer, for exact budgets. Without it tokens are estimated.",
        show_default=False,
        rich_help_panel="Model",
    ),
]


AgentSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A key of the agent, such as --set chunk=2000; repeatable.",
        show_default=False,
        rich_help_panel="Reading",
    ),
]


def _budget(name: str, default: int, text: str) -> Any:
    return typer.Option(
        name,
        metavar="N",
        parser=_whole_number,
        help=f"{text} [default: {default}]",
        show_default=False,
        rich_help_panel="Budgets (tokens)",
    )


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not an integer") from None


@app.command()
def ask(
    question: Annotated[
        str | None, typer.Argument(metavar="QUESTION", help="What you want to know.", show_default=False)
    ] = None,
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE...",
            help="Text, Markdown, HTML or PDF (also .gz), read one after another; - is standard input. Agents that "
            "work without a document (tool, no-context, your own) may have none.",
            show_default=False,
        ),
    ] = None,
    more_questions: Annotated[
        list[str] | None,
        typer.Option("--question", "-q", metavar="TEXT", help="A further question on the same text; repeatable."),
    ] = None,
    model: Model = None,
    url: Url = None,
    tokenizer: TokenizerOption = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="float32 or bfloat16 [default: the faster here]", rich_help_panel="Model"),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option("--slots", help="Questions that a local model works on at once.", rich_help_panel="Model"),
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option(
            "--agent",
            metavar="NAME|FILE.py:NAME",
            help="memagent reads in chunks with a memory; single shows the whole text at once, "
            "single-truncated as much of its two ends as fits, no-context nothing; or one of your own, from a file. "
            "`memjax agents` lists them with their keys. [default: memagent]",
            rich_help_panel="Reading",
        ),
    ] = None,
    settings: AgentSettings = None,
    chunk_tokens: Annotated[int | None, _budget("--chunk-tokens", 5000, "Document read per model call.")] = None,
    memory_tokens: Annotated[int | None, _budget("--memory-tokens", 1024, "Longest memory.")] = None,
    answer_tokens: Annotated[int | None, _budget("--answer-tokens", 1024, "Longest answer.")] = None,
    question_tokens: Annotated[int | None, _budget("--question-tokens", 1024, "Longest question.")] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout",
            metavar="memory_first|chunk_first",
            help="Order of the prompt. chunk_first prefills each chunk once for all questions; memory_first is how "
            "MemAgent's released models were trained. [default: memory_first]",
            rich_help_panel="Reading",
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            "--prompts",
            metavar="PATH",
            help="Your prompts: a directory with memory.txt, final.txt and no_memory.txt, or a MemAgent .py file "
            "(read, never run).",
            rich_help_panel="Reading",
        ),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", help="0 is greedy [default: 0]", rich_help_panel="Reading")
    ] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", help="[default: 1]", rich_help_panel="Reading")] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed", help="Same seed, same answer, above temperature 0 too [default: 0]", rich_help_panel="Reading"
        ),
    ] = None,
    show_memory: Annotated[
        bool, typer.Option("--show-memory", help="Print every memory (to standard error).", rich_help_panel="Output")
    ] = False,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.", rich_help_panel="Output")
    ] = False,
    journal: Annotated[
        Path | None,
        typer.Option(
            "--journal",
            metavar="FILE",
            help="Where to keep the journal [default: a file per question in ~/.local/state/memjax/journals/]",
            rich_help_panel="Resuming",
        ),
    ] = None,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Empty the journal first: read everything again.", rich_help_panel="Resuming"),
    ] = False,
    debug: Debug = False,
) -> None:
    """Ask one or more QUESTIONs about FILEs of any length.

    The model reads the text chunk by chunk, rewriting a short memory, and answers from the memory. The answer goes to
    standard output, progress to standard error. Budgets that you leave out shrink where the model's window is small.

    Every call of the model is kept in a journal. After Ctrl-C, a kill or a failure the same command continues where it
    stopped; after more text was added only the new text is read; another question costs that question. `memjax view
    JOURNAL` shows how the memory changed, `memjax journal list` what is kept.

    Examples:

        memjax ask "Who is the killer?" book.txt --model ~/models/Qwen2.5-7B-Instruct

        memjax ask "What changed?" -q "Who approved it?" minutes.pdf notes.md -m model.gguf --layout chunk_first

        cat server.log | memjax ask "What failed first?" - --url http://localhost:8000/v1 -m my-model --json

        memjax ask "Who is the killer?" book.txt -m model.gguf --journal killer.jsonl; memjax view killer.jsonl
    """
    with _termination_as_interrupt(), errors_as_sentences(debug):
        from memjax.agents.registry import agent_keys
        from memjax.ask import Output, run_ask

        given: dict[str, Any] = {
            "files": files,
            "model": model,
            "url": url,
            "tokenizer": tokenizer,
            "temperature": temperature,
            "top_p": top_p,
            "seed": seed,
            "dtype": dtype,
            "slots": slots,
        }
        of_agent = {
            "name": agent,
            "question": question_tokens,
            "chunk": chunk_tokens,
            "memory": memory_tokens,
            "answer": answer_tokens,
            "layout": layout,
            "prompts": prompts,
        }
        questions = [question] if question is not None else []
        if more_questions and question is not None and _names_a_file(question):
            given["files"], questions = [question, *(files or [])], []  # ask -q Q1 -q Q2 FILE
        elif question is not None and files and _names_a_file(question) and not any(map(_names_a_file, files)):
            raise ValueError(
                f'there is no file {files[0]}: the question comes first, memjax ask "{files[0]}" {question}'
            )
        given["questions"] = [*questions, *(more_questions or [])] or None
        output = Output(json=json_output, show_memory=show_memory, journal=journal, fresh=fresh)
        run_ask(given, agent_keys(of_agent, settings or ()), output)


@app.command()
def quickstart(
    model: Model = None,
    url: Url = None,
    tokenizer: TokenizerOption = None,
    debug: Debug = False,
) -> None:
    """Read a bundled or generated text in chunks, and print the answer beside the expected one.

    With nothing given, a tiny bundled model reads a document two thousand times as long as its window.

    Examples:

        memjax quickstart

        memjax quickstart --model Qwen/Qwen2.5-0.5B-Instruct

        URL=http://localhost:8000/v1 API_KEY=... memjax quickstart --model my-model
    """
    with _termination_as_interrupt(), errors_as_sentences(debug):
        import os

        if model is None and url is None and not os.environ.get("URL"):
            from memjax.quickstart import run_tiny_quickstart

            run_tiny_quickstart()
            return
        from memjax.quickstart import run_quickstart

        run_quickstart(model, url, tokenizer)


@app.command()
def serve(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="DIR|FILE.gguf|HF_ID",
            help="A directory in Hugging Face's layout, a .gguf file, or a hub id.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE.yaml", help="Settings; what is typed goes over them.")
    ] = None,
    served_name: Annotated[str | None, typer.Option("--served-name", help="What clients call the model.")] = None,
    host: Annotated[str | None, typer.Option("--host", help="[default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option("--port", help="[default: 8000]")] = None,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host",
            metavar="NAME",
            help="A further name of this server, when it asks for no keys; repeatable.",
        ),
    ] = None,
    grpc_port: Annotated[int | None, typer.Option("--grpc-port", help="Serve JetStream's gRPC interface too.")] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option("--api-key", help="Ask for this key; repeatable. Better: the variable MEMJAX_API_KEYS."),
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option(
            "--agent",
            metavar="NAME|FILE.py:NAME",
            help="Who reads for memory/MODEL: built-in or your own. [default: memagent]",
        ),
    ] = None,
    agent_settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A key of the agent; repeatable.", show_default=False),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", metavar="PATH", help="Prompts of the memory loop, as `memjax ask` takes."),
    ] = None,
    slots: Annotated[int | None, typer.Option("--slots", help="Replies decoded side by side.")] = None,
    max_length: Annotated[int | None, typer.Option("--max-length", help="Tokens of a prompt and its reply.")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="float32 or bfloat16 [default: the faster]")] = None,
    tensor: Annotated[int | None, typer.Option("--tensor", help="Devices that one model is spread over.")] = None,
    replicas: Annotated[
        int | None, typer.Option("--replicas", help="Models side by side, each on devices of its own (needs Ray).")
    ] = None,
    max_queue: Annotated[
        int | None, typer.Option("--max-queue", help="Replies that may wait for a slot. [default: 256]")
    ] = None,
    max_body: Annotated[int | None, typer.Option("--max-body", help="Bytes of a request. [default: 64 MiB]")] = None,
    request_timeout: Annotated[
        float | None, typer.Option("--request-timeout", help="Seconds for a reply. [default: 600]")
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option("--state-dir", help="Where files and readings are kept. [default: ~/.local/state/memjax/serve]"),
    ] = None,
    debug: Debug = False,
) -> None:
    """Serve a model: OpenAI's interface, and questions about documents of any length.

    Example:

        memjax serve --model ~/models/Qwen2.5-7B-Instruct --port 8000
    """
    with errors_as_sentences(debug):
        import os

        from memjax.serve.settings import read_admin_key, read_keys, read_settings
        from memjax.tokenizer_files import locate

        given = {
            "model": model,
            "served_name": served_name,
            "agent": agent,
            "prompts": str(prompts) if prompts else None,
            "host": host,
            "port": port,
            "allowed_hosts": allowed_hosts or None,
            "grpc_port": grpc_port,
            "slots": slots,
            "max_length": max_length,
            "dtype": dtype,
            "tensor": tensor,
            "replicas": replicas,
            "max_queue": max_queue,
            "max_body": max_body,
            "request_timeout": request_timeout,
            "state_dir": str(state_dir) if state_dir else None,
        }
        keys, admin_key = read_keys(api_key, os.environ), read_admin_key(os.environ)
        settings = read_settings(config, given, agent_settings or ())
        locate(settings.model)

        from memjax.serve.server import run_server  # with jax, which takes seconds to load

        run_server(settings, keys=keys, admin_key=admin_key)


@app.command()
def view(
    journal: Annotated[
        Path, typer.Argument(metavar="JOURNAL", help="A journal of ask, serve, train or demonstrations.")
    ],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any free one")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open it in a browser.")] = True,
    debug: Debug = False,
) -> None:
    """Show in a browser how a memory changed from chunk to chunk, and where the words of the answer come from.

    Example:

        memjax ask "Who is the killer?" book.txt --model MODEL --journal killer.jsonl; memjax view killer.jsonl
    """
    with errors_as_sentences(debug):
        from memjax.serve.journal_view import run_view

        run_view(journal, port, browser=browser)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A model directory, a .gguf file or a hub id.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The directory to write.")],
    dtype: Annotated[str, typer.Option("--dtype", help="float32 or bfloat16")] = "bfloat16",
    debug: Debug = False,
) -> None:
    """Write a model as a Hugging Face directory, which transformers and vLLM load.

    A directory that an earlier export wrote is replaced; any other that holds something is refused.

    Example:

        memjax convert model-q4_k_m.gguf ./model-hf
    """
    with errors_as_sentences(debug):
        from rich.console import Console

        from memjax.tokenizer_files import locate

        if dtype not in ("float32", "bfloat16"):
            raise ValueError(f"--dtype must be float32 or bfloat16, got {dtype!r}")
        locate(source)

        from memjax.checkpoint import convert as write_model  # with jax, which takes seconds to load

        console = Console(stderr=True)
        with console.status(f"converting {source}") as status:
            write_model(source, target, dtype, lambda done, n, name: status.update(f"{done} of {n} tensors, {name}"))
        console.print(f"{target} is written.")


def _mount(name: str, module: str, summary: str) -> None:
    """Add a command whose options live in another Typer app, which is imported when it is called and not before."""

    @app.command(
        name,
        help=summary,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def run(context: typer.Context) -> None:
        import_module(module).app(context.args, prog_name=f"memjax {name}")


_mount("eval", "memjax.eval.__main__", "Measure how well a model reads long documents, and compare runs.")
_mount("train", "memjax.train.__main__", "Train a memory agent from a config, and report on a run.")
_mount("agents", "memjax.agents.__main__", "List the agents, and check one of your own before a model is loaded.")
_mount("journal", "memjax.journals", "List, show and remove the journals of `memjax ask`.")
_mount("data", "memjax.data.__main__", "Make RULER and long multi-hop tasks of any length.")
_mount("plan", "memjax.plan.__main__", "Say whether a training run fits on a slice that need not be there.")


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", "-V", help="Print the version.", is_eager=True)] = False,
) -> None:
    if version:
        from memjax import __version__

        typer.echo(f"memjax {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line."""
    try:
        app()
    except SystemExit as end:
        if end.code != _INTERRUPTED:
            raise
        # What was done is on disk. Taking the interpreter down while XLA still compiles in a thread would crash it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_INTERRUPTED)


@contextmanager
def errors_as_sentences(debug: bool) -> Iterator[None]:
    """Bad input ends with exit code 2, failure with 1, an interruption with 130; each in one sentence."""
    from memjax.episodes.acting import EnvironmentFailure
    from memjax.rollout.client import ClientError

    try:
        yield
        sys.stdout.flush()
    except (typer.Exit, BrokenPipeError):  # Typer ends quietly where the reader of a pipe is gone
        raise
    except KeyboardInterrupt as stop:
        _print_notes(stop)
        raise typer.Exit(_INTERRUPTED) from None
    except Exception as error:  # the boundary to the person at the terminal
        if debug:
            raise
        expected = isinstance(error, ValueError | ClientError | EnvironmentFailure | OSError)
        said = str(error) if expected else f"{type(error).__name__}: {error} (an error of memjax; --debug shows where)"
        typer.echo(f"memjax: {said}", err=True)
        _print_notes(error)
        raise typer.Exit(2 if isinstance(error, ValueError) else 1) from None


def _print_notes(error: BaseException) -> None:
    for note in getattr(error, "__notes__", ()):
        if note.startswith("memjax:"):  # jax adds notes of its own
            typer.echo(note, err=True)


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """SIGTERM ends what is inside as Ctrl-C does, but for the exit code, 143."""
    terminated = False

    def interrupt(*_: object) -> None:
        nonlocal terminated
        terminated = True
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a shell script's background
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except typer.Exit:
        if terminated:
            raise typer.Exit(128 + signal.SIGTERM) from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _names_a_file(text: str) -> bool:
    try:
        return text == "-" or Path(text).exists()
    except OSError:  # a question is often too long for a file name
        return False


if __name__ == "__main__":
    main()
