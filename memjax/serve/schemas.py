"""What the endpoints take. Fields that are not listed are accepted and reported, as OpenAI's clients send many."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from memjax.trajectory import SamplingParams

MAX_SAMPLES = 64
MAX_PROMPTS = 64
MAX_QUESTIONS = 32
MAX_FILES = 100
MAX_TOOLS = 128
MAX_CALLS = 128
MAX_MESSAGES = 4096
MAX_PARTS = 4096
_COLDEST = 1e-4

# Lists fail at their first wrong item: nobody reads a million errors, and making them would hold up everybody else.
Stop = Annotated[
    list[str],
    Field(fail_fast=True, max_length=16),
    BeforeValidator(lambda given: [given] if isinstance(given, str) else given, json_schema_input_type=str | list[str]),
]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(fail_fast=True, min_length=1)]


class Body(BaseModel):
    """Any request's body."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """null says that an optional field is not given: many clients write all fields that they know."""
        if not isinstance(given, dict):
            return given
        needed = {name for name, field in cls.model_fields.items() if field.is_required()}
        return {name: value for name, value in given.items() if value is not None or name in needed}

    @property
    def ignored(self) -> list[str]:
        """The fields that were sent with a value and mean nothing here, those inside others as tools.function.x."""
        return sorted(set(_unknown(self)))


def _unknown(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _unknown(item)
    elif isinstance(value, Body):
        yield from (name for name, extra in (value.model_extra or {}).items() if extra not in (None, False, 0, [], {}))
        for name, inner in value:
            if isinstance(inner, list | Body):
                yield from (f"{name}.{unknown}" for unknown in _unknown(inner))


class SamplingRequest(Body):
    """How to draw, under OpenAI's names."""

    n: int = Field(1, ge=1, le=MAX_SAMPLES)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)  # -1 means no cut, as for other servers
    stop: Stop | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stream: bool = False

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return self.stop or []

    def sampling(self, max_tokens: int) -> SamplingParams:
        """The same as the engine takes it. Raises ValueError for an empty stop string."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=drawable(self.temperature),
            top_p=self.top_p,
            top_k=max(0, self.top_k),
            stop=tuple(self.stops),
            seed=self.seed,
            n=self.n,
        )


def drawable(temperature: float) -> float:
    """The temperature, or 0 where logits divided by it would leave float32: the reply is the greedy one anyway."""
    return temperature if temperature >= _COLDEST else 0.0


class StreamOptions(Body):
    """What a stream holds beside its text."""

    include_usage: bool = False


class OpenAIRequest(SamplingRequest):
    """What chat and text completions share."""

    model: str
    stream_options: StreamOptions | None = None

    @property
    def usage_wanted(self) -> bool:
        """Whether a stream is to end with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ContentPart(Body):
    """A piece of a message: text, or a file uploaded to /v1/files."""

    type: str
    text: str | None = None
    file: dict[str, Any] | None = None


class FunctionCall(Body):
    """What was called; the arguments are JSON text."""

    name: str = Field(min_length=1)
    arguments: str


class CalledTool(Body):
    """A call that an assistant's message tells of."""

    id: str = Field(min_length=1)
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Body):
    """A message; "developer" is another word for "system". Content may be null beside `tool_calls`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    tool_calls: Annotated[list[CalledTool], Field(fail_fast=True, max_length=MAX_CALLS)] | None = None
    tool_call_id: str | None = None

    @property
    def parts(self) -> list[ContentPart]:
        """The content piece by piece."""
        return [ContentPart(type="text", text=self.content)] if isinstance(self.content, str) else self.content or []


class FunctionDefinition(Body):
    """A function that the model may call; `parameters` is a JSON schema, which is shown and not enforced."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition

    def shown(self) -> dict[str, Any]:
        """What a chat template is given."""
        names = {"name", "description", "parameters"}
        return self.model_dump(include={"type": True, "function": names}, exclude_unset=True)


class FunctionName(Body):
    """Which function."""

    name: str


class NamedTool(Body):
    """The one tool that is to be called."""

    type: Literal["function"]
    function: FunctionName


class ChatRequest(OpenAIRequest):
    """/v1/chat/completions. A last message of the assistant is continued."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    @property
    def ignored(self) -> list[str]:
        """As for any body; and `strict`, for nothing holds a model to a schema."""
        strict = any(tool.function.strict for tool in self.tools or ())
        return sorted([*super().ignored, *(["tools.function.strict"] if strict else [])])


class CompletionRequest(OpenAIRequest):
    """/v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
        | TokenIds
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
    )
    max_tokens: int | None = Field(None, ge=0)  # 0 is for `echo`
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool = False


class GenerateRequest(SamplingRequest):
    """/generate: token ids in, token ids and log probabilities out."""

    token_ids: TokenIds
    shared: int = Field(0, ge=0)  # so many leading ids come again in other requests: their prefill is kept


class TokenizeRequest(Body):
    """/tokenize: the ids of a text, or of messages in the chat template."""

    text: str | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None


class WeightsRequest(Body):
    """/admin/weights: where the weights lie that are to be run from now on."""

    directory: str = Field(min_length=1, max_length=4096)
    version: int | None = Field(None, ge=0, lt=1 << 31)


class MemoryRequest(Body):
    """/v1/memory/answers. Its documents: those of another run, text, files uploaded before, in that order."""

    model: str | None = None
    from_run: str | None = None
    text: str | None = None
    file_id: str | None = None
    file_ids: Annotated[list[str], Field(fail_fast=True, max_length=MAX_FILES)] = []
    question: str | None = None
    questions: Annotated[list[str], Field(fail_fast=True, max_length=MAX_QUESTIONS)] = []
    chunk_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    memory_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    answer_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    question_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    layout: str | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stream: bool = False

    @property
    def all_questions(self) -> tuple[str, ...]:
        """The one and the several."""
        return (*([] if self.question is None else [self.question]), *self.questions)

    @property
    def all_files(self) -> tuple[str, ...]:
        """The one and the several."""
        return (*([] if self.file_id is None else [self.file_id]), *self.file_ids)


class AppendRequest(Body):
    """What to read on: text, files uploaded before, or both in that order."""

    text: str | None = None
    file_ids: Annotated[list[str], Field(fail_fast=True, max_length=MAX_FILES)] = []
