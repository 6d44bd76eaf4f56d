"""Prompts as files: our own layouts, a user's directory, or the templates of a MemAgent Python file."""

from __future__ import annotations

import ast
import hashlib
import json
import re
import string
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from memjax.rollout.client import Message, Part, Prompt

LAYOUTS = ("memory_first", "chunk_first")

_SLOT = re.compile(r"\{(question|memory|chunk|text)\}")
_MEMAGENT_SLOTS = {"prompt": "question", "memory": "memory", "chunk": "chunk"}
_MEMAGENT_NO_MEMORY = "No previous memory"  # for its files that have the sentence inside a call


@dataclass(frozen=True)
class Template:
    """A text with named slots: literals at even places, slot names at odd ones."""

    pieces: tuple[str, ...]

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of the slots, in order."""
        return self.pieces[1::2]

    @classmethod
    def parse(cls, text: str, source: str, slots: frozenset[str]) -> Template:
        """Read a text in which {name} is a slot and every other brace stands for itself."""
        return cls(tuple(_SLOT.split(text))).checked(source, slots)

    def checked(self, source: str, slots: frozenset[str]) -> Template:
        """Itself, if it has every one of `slots` exactly once and no other."""
        used = sorted(self.pieces[1::2])
        if used != sorted(slots):
            wanted, found = (", ".join(f"{{{slot}}}" for slot in names) for names in (sorted(slots), used))
            raise ValueError(f"the prompt {source} must use exactly {wanted}, each once; it uses {found or 'no slot'}")
        return self

    def fill(self, values: Mapping[str, Part]) -> Prompt:
        """One user message; the parts up to a leading {chunk} are marked as shared by all questions on it."""
        parts = [values[piece] if i % 2 else piece for i, piece in enumerate(self.pieces)]
        kept = [i for i, part in enumerate(parts) if len(part)]
        message = Message("user", tuple(parts[i] for i in kept))
        leading_chunk = self.pieces[1:2] == ("chunk",)
        return Prompt((message,), shared_parts=sum(i <= 1 for i in kept) if leading_chunk else 0)


@dataclass(frozen=True)
class MemoryPrompts:
    """The prompts of a memory agent."""

    memory: Template  # {question}, {memory}, {chunk}: its reply is the next memory
    final: Template  # {question}, {memory}: its reply is the answer
    no_memory: str  # stands for the memory until there is one

    @property
    def digest(self) -> str:
        """A hash of every word of the prompts."""
        return _digest([self.memory.pieces, self.final.pieces, self.no_memory])

    @property
    def tags(self) -> tuple[str, ...]:
        """The tag names that structure the prompts."""
        return _tags(self.memory, self.final)


@dataclass(frozen=True)
class SinglePrompt:
    """The prompt of an agent with one turn."""

    answer: Template  # {question} and, where a text is shown, {text}

    @property
    def digest(self) -> str:
        """A hash of every word of the prompt."""
        return _digest([self.answer.pieces])

    @property
    def tags(self) -> tuple[str, ...]:
        """The tag names that structure the prompt."""
        return _tags(self.answer)


def load_memory_prompts(layout: str = "memory_first", path: str | Path | None = None) -> MemoryPrompts:
    """The prompts of a layout of ours, or those at `path`.

    `path` is a directory with memory.txt, final.txt and no_memory.txt, or a Python file of the MemAgent repository,
    whose template constants are read without running it.
    """
    if path is not None:
        path = Path(path)
        if path.is_dir():
            return _from_texts({name: _read(path / f"{name}.txt") for name in _FILES}, str(path))
        if path.suffix == ".py":
            return _from_memagent(path)
        raise ValueError(f"{path} holds no prompts: give a directory with {_FILE_NAMES}, or a MemAgent .py file")
    if layout not in LAYOUTS:
        raise ValueError(f"the layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    return _from_texts({name: bundled_text(f"memagent/{layout}", name) for name in _FILES}, layout)


def load_single_prompt(agent: str = "single") -> SinglePrompt:
    """Our prompt for the whole text in one window, or for no text (`no_context`)."""
    slots = frozenset({"question", "text"} if agent == "single" else {"question"})
    return SinglePrompt(Template.parse(bundled_text(agent, "answer"), f"{agent}/answer.txt", slots))


_FILES = ("memory", "final", "no_memory")
_FILE_NAMES = ", ".join(f"{name}.txt" for name in _FILES)
_MEMORY_SLOTS = frozenset({"question", "memory", "chunk"})
_FINAL_SLOTS = frozenset({"question", "memory"})


def _from_texts(texts: Mapping[str, str], source: str) -> MemoryPrompts:
    if not texts["no_memory"].strip():
        raise ValueError(f"the prompt {source}/no_memory.txt is empty: say in it that nothing is known yet")
    return MemoryPrompts(
        memory=Template.parse(texts["memory"], f"{source}/memory.txt", _MEMORY_SLOTS),
        final=Template.parse(texts["final"], f"{source}/final.txt", _FINAL_SLOTS),
        no_memory=texts["no_memory"],
    )


def bundled_text(directory: str, name: str) -> str:
    """A text of ours."""
    file = resources.files("memjax.agents") / "prompts" / directory / f"{name}.txt"
    return file.read_text(encoding="utf-8").removesuffix("\n")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n")
    except FileNotFoundError:
        raise ValueError(f"the prompt file {path} is missing: a prompt directory holds {_FILE_NAMES}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"the prompt file {path} is not UTF-8 text ({error})") from None


def _from_memagent(path: Path) -> MemoryPrompts:
    constants = _string_constants(path)
    final = "TEMPLATE_FINAL_BOXED" if "TEMPLATE_FINAL_BOXED" in constants else "TEMPLATE_FINAL"
    missing = [name for name in ("TEMPLATE", final) if name not in constants]
    if missing:
        raise ValueError(
            f"{path} defines no string {', '.join(missing)}: give a MemAgent file that holds its templates"
        )
    return MemoryPrompts(
        memory=_memagent_template(constants["TEMPLATE"], f"{path}:TEMPLATE", _MEMORY_SLOTS),
        final=_memagent_template(constants[final], f"{path}:{final}", _FINAL_SLOTS),
        no_memory=constants.get("NO_MEMORY", _MEMAGENT_NO_MEMORY),
    )


def _string_constants(path: Path) -> dict[str, str]:
    try:
        tree = ast.parse(_read(path), filename=str(path))
    except SyntaxError as error:
        raise ValueError(f"{path} is not a Python file that can be read ({error})") from None
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _memagent_template(text: str, source: str, slots: frozenset[str]) -> Template:
    """A str.format template: its doubled braces mean single ones, so the model reads \\boxed{} and not \\boxed{{}}."""
    pieces = [""]
    try:
        for literal, field, _, _ in string.Formatter().parse(text):
            pieces[-1] += literal
            if field is not None:
                pieces += [_MEMAGENT_SLOTS.get(field, field), ""]
    except ValueError as error:
        raise ValueError(f"the prompt {source} is not a format template ({error})") from None
    return Template(tuple(pieces)).checked(source, slots)


def _digest(texts: object) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]


def _tags(*templates: Template) -> tuple[str, ...]:
    literals = "".join(piece for template in templates for piece in template.pieces[::2])
    return tuple(sorted(set(re.findall(r"</([A-Za-z_][\w-]*)>", literals))))
