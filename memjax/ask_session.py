"""One run of `memjax ask`, `quickstart` or `convert`: from what was typed to what is printed."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import JsonValue, ValidationError
from rich.console import Console

from memjax.agents.memagent import MemAgent, Reading
from memjax.agents.single import SingleAgent
from memjax.ask import (
    AskSettings,
    AskState,
    OnStep,
    Step,
    answer_at_once,
    check_same,
    compared_settings,
    fitted,
    identity,
    load_state,
    read_and_answer,
    report,
    state_directory,
    trace_records,
)
from memjax.ask_display import AskDisplay
from memjax.data.documents import Document, inspected, open_document
from memjax.data.token_estimate import EstimatedTokenizer
from memjax.rewards.answers import extract_answer
from memjax.rollout.client import Client
from memjax.rollout.connect import LocalModel, ModelChoice, Service, choose_model, load_tokenizer, open_client
from memjax.tokenizer import Tokenizer


@dataclass(frozen=True)
class Output:
    """What is shown beside the answer."""

    json: bool = False
    show_memory: bool = False
    trace: Path | None = None


@dataclass(frozen=True)
class Session:
    """A reading that is about to begin or to go on."""

    settings: AskSettings
    document: Document
    choice: ModelChoice
    tokenizer: Tokenizer | EstimatedTokenizer
    agent: MemAgent | SingleAgent
    state: AskState
    path: Path
    length: int  # tokens of the longest conversation


def run_ask(given: Mapping[str, Any], state: Path | None, resume: Path | None, output: Output) -> None:
    """Read, and print the answers to standard output; what is not in `given`, or None, has its default."""
    if state is not None and resume is not None and state != resume:
        raise ValueError(f"--state {state} and --resume {resume} name two state files: --resume goes on in its own")
    path = resume or state or _default_state_path()
    _print_answers(read(given, path, output, resume=resume is not None), path, output)


def read(given: Mapping[str, Any], path: Path, output: Output, *, resume: bool = False) -> AskState:
    """Read from the beginning, or where the state at `path` stopped, to the answers."""
    console = Console(stderr=True)
    before = load_state(path) if resume else None
    settings = _settings(given, before)
    if before is not None and before.answers is not None:
        check_same(path, before, _identity_as_far_as_known(before, settings, given), settings.files)
        console.print(f"{path} is a finished reading: this is its answer.", style="dim", soft_wrap=True)
        return before
    with _spool(path, kept=resume) as spool:
        document = open_document(settings.files, spool, keep_spool=resume)
        chosen = {name for name, value in given.items() if resume or value is not None}
        session = prepare(settings, chosen, document, path, before, console)
        with _kept_or_removed(path, resumed=resume):
            finished = _run(session, console, output)
    _print_notes(finished, console)
    return finished


def prepare(
    settings: AskSettings,
    chosen: set[str],
    document: Document,
    path: Path,
    before: AskState | None,
    console: Console,
) -> Session:
    """Check everything that can be checked without the model's weights."""
    choice = choose_model(settings.model, settings.url, os.environ)
    if isinstance(choice, Service):
        settings = settings.model_copy(update={"url": choice.url, "model": choice.model})
    window = choice.trained_window()
    tokenizer = load_tokenizer(choice, settings.tokenizer)
    asked, settings = settings, fitted(settings, chosen, tokenizer, window)
    if settings != asked:
        console.print(
            f"To fit the window of {window} tokens: chunk {settings.chunk_tokens}, memory {settings.memory_tokens}, "
            f"answer {settings.answer_tokens}.",
            style="dim",
        )
    agent: MemAgent | SingleAgent
    readings: tuple[Reading, ...] = ()
    if settings.agent == "single":
        agent = settings.single_agent(tokenizer)
        longest = max(settings.questions, key=tokenizer.count)
        text = agent.fitting_text(document, longest, window, choice.model)
        length, digest = agent.window_needed(len(text), longest), agent.prompt.digest
    else:
        agent = settings.memory_agent(tokenizer)
        readings = tuple(agent.start(question) for question in settings.questions)
        for question in settings.questions:
            agent.check_window(question, window, choice.model)
        length = max(agent.window_needed(question) for question in settings.questions)
        digest = agent.prompts.digest
    now = identity(settings, document, digest, choice.fingerprint())
    if before is not None:
        check_same(path, before, now, settings.files)
    state = before or AskState(settings=settings, identity=now, readings=readings)
    return Session(settings, document, choice, tokenizer, agent, state, path, length)


