"""The agents by name: one type that every config and command line uses, for those of users too."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any

import yaml
from pydantic import BeforeValidator, SerializeAsAny

from memjax.agents.config import AgentConfig, NamedAgent
from memjax.agents.memagent import MemAgent
from memjax.agents.no_context import NoContext
from memjax.agents.oracle import Oracle
from memjax.agents.own import own_class
from memjax.agents.single import Single, SingleTruncated
from memjax.agents.tool import ToolAgent
from memjax.config import Variants
from memjax.own_code import is_own

AGENTS: Mapping[str, type[AgentConfig]] = MappingProxyType(
    {cls.model_fields["name"].default: cls for cls in (MemAgent, Single, SingleTruncated, NoContext, Oracle, ToolAgent)}
)
DEFAULT = MemAgent()
"""The agent where none is named."""


def agent_class(name: str) -> type[NamedAgent]:
    """The agent of that name, its keys as fields; ValueError that lists the built-in ones, or says what is wrong."""
    if is_own(name):
        return own_class(name)
    if name not in AGENTS:
        raise ValueError(
            f"there is no agent {name!r}: choose one of {', '.join(AGENTS)}, or one of your own as FILE.py:NAME"
        )
    return AGENTS[name]


def _class_of(value: Any) -> type[NamedAgent]:
    name = value.get("name", DEFAULT.name) if isinstance(value, Mapping) else value
    return agent_class(name) if isinstance(name, str) else type(DEFAULT)


def _agent_of(value: Any) -> Any:
    """A mapping without a name means the default agent; a name alone means that agent with its defaults."""
    if isinstance(value, NamedAgent):
        return value
    return _class_of(value).model_validate({"name": value} if isinstance(value, str) else value)


AnyAgent = Annotated[SerializeAsAny[NamedAgent], BeforeValidator(_agent_of), Variants(_class_of)]
"""The type of a config's `agent`."""


def agent_keys(given: Mapping[str, Any], settings: Sequence[str] = ()) -> dict[str, Any]:
    """The keys of an agent that were given on a command line, None left out; ValueError for one that it lacks.

    `settings` are any of its keys, as `bullets=5`, with values as in YAML.
    """
    keys = {name: value for name, value in given.items() if value is not None}
    chosen = keys.get("name", DEFAULT.name)
    known = agent_class(chosen).model_fields
    for name in keys:
        if name not in known:
            raise ValueError(f"{option_of(name)}: the agent {chosen} has no such setting; leave it out")
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise ValueError(f"--set takes KEY=VALUE, got {setting!r}")
        if name not in known or name == "name":
            own = [key for key in known if key != "name"]
            near = difflib.get_close_matches(name, own, n=1)
            advice = f"did you mean {near[0]}?" if near else f"its keys are {', '.join(own) or 'none'}"
            raise ValueError(f"--set {setting}: the agent {chosen} has no key {name!r}: {advice}")
        try:
            keys[name] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise ValueError(f"--set {setting}: the value is not YAML: put it in quotes") from None
    return keys


def option_of(key: str) -> str:
    """The command line's option for a key of a config, of the agent among them."""
    name = key.removeprefix("agent.").removesuffix(".name")
    if key.startswith("agent.") and name not in OPTIONS:
        return f"--set {name}"
    return f"--{name}-tokens" if name in BUDGETS else f"--{name.replace('_', '-')}".replace("--name", "--agent")


BUDGETS = ("question", "chunk", "memory", "answer")
"""The keys of an agent that are numbers of tokens, in options `--chunk-tokens` and the like."""

OPTIONS = ("name", "layout", "prompts", *BUDGETS)
"""The keys of an agent with options of their own; others are set with --set."""
