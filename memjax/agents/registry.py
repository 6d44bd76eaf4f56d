"""The agents by name: one union that every config and command line uses."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from memjax.agents.config import AgentConfig
from memjax.agents.memagent import MemAgent
from memjax.agents.no_context import NoContext
from memjax.agents.oracle import Oracle
from memjax.agents.single import Single, SingleTruncated
from memjax.agents.tool import ToolAgent

AGENTS: Mapping[str, type[AgentConfig]] = MappingProxyType(
    {cls.model_fields["name"].default: cls for cls in (MemAgent, Single, SingleTruncated, NoContext, Oracle, ToolAgent)}
)
DEFAULT = MemAgent()
"""The agent where none is named."""


def _named(value: Any) -> Any:
    """A mapping without a name means the default agent; a name alone means that agent with its defaults."""
    if isinstance(value, str):
        return {"name": value}
    return {"name": DEFAULT.name, **value} if isinstance(value, Mapping) else value


AnyAgent = Annotated[
    Annotated[MemAgent | Single | SingleTruncated | NoContext | Oracle | ToolAgent, Field(discriminator="name")],
    BeforeValidator(_named),
]
"""The type of a config's `agent`."""


def agent_class(name: str) -> type[AgentConfig]:
    """The agent of that name; ValueError that lists them."""
    if name not in AGENTS:
        raise ValueError(f"there is no agent {name!r}: choose one of {', '.join(AGENTS)}")
    return AGENTS[name]


def agent_keys(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of an agent that were given on a command line, None left out; ValueError for one that it lacks."""
    keys = {name: value for name, value in given.items() if value is not None}
    chosen = keys.get("name", DEFAULT.name)
    for name in keys:
        if name not in agent_class(chosen).model_fields:
            raise ValueError(f"{option_of(name)}: the agent {chosen} has no such setting; leave it out")
    return keys


def option_of(key: str) -> str:
    """The command line's option for a key of a config, of the agent among them."""
    name = key.removeprefix("agent.").removesuffix(".name")
    return f"--{name}-tokens" if name in BUDGETS else f"--{name.replace('_', '-')}".replace("--name", "--agent")


BUDGETS = ("question", "chunk", "memory", "answer")
"""The keys of an agent that are numbers of tokens, in options `--chunk-tokens` and the like."""