def _identity_as_far_as_known(
    before: AskState, settings: AskSettings, given: Mapping[str, Any]
) -> dict[str, JsonValue]:
    """What a finished reading would be now; a document or model that is gone counts as unchanged."""
    now = before.identity | compared_settings(settings)
    if all(Path(name).is_file() for name in settings.files):
        now["document"] = Document(tuple(inspected(Path(name), name) for name in settings.files)).fingerprint
    if settings.model and settings.url is None and Path(settings.model).exists():
        now["model"] = LocalModel(settings.model).fingerprint()
    elif given.get("model"):
        now["model"] = settings.model
    return now


def _settings(given: Mapping[str, Any], before: AskState | None) -> AskSettings:
    """What was typed over what the state file says, or over the defaults; paths made absolute."""
    values = {name: value for name, value in given.items() if value is not None}
    if "files" in values:
        values["files"] = [_absolute(name) for name in values["files"]]
    for name in ("model", "tokenizer", "prompts"):
        if name in values and Path(values[name]).exists():
            values[name] = _absolute(values[name])
    begun = before.settings.model_dump() if before else {}
    try:
        settings = AskSettings.model_validate({**begun, **values})
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"--{field.replace('_', '-')}: {first['msg']}, got {first['input']!r}") from None
    if not settings.questions:
        raise ValueError('no question given: memjax ask "QUESTION" FILE')
    return settings


def _absolute(name: str) -> str:
    return name if name == "-" else str(Path(name).absolute())


def _default_state_path() -> Path:
    return state_directory() / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.json"


@contextmanager
def _spool(path: Path, *, kept: bool) -> Iterator[Path]:
    """Where standard input is kept beside the state; it goes when there is nothing left to resume."""
    spool = path.with_name(path.name + ".input")

    def clear() -> None:
        for copy in spool.parent.glob(spool.name + ".*"):
            copy.unlink()

    if not kept:
        path.unlink(missing_ok=True)
        clear()
    try:
        yield spool
    except BaseException:
        if not path.exists():
            clear()
        raise
    clear()


@contextmanager
def _kept_or_removed(path: Path, *, resumed: bool) -> Iterator[None]:
    """A reading that breaks off says how to go on; one that broke off before its first chunk leaves no state."""
    try:
        yield
    except BaseException as error:
        if path.exists():
            if load_state(path).chunks_read:
                error.add_note(f"memjax: what was read is kept. Go on with: memjax ask --resume {path}")
            elif not resumed:
                path.unlink()
        raise


def _run(session: Session, console: Console, output: Output) -> AskState:
    local = isinstance(session.choice, LocalModel)
    display = AskDisplay(
        console, chunk_tokens=session.settings.chunk_tokens, show_memory=output.show_memory, compiles=local
    )
    if isinstance(session.tokenizer, EstimatedTokenizer):
        console.print("No --tokenizer: tokens are estimated on the high side.", style="dim")
    if output.show_memory and isinstance(session.agent, SingleAgent):
        console.print("--agent single has no memory: --show-memory shows nothing.", style="dim")
    with display.waiting(f"loading {session.choice.model}" if local else f"asking {session.choice.model}"):
        client = open_client(
            session.choice,
            session.tokenizer,
            length=session.length,
            slots=session.settings.slots or len(session.settings.questions),
            dtype=session.settings.dtype,
            on_retry=display.note,
        )
    appended = "a" if session.state.chunks_read else "w"
    trace = open(output.trace, appended, encoding="utf-8") if output.trace else None  # noqa: SIM115

    def on_step(step: Step) -> None:
        if trace:
            for record in trace_records(step, session.tokenizer.decode):
                trace.write(json.dumps(record, ensure_ascii=False) + "\n")
            trace.flush()
        display.step(step)

    try:
        with display.reading():
            return asyncio.run(_read(session, client, on_step))
    finally:
        if trace:
            trace.close()


