"""Agents that users bring, named `path/to/file.py:name` or `module:name`: a function, or a pydantic model."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from copy import copy
from functools import cache
from typing import Any

from pydantic import BaseModel, Field, create_model
from pydantic.errors import PydanticUserError

from memjax.agents.config import NamedAgent
from memjax.own_code import hash_of_source, load_own


class OwnAgent(NamedAgent):
    """An agent of the user's. Its name leads to its code, so what it dumps or pickles can be loaded again."""

    async def __call__(self, task: Any, episode: Any) -> str:
        """What the user wrote, which stands before this."""
        raise NotImplementedError

    @property
    def prompt_hash(self) -> str | None:
        """A hash of the file with the code, which holds the prompts too; None where there is no such file."""
        return hash_of_source(type(self))

    def __reduce__(self) -> tuple[Any, ...]:
        """Its class is made anew where it is loaded, in any process with the same files."""
        return _loaded, (self.model_dump(exclude_unset=True) | {"name": self.name},)


def _loaded(values: Mapping[str, Any]) -> NamedAgent:
    return own_class(values["name"]).model_validate(values)


@cache
def own_class(name: str) -> type[NamedAgent]:
    """The agent of that name as a class whose fields are its keys; ValueError for what is no agent.

    A function has no keys. Where an instance of a model is named, its values are the defaults.
    """
    found, fields = load_own(name, "agent"), dict[str, Any]()
    model = found if isinstance(found, type) else type(found)
    if issubclass(model, BaseModel):
        if not any("__call__" in vars(base) for base in model.__mro__):
            raise ValueError(f"{name} has no __call__: give it async def __call__(self, task, episode)")
        _check_call(name, model.__call__, "async def __call__(self, task, episode)")
        if "name" in model.model_fields and not issubclass(model, NamedAgent):
            raise ValueError(f"{name} has a key `name`, which already means where an agent's code is: rename it")
        for key in () if isinstance(found, type) else set(model.model_fields) - {"name"}:
            fields[key] = _with_default(model, key, getattr(found, key))
        bases: tuple[Any, ...] = (model, OwnAgent)
    elif isinstance(found, type):
        raise ValueError(f"{name} is a class without keys: derive it from pydantic.BaseModel")
    else:
        _check_call(name, found, f"async def {name.rpartition(':')[2]}(task, episode)")

        class Function(OwnAgent):
            __call__ = staticmethod(found)

        model, bases = found, (Function,)
    fields |= {"name": (str, Field(default=name)), "__module__": model.__module__, "__doc__": model.__doc__}
    try:
        return create_model(re.split(r"[:.]", name)[-1], __base__=bases, **fields)
    except (PydanticUserError, TypeError) as error:
        raise ValueError(f"{name} cannot be an agent: {error}") from error


def _with_default(model: type[BaseModel], key: str, value: Any) -> tuple[Any, Any]:
    field = copy(model.model_fields[key])
    field.default, field.default_factory = value, None
    return field.annotation, field


def _check_call(name: str, function: Any, shape: str) -> None:
    """ValueError for what cannot be called and awaited with a task and its episode."""
    if not callable(function):
        raise ValueError(f"{name} is a {type(function).__name__}, not an agent: write {shape}")
    if not inspect.iscoroutinefunction(function):
        raise ValueError(f"{name} is not async, so it could not wait for the model: write {shape}")
    signature = inspect.signature(function)
    try:
        signature.bind(*[None] * shape.count(", "), None)
    except TypeError:
        raise ValueError(
            f"{name} takes {signature}, but an agent is called with a task and its episode: {shape}"
        ) from None
