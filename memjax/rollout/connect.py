"""From what a user names (a model path, a hub id, a service) to a tokenizer and a client."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from memjax.data.token_estimate import EstimatedTokenizer
from memjax.rollout.client import Client, Prompt
from memjax.rollout.http import DEFAULT_URL, HttpClient, served_models
from memjax.rollout.identity import ModelIdentity, hash_of_files
from memjax.tokenizer_files import locate
from memjax.trajectory import Completion, SamplingParams

if TYPE_CHECKING:
    from memjax.tokenizer import Tokenizer


@dataclass(frozen=True)
class LocalModel:
    """A model that runs in this process: a directory, a .gguf file or a hub id."""

    model: str

    def identity(self, dtype: str | None = None) -> ModelIdentity:
        """What its replies depend on: all its bytes, and the dtype it runs in (by default the machine's)."""
        path = locate(self.model)
        weights = [path] if path.is_file() else sorted([*path.glob("*.safetensors"), path / "config.json"])
        named = ("*token*.json", "chat_template*", "vocab.json", "merges.txt", "generation_config.json")
        tokenizer = [path] if path.is_file() else sorted({file for name in named for file in path.glob(name)})
        return ModelIdentity(
            model=Path(self.model).name,
            weights=hash_of_files(file for file in weights if file.is_file()),
            dtype=dtype or default_dtype(),
            tokenizer=hash_of_files(tokenizer),
        )

    def fingerprint(self) -> str:
        """A hash that tells other weights from these."""
        return self.identity("any dtype").weights or ""  # asking for the machine's would take hold of its devices

    def trained_window(self) -> int:
        """The most tokens that the model was made for. Raises ValueError for what is no model."""
        path = locate(self.model)  # before the seconds that jax takes to load

        from memjax.checkpoint import read_config
        from memjax.checkpoint.gguf import GGUFModel

        config = read_config(path) if path.is_dir() else GGUFModel(path).config
        return config.trained_window


@dataclass(frozen=True)
class Service:
    """A model behind an OpenAI-compatible address."""

    url: str
    model: str
    window: int | None = None

    def trained_window(self) -> int | None:
        """The most tokens that the service takes, where it said so."""
        return self.window

    def identity(self, dtype: str | None = None) -> ModelIdentity:
        """What is known of what its replies depend on: its name. Where it is served may change between two runs."""
        return ModelIdentity(self.model)

    def fingerprint(self) -> str:
        """The model's name: where it is served may change between two runs."""
        return self.model


ModelChoice = LocalModel | Service


def choose_model(model: str | None, url: str | None, environ: Mapping[str, str]) -> ModelChoice:
    """Whom to ask: `url` or the environment's URL is a service, unless `model` is a path that exists.

    Without `model` a service that serves exactly one is asked for it.
    """
    if url is None and model is not None and Path(model).exists():
        return LocalModel(model)
    url = url or environ.get("URL")
    if url:
        served = served_models(url, environ.get("API_KEY", ""))
        if model is None:
            if len(served) != 1:
                raise ValueError(f"{url} {_offers(served)}: say which with --model NAME")
            (model,) = served
        return Service(url, model, served.get(model))
    if model is None:
        raise ValueError(
            "no model given: --model takes a directory in Hugging Face's layout, a .gguf file or a hub id like "
            f"Qwen/Qwen2.5-0.5B-Instruct; --url (or the variable URL) takes a service, for example {DEFAULT_URL}"
        )
    return LocalModel(model)


def load_tokenizer(choice: ModelChoice, tokenizer: str | None) -> Tokenizer | EstimatedTokenizer:
    """The model's tokenizer; an estimate for a service when none is named."""
    if isinstance(choice, Service) and tokenizer is None:
        return EstimatedTokenizer()
    from memjax.tokenizer import Tokenizer

    return Tokenizer.load(tokenizer or choice.model)


def open_client(
    choice: ModelChoice,
    tokenizer: Tokenizer | EstimatedTokenizer,
    *,
    length: int,
    slots: int,
    dtype: Literal["float32", "bfloat16"] | None,
    on_retry: Callable[[str], None] | None = None,
) -> Client:
    """A client for conversations of up to `length` tokens, `slots` at a time; a local model is loaded for it.

    `on_retry` is told why a service is asked once more.
    """
    if isinstance(choice, Service):
        return HttpClient(choice.model, tokenizer, url=choice.url, window=choice.window, on_retry=on_retry)
    from memjax.rollout.local import LocalClient

    _keep_compiled_programs()
    return LocalClient.load(choice.model, max_length=length, slots=slots, dtype=dtype)


def default_dtype() -> str:
    """The dtype that weights have on this machine where nobody says otherwise."""
    import jax.numpy as jnp

    from memjax.models.config import default_param_dtype

    return jnp.dtype(default_param_dtype()).name


@dataclass
class DeferredClient:
    """A client that is opened with its first call: a run that its journal answers in full loads no model."""

    open: Callable[[], Client]
    model: str
    window: int | None
    _client: Client | None = None

    async def complete(self, prompt: Prompt, params: SamplingParams) -> list[Completion]:
        """As the client's."""
        if self._client is None:
            self._client = self.open()
        return await self._client.complete(prompt, params)

    async def close(self) -> None:
        """Close the client, if it was opened."""
        if self._client is not None:
            await self._client.close()


def _keep_compiled_programs() -> None:
    """Compile once per machine, not once per run; jax's own setting (JAX_COMPILATION_CACHE_DIR) goes first."""
    import jax

    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]  # (jax adds it at run time)
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(home / "memjax" / "xla"))


def _offers(served: Mapping[str, int | None]) -> str:
    return f"serves {', '.join(served)}" if served else "does not say which models it serves"