async def _read(session: Session, client: Client, on_step: OnStep) -> AskState:
    try:
        if isinstance(session.agent, SingleAgent):
            return await answer_at_once(session.agent, session.document, client, session.state, on_step)
        return await read_and_answer(session.agent, session.document, client, session.state, session.path, on_step)
    finally:
        await client.close()


def _print_notes(state: AskState, console: Console) -> None:
    tokens, read = state.document_tokens, _counted(state.chunks_read, "chunk", "chunks")
    console.print(
        f"{tokens} document tokens in {read if state.readings else 'one piece'}, {state.seconds:.1f} s, "
        f"{tokens / max(state.seconds, 1e-9):.0f} tokens/s.",
        style="dim",
        highlight=False,
    )
    cut = sum(reading.truncated_memories for reading in state.readings)
    if cut:
        console.print(
            f"{_counted(cut, 'memory', 'memories')} ended at the budget of {state.settings.memory_tokens} tokens; "
            f"--memory-tokens raises it.",
            style="dim",
        )


def _counted(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"


def _print_answers(state: AskState, path: Path, output: Output) -> None:
    if output.json:
        kept = path if path.exists() else None  # the single agent keeps no state
        print(json.dumps(report(state, kept), ensure_ascii=False))
        return
    questions, answers = state.settings.questions, state.answers or ()
    for question, text in zip(questions, answers, strict=True):
        print(f"{question}\n  {extract_answer(text)}" if len(questions) > 1 else extract_answer(text))


QUICKSTART_QUESTION = "What is the code of the lamp room door?"
QUICKSTART_ANSWER = "7093"
_EXPECTED = "as expected"
_NOT_EXPECTED = "not the expected answer: a small model that was not trained to keep a memory often fails here"


def run_quickstart(model: str | None, url: str | None, tokenizer: str | None) -> None:
    """Read the bundled text, and print the answer beside the expected one."""
    text = resources.files("memjax") / "assets" / "quickstart" / "harrow_light.txt"
    given = {
        "questions": [QUICKSTART_QUESTION],
        "files": [str(text)],
        "model": model,
        "url": url,
        "tokenizer": tokenizer,
        "chunk_tokens": 700,  # small, so that a short text takes several
        "memory_tokens": 160,
        "answer_tokens": 160,
        "question_tokens": 64,
    }
    print(f"Question: {QUICKSTART_QUESTION}", flush=True)
    state = read(given, _default_state_path().with_name("quickstart.json"), Output(show_memory=True))
    (reply,) = state.answers or ("",)
    answer = extract_answer(reply)
    print(f"Answer:   {answer or '(the reply was empty)'}\nExpected: {QUICKSTART_ANSWER}")
    print("Result:   " + (_EXPECTED if QUICKSTART_ANSWER in answer else _NOT_EXPECTED))


def run_convert(source: str, target: Path, dtype: str) -> None:
    """Write a model as a Hugging Face directory."""
    from memjax.checkpoint import convert

    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"--dtype must be float32 or bfloat16, got {dtype!r}")
    console = Console(stderr=True)
    with console.status(f"converting {source}") as status:
        convert(source, target, dtype, lambda done, all_, name: status.update(f"{done} of {all_} tensors, {name}"))
    console.print(f"{target} is written.")
