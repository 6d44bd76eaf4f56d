"""Every setting of a config with its type, default and meaning, read off its models: what the documents show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from memjax.config import Variants, is_list

REQUIRED = "required"
"""What stands for the default of a key that has none."""


class Key(NamedTuple):
    """One setting, as its table in the documents shows it."""

    name: str  # dotted; N stands for the number of a list's entry
    type: str
    default: str
    meaning: str


class Section(NamedTuple):
    """The settings of one model of a config; `variant` is the agent, or whatever else has keys of its own by name."""

    name: str
    variant: str
    about: str
    keys: list[Key]


def sections_of(cls: type[BaseModel], name: str = "", variant: str = "") -> Iterator[Section]:
    """The settings of `cls` and of the models in it, in the order in which they are written."""
    prefix, keys, below = f"{name}." if name else "", [], []
    for field_name, field in cls.model_fields.items():
        if f"{field_name}: {field.default}" == variant:
            continue
        models = _models_of(field)
        key = f"{prefix}{field_name}"
        keys.append(Key(key, _type_of(field, bool(models)), _default_of(field, bool(models)), field.description or ""))
        chooses = getattr(field.annotation, "model_fields", {}).get("name")
        if chooses and models[0][0]:
            keys.append(Key(f"{key}.name", _type_of(chooses, False), field.default.name, chooses.description or ""))
        below += [(model, f"{key}.N" if is_list(field) else key, which) for which, model in models]
    yield Section(name, variant, " ".join((cls.__doc__ or "").split("\n\n")[0].split()), keys)
    for model, place, which in below:
        yield from sections_of(model, place, which)


def _models_of(field: FieldInfo) -> list[tuple[str, type[BaseModel]]]:
    """The models whose settings a field has, each with what chooses it, if something does."""
    for mark in field.metadata:
        if isinstance(mark, Variants):
            return [(f"name: {name}", model) for name, model in mark.known.items()]
    parts = (field.annotation, *get_args(field.annotation))
    return [("", part) for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]


def _type_of(field: FieldInfo, has_models: bool) -> str:
    """The type in words, with its bounds."""
    if has_models:
        return "list of sections" if is_list(field) else "section"
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    limits = [f"{signs[name]} {limit}" for bound in field.metadata for name, limit in _limits(bound) if name in signs]
    return " ".join([_words_of(field.annotation), ", ".join(limits)]).strip()


def _limits(bound: Any) -> list[tuple[str, Any]]:
    return [*asdict(bound).items()] if is_dataclass(bound) and not isinstance(bound, type) else []


def _words_of(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(map(str, inner))
    if origin in (tuple, list):
        return f"list of {_words_of(inner[0])}"
    if origin is Mapping:
        return f"mapping of {_words_of(inner[0])} to {_words_of(inner[1])}"
    if inner:
        return " | ".join(_words_of(part) for part in inner)
    return {Path: "path", type(None): "null"}.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _default_of(field: FieldInfo, has_models: bool) -> str:
    if field.is_required():
        return REQUIRED
    default = field.get_default(call_default_factory=True)
    if isinstance(default, BaseModel):
        return ""
    return yaml.safe_dump(_plain(default), default_flow_style=True, width=1000).removesuffix("\n...\n").strip()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {**value}
    return [*value] if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value
