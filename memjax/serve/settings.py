"""What `memjax serve` runs with: a config file, what was typed over it, and keys from the environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from memjax.agents.registry import DEFAULT, AnyAgent, agent_class
from memjax.config import load_config
from memjax.own_code import is_own


def _state_directory(given: Mapping[str, Any]) -> Path:
    """By the port: servers side by side, of one model or of several, each keep their own."""
    home = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state")
    return home / "memjax" / "serve" / str(given.get("port", 0))


class ServeSettings(BaseModel):
    """A server: its model, its addresses and its limits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(min_length=1)  # a directory, a .gguf file or a hub id
    served_name: str | None = None  # what clients call it; by default the name of its directory or file
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)  # 0: any free one
    allowed_hosts: tuple[
        str, ...
    ] = ()  # further names of this server, and of pages that may use it, when it has no keys
    grpc_port: int | None = Field(None, ge=0, le=65535)  # JetStream's service; None: not served
    dtype: Literal["float32", "bfloat16"] | None = None  # None: the faster here
    slots: int | None = Field(None, ge=1)  # replies that are decoded side by side
    max_length: int | None = Field(None, ge=16)  # tokens of a prompt and its reply
    tensor: int = Field(1, ge=1)  # devices that one model is spread over
    replicas: int = Field(1, ge=1)  # models side by side, each on devices of its own; above 1 they run under Ray
    max_queue: int = Field(256, ge=0)  # replies that may wait for a slot; more are refused with 429
    max_runs: int = Field(64, ge=1)  # documents that are read at the same time
    max_share: float = Field(0.5, gt=0, le=1)  # of slots and queue, and of documents, that one of several keys may hold
    max_body: int = Field(64 << 20, ge=1024)  # bytes of a request, uploads included
    request_timeout: float = Field(600.0, gt=0)  # seconds from a request's arrival to its last token
    body_timeout: float = Field(20.0, gt=0)  # seconds for a request's head, and for its body beside 10 kB per second
    drain_seconds: float = Field(60.0, ge=0)  # how long SIGTERM waits for running requests
    agent: AnyAgent = DEFAULT  # how memory/MODEL works; requests may choose its budgets
    state_dir: Path = Field(default_factory=_state_directory)  # uploaded files, and runs that continue after a restart
    run_hours: float = Field(168.0, gt=0)  # files and runs are kept so long after their last use

    @field_validator("agent")
    @classmethod
    def _whole(cls, agent: AnyAgent) -> AnyAgent:
        """Runs are continued by servers that were started in other directories."""
        prompts, place = getattr(agent, "prompts", None), agent.name.rpartition(":")[0]
        if isinstance(prompts, Path):
            agent = agent.model_copy(update={"prompts": prompts.expanduser().absolute()})
        if is_own(agent.name) and place.endswith(".py"):
            name = f"{Path(place).expanduser().absolute()}:{agent.name.rpartition(':')[2]}"
            agent = agent_class(name).model_validate(agent.model_dump(exclude_unset=True) | {"name": name})
        return agent


def read_settings(config: Path | None, given: Mapping[str, Any], of_agent: Sequence[str] = ()) -> ServeSettings:
    """The settings of a file with what was typed (None: nothing) over them; ValueError names what is wrong.

    `of_agent` are keys of the agent, as `chunk=2000`.
    """
    keys = {"prompts": "agent.prompts", "agent": "agent.name"}
    overrides = [f"{keys.get(name, name)}={json.dumps(value)}" for name, value in given.items() if value is not None]
    overrides += [f"agent.{setting}" for setting in of_agent]
    if config is None and given.get("model") is None:
        raise ValueError("no model given: --model takes a directory in Hugging Face's layout, a .gguf file or a hub id")
    return load_config(ServeSettings, config, overrides)


def read_keys(
    typed: list[str] | None, environ: Mapping[str, str], variable: str = "MEMJAX_API_KEYS"
) -> tuple[str, ...]:
    """The API keys: those typed, else those of the environment, each separated by commas; none opens the server.

    ValueError for an empty one: a variable that was never filled must not open the server to everybody.
    """
    source, given = ("--api-key", typed) if typed else (variable, [environ[variable]] if variable in environ else [])
    keys = tuple(key.strip() for text in given for key in text.strip().removesuffix(",").split(","))
    if not all(keys):
        raise ValueError(f"{source} holds an empty key: fill it, or leave it out to serve without keys")
    return keys


def read_admin_key(environ: Mapping[str, str], variable: str = "MEMJAX_ADMIN_KEY") -> str | None:
    """The key of /admin, or None; ValueError for an empty one."""
    key = environ.get(variable)
    if key is not None and not key.strip():
        raise ValueError(f"{variable} is set and empty: fill it, or unset it to close /admin")
    return key


def keys_sentence(keys: Sequence[str], host: str) -> str:
    """Who may use the server, for the log."""
    if keys:
        return f"{len(keys)} API key{'s are' if len(keys) > 1 else ' is'} asked for"
    if host in ("127.0.0.1", "localhost", "::1"):
        return "no API key is asked for: every program of this machine can use the server"
    return (
        f"WARNING: NO API KEY IS ASKED FOR: everybody who reaches {host} can read and delete what is kept here; "
        "set MEMJAX_API_KEYS"
    )
