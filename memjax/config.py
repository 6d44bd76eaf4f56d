"""Configs: a YAML file and dotted key=value overrides, checked into a frozen pydantic model."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

Config = TypeVar("Config", bound=BaseModel)


@dataclass(frozen=True)
class Variants:
    """Marks a field, in its `Annotated`, whose model depends on its value: `of(value)`; ValueError for a wrong one.

    `known` are those that can be listed, by the value of their key `name`.
    """

    of: Callable[[Any], type[BaseModel]]
    known: Mapping[str, type[BaseModel]]


class ConfigError(ValueError):
    """A key that lacks a value or cannot have the one it was given, for callers that call keys by other names.

    `key` is dotted, and empty where several keys contradict each other; `problem` is a sentence without the key.
    """

    def __init__(self, key: str, problem: str, *, missing: bool = False):
        super().__init__(f"{key}: {problem}" if key else problem)
        self.key, self.problem, self.missing = key, problem, missing


def load_config(
    cls: type[Config],
    path: Path | None = None,
    overrides: Sequence[str] = (),
    given: Mapping[str, Any] = MappingProxyType({}),
) -> Config:
    """Build a `cls` from a YAML file and overrides such as "optimizer.lr=1e-6"; the later of two overrides wins.

    An override's value is read as YAML; `given` are values of top-level keys that need no reading. Raises ValueError
    for a file that cannot be read, a key that `cls` does not have (naming the nearest one that it has) and, as
    ConfigError, a value that is missing or of the wrong type or range.
    """
    values = {**(_read_yaml(path) if path else {}), **given}
    for override in overrides:
        _set(values, override)
    unknown = sorted(set(_leaves(values, cls)) - set(known := _keys(cls, values)))
    if unknown:
        raise ValueError(_unknown_key(unknown[0], known, path))
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        raise config_error(error) from None


def config_error(invalid: ValidationError) -> ConfigError:
    """What the first of the errors says, in a sentence."""
    error: Any = invalid.errors()[0]
    key = ".".join(map(str, error["loc"]))
    if error["type"] == "value_error":  # raised by a validator of ours: a sentence, and the input may be everything
        return ConfigError(key, str(error["ctx"]["error"]))
    if error["type"] in ("tuple_type", "list_type"):
        return ConfigError(key, f"must be a list, such as {key}='[...]', got {error['input']!r}")
    if error["type"] == "missing":
        return ConfigError(key, "has no value, and there is no default", missing=True)
    return ConfigError(key, f"{error['msg']}, got {error['input']!r}")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no config file {path}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ValueError(f"{path}{where} is not YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML ({' '.join(str(error).split())})") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold keys and values, got a {type(values).__name__}")
    return values


def _set(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ValueError(f"an override is key=value, with dots for nested keys, got {override!r}")
    *parents, leaf = key.split(".")
    at: Any = values
    for parent in parents:
        place = _place(at, parent, key)
        at = at.setdefault(place, {}) if isinstance(at, dict) else at[place]
        if not isinstance(at, dict | list):
            raise ValueError(f"{key} cannot be set: {parent} has the value {at!r}")
    try:
        at[_place(at, leaf, key)] = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ValueError(f"the value of {override!r} is not YAML: put it in quotes") from None


def _place(values: Any, name: str, key: str) -> str | int:
    """What a part of the dotted `key` means there: an entry of a list by its number, else a key."""
    if not isinstance(values, list):
        return name
    if not name.isdecimal() or int(name) >= len(values):
        raise ValueError(f"{key} cannot be set: a list of {len(values)} has no entry {name} (the first one is 0)")
    return int(name)


def _leaves(values: Mapping[str, Any], cls: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The dotted keys of the values, down to where `cls` has models or lists of models."""
    for key, value in values.items():
        inner = _model_of(cls, key, values)
        found = _entries(cls, key, value) if inner is not None else {}
        for place, entry in found.items():
            assert inner is not None
            yield from _leaves(entry, inner, f"{prefix}{place}.")
        if not found:
            yield f"{prefix}{key}"


def _entries(cls: type[BaseModel], name: str, value: Any) -> dict[str, Mapping[str, Any]]:
    """The values that a field's model reads, by key; for a list of models by name and number."""
    if not is_list(cls.model_fields[name]):
        return {name: value} if isinstance(value, Mapping) else {}
    found = enumerate(value if isinstance(value, Sequence) else ())
    return {f"{name}.{i}": entry for i, entry in found if isinstance(entry, Mapping)}


def is_list(field: FieldInfo) -> bool:
    """Whether a field holds several values."""
    return get_origin(field.annotation) in (tuple, list)


def _keys(cls: type[BaseModel], values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Every dotted key that `cls` takes; of a part that has variants, those of the variant that `values` name."""
    keys = []
    for name in cls.model_fields:
        keys.append(f"{prefix}{name}")
        inner = _model_of(cls, name, values)
        if inner is not None:
            first = f"{name}.0" if is_list(cls.model_fields[name]) else name
            for place, given in (_entries(cls, name, values.get(name)) or {first: {}}).items():
                keys += _keys(inner, given, f"{prefix}{place}.")
    return keys


def _model_of(cls: type[BaseModel], name: str, values: Mapping[str, Any]) -> type[BaseModel] | None:
    """The model of a field, X or X | None; of one with variants, the one that its value means."""
    field = cls.model_fields.get(name)
    for mark in field.metadata if field else ():
        if isinstance(mark, Variants):
            try:
                return mark.of(values.get(name))
            except ValueError as error:
                raise ConfigError(name, str(error)) from None
    annotation = field.annotation if field else None
    candidates = (annotation, *getattr(annotation, "__args__", ()))
    models = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
    return next(iter(models), None)


def _unknown_key(key: str, known: Sequence[str], path: Path | None) -> str:
    # Either the whole key is a little off, or its last name is right and stands in another place.
    section, _, leaf = key.rpartition(".")
    nearest = difflib.get_close_matches(key, known, n=1) or [k for k in known if k.rpartition(".")[2] == leaf]
    if nearest == [section]:  # which is no other key, but where this one stands
        of_section = ", ".join(k for k in known if k.rpartition(".")[0] == section)
        advice = f"the keys there are {of_section}"
    else:
        advice = f"did you mean {nearest[0]}?" if nearest else f"the keys are {', '.join(known)}"
    return f"unknown config key {key}{f' (in {path} or an override)' if path else ''}: {advice}"


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flattened(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
