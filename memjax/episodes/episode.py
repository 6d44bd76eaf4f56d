"""What an agent may do: call the model, read a document, call a function, run coroutines side by side.

Nothing here knows about seeds of a run, files, progress, training or the server: an agent written against `Episode`
works in all of them. Every call has a key that does not depend on the order in which replies arrive.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from memjax.data.chunks import Chunk, ChunkTokenizer, escape_tags
from memjax.data.seeds import derive_seed
from memjax.environments.environment import Environment, Step
from memjax.episodes.acting import ActingIn, EnvironmentFailure
from memjax.episodes.feed import Feed
from memjax.episodes.limits import Limits
from memjax.episodes.openai_client import EpisodeClient
from memjax.episodes.quotes import Quote, QuotedText
from memjax.rewards.answers import without_thinking
from memjax.rollout.client import Client, ClientError, Message, Part, Prompt, ToolCall
from memjax.rollout.tool_calls import parse_tool_calls
from memjax.trajectory import Completion, SamplingParams, Task, TextSource

if TYPE_CHECKING:
    from memjax.episodes.journal import EpisodeJournal

Key = tuple[int | str, ...]
"""Names a call within its episode: the path of asyncio tasks below the episode, then the number in that task."""

Result = TypeVar("Result")

_SIBLINGS = 8  # turns of the event loop in which calls made side by side all get to look into the journal


class JournalMismatch(ValueError):  # noqa: N818  (it is a finding, not a fault)
    """A journal holds another run, of which nothing can be replayed."""


class EpisodeTokenizer(ChunkTokenizer, Protocol):
    """What an episode and its agent need of a tokenizer."""

    @property
    def eos_ids(self) -> Sequence[int]:
        """The ids that end a reply."""
        ...

    def pieces_of(self, ids: Sequence[int]) -> Sequence[bytes]:
        """The bytes of each id."""
        ...

    def ids_of(self, pieces: Sequence[bytes]) -> Sequence[int]:
        """The ids with these bytes; ValueError for bytes that are no token of plain text."""
        ...

    def count(self, text: str) -> int:
        """How many tokens the text takes."""
        ...

    def render(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()) -> Sequence[int]:
        """The ids of the messages, and of the tools, in the model's chat template."""
        ...


@dataclass(frozen=True)
class Reply:
    """What the model wrote in one turn. `part`, `whole` and `message` are its only ways into a later prompt."""

    completion: Completion
    key: Key
    ids: tuple[int, ...]  # without the end id; empty where a service gives text only

    @classmethod
    def of(cls, completion: Completion, key: Key, end_ids: Collection[int]) -> Reply:
        """The reply that a completion is, where `end_ids` end one."""
        return cls(completion, key, without_end(completion.token_ids, end_ids))

    @property
    def text(self) -> str:
        """The reply as text, ended before a stop string."""
        return self.completion.text

    @property
    def truncated(self) -> bool:
        """Whether the reply was cut at its token limit."""
        return self.completion.finish_reason == "length"

    def part(self, *, tags: Sequence[str] = ()) -> Part | None:
        """What the reply says, as a part of a later prompt; None if that is blank.

        It is the very ids that were sampled (the text where a service gives no ids), unless the reply holds thinking,
        which is left out, or one of the prompt's own `tags`, which is escaped: then it is the text without them.
        """
        said = escape_tags(without_thinking(self.text), tags)
        return self.whole() if said == self.text else said.strip() or None

    def whole(self) -> Part | None:
        """All of the reply as it was written: its ids without the end id, else its text; None if it is blank."""
        if not self.text.strip():
            return None
        return Quote(self.ids, self.key) if self.ids else QuotedText(self.text, self.key)

    @property
    def message(self) -> Message:
        """The whole reply as the assistant message of a later prompt."""
        part = self.whole()
        return Message("assistant", () if part is None else (part,))


@dataclass(frozen=True)
class Turn:
    """One call of the model inside an episode."""

    key: Key
    kind: str
    prompt: Prompt
    reply: Reply
    chunk: Chunk | None = None  # what it read of the document
    trained: bool = True  # whether its tokens carry loss
    notes: Mapping[str, Any] = field(default_factory=dict)
    digest: str | None = None  # of everything that the reply depends on; None where nobody keeps it
    prompt_hash: str | None = None
    replayed: bool = False  # answered from the journal

    @property
    def is_continuation(self) -> bool:
        """Whether the prompt repeats a reply as an assistant message, and so should extend its conversation."""
        return any(
            message.role == "assistant" and (message.content or message.tool_calls) for message in self.prompt.messages
        )


class Episode:
    """One attempt at a task. An agent gets it beside the task; `run_episode` makes it.

    `tokenizer` counts and cuts in the model's tokens; `window` is the model's context length in tokens, or None.
    """

    def __init__(
        self,
        task: Task,
        client: Client,
        tokenizer: EpisodeTokenizer,
        sampling: SamplingParams,
        *,
        seed: int,
        recorder: EpisodeJournal | None = None,
        feed: Feed | None = None,
        max_chunks: int | None = None,
        on_turn: Callable[[Turn], None] | None = None,
        keep_turns: bool = True,
        limits: Limits = Limits(),
    ):
        self.task, self.tokenizer, self.window = task, tokenizer, client.window
        self.counters: Counter[str] = Counter(document_tokens=0, truncated_tokens=0)
        self.turns: list[Turn] = []
        self.rewards: dict[Key, float] = {}  # of single turns
        self.model = client.model
        self._client, self._sampling, self._seed = client, sampling, seed
        self._recorder, self._on_turn, self._keep_turns = recorder, on_turn, keep_turns
        self._feed = feed or Feed(task.context, tokenizer)
        self._max_chunks = max_chunks
        self._limits = limits
        self._chunks_read = 0
        self.waiting = 0  # calls that the model or an environment has not answered yet
        self._keys: set[Key] = set()
        self._said: dict[Any, tuple[Key, np.ndarray]] = {}  # replies that a later message may repeat, by `_said_as`
        self._environments: dict[int, ActingIn] = {}

    async def chat(
        self,
        prompt: Prompt | Sequence[Message] | str,
        *,
        max_tokens: int,
        kind: str = "turn",
        key: int | str | Key | None = None,
        chunk: Chunk | None = None,
        trained: bool = True,
        stop: tuple[str, ...] = (),
        temperature: float | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> Reply:
        """Call the model once.

        `kind` names the turn in traces and counters, `chunk` is what of the document the prompt shows, `notes` are JSON
        values to keep beside the reply. A turn that is not `trained` carries no loss, nor does one at another
        `temperature` than the episode's, which the learner divides by. Raises ValueError for a prompt that does not
        fit, for a `key` used twice and for too many calls, ClientError where the model could not be reached or failed.
        """
        if notes is not None:
            _check_json(notes, "the notes of a call")
        key = self._take_key(key)
        prompt = self._with_own_replies(_as_prompt(prompt))
        seed = derive_seed(self._seed, *key) >> 1  # services take signed 32-bit seeds
        params = replace(self._sampling, max_tokens=max_tokens, seed=seed, n=1, stop=stop or self._sampling.stop)
        if temperature is not None and temperature != params.temperature:
            params, trained = replace(params, temperature=temperature), False
            self.count("off_temperature_calls")
        if prompt.shared_parts:
            self._feed.wait_for_each_other()
        if self._recorder is not None:
            await asyncio.sleep(0)  # a replayed branch must not run ahead of its siblings
        digest, prompt_hash, completion = self._known(key, kind, prompt, params)
        replayed = completion is not None
        if completion is None:
            await self._refuse_to_start_over()
            try:
                completion = await self._complete(prompt, params)
            except ClientError:
                self.count("failed_calls")
                raise
        reply = Reply.of(completion, key, self.tokenizer.eos_ids)
        turn = Turn(key, kind, prompt, reply, chunk, trained, notes or {}, digest, prompt_hash, replayed)
        self._keep(turn)
        _LAST.set((self, reply))
        return reply

    def chunks(
        self,
        source: str | TextSource,
        tokens: int,
        *,
        tags: Sequence[str] = (),
        max_chunks: int | None = None,
    ) -> AsyncIterator[Chunk]:
        """One pass over a document in chunks of at most `tokens` tokens; every call starts another pass.

        `tags` are the tag names of the prompt, whose use in the document is escaped. With `max_chunks` a longer
        document loses its middle, which is counted as `truncated_tokens`. Leaving the loop early leaves the pass.
        """
        feed = self._feed if source is self.task.context else Feed(source, self.tokenizer)
        limit = min((n for n in (max_chunks, self._max_chunks) if n is not None), default=None)
        end = 0

        def count(chunk: Chunk) -> None:
            nonlocal end
            self._chunks_read += 1
            self.counters["document_tokens"] += len(chunk.ids)
            self.counters["truncated_tokens"] += chunk.start_token - end
            end = chunk.start_token + len(chunk.ids)
            if chunk.index + 1 == limit:  # which may have lost its middle
                self.counters["truncated_tokens"] += chunk.document_tokens - end

        return feed.read(self, tokens, tuple(tags), limit, count)

    def openai(self) -> EpisodeClient:
        """A client in the shape of the official AsyncOpenAI, whose calls are calls of this episode."""
        return EpisodeClient(self)

    def room(self, prompt: Prompt, most: int | None = None) -> int:
        """Tokens of a reply to a prompt: `most`, by default what the run's sampling allows, or what the window leaves.

        ValueError where it leaves nothing.
        """
        most = self._sampling.max_tokens if most is None else most
        if self.window is None:
            return most
        taken = len(self.tokenizer.render(self._with_own_replies(prompt).messages, tools=prompt.tools))
        if taken >= self.window:
            raise ValueError(
                f"the conversation has {taken} tokens, and the window of {self.model} holds {self.window}: make it "
                "shorter"
            )
        return min(most, self.window - taken)

    async def call(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """An outside effect, done once: `function(*args)` or, if it is a coroutine function, what it returns.

        Arguments and value are JSON values; a resumed episode takes the value from its journal.
        """
        key = self._take_key(None)
        await asyncio.sleep(0)
        digest = self._recorder.value_digest(key, name, args) if self._recorder else ""
        found = self._recorder.find_value(digest) if self._recorder else None
        if found is None:
            value = function(*args)
            found = (await value if asyncio.iscoroutine(value) else value,)
            _check_json(found[0], f"the value of {name}")
            replayed = False
        else:
            replayed = True
        if self._recorder:
            self._recorder.add_value(key, digest, name, found[0], replayed=replayed)
        return found[0]

    async def reset(self, environment: Environment, *, timeout: float = 60.0) -> Step:
        """Begin the task in an environment, which is closed when the episode ends; `timeout` is in seconds.

        Raises EnvironmentFailure where it hangs or dies: that is no fault of the agent's.
        """
        key = self._take_key(None)
        seed = derive_seed(self._seed, "environment", *key) >> 1
        acting = ActingIn(environment, self.task, seed, self._recorder)
        self._environments[id(environment)] = acting
        return await self._act(acting, key, None, timeout)

    async def step(
        self, environment: Environment, action: str, *, reply: Reply | None = None, timeout: float = 60.0
    ) -> Step:
        """Act in an environment and return what comes back; its reward goes to `reply`.

        That is by default the last reply of this asyncio task since it last gathered others. The action is on disk
        before the environment acts. A resumed episode takes what came back from its journal and repeats the actions
        only where it has to act again. Raises EnvironmentFailure as `reset` does.
        """
        if not isinstance(action, str):
            raise ValueError(f"an action is a str, got {action!r:.60}")
        if (acting := self._environments.get(id(environment))) is None:
            raise ValueError("this environment was not reset: await episode.reset(environment) before the first step")
        step = await self._act(acting, self._take_key(None), action, timeout)
        episode, last = _LAST.get()
        credited = reply or (last if episode is self else None)
        if step.reward and credited is not None:
            self.reward(credited, step.reward)
        return step

    async def _act(self, acting: ActingIn, key: Key, action: str | None, timeout: float) -> Step:
        await asyncio.sleep(0)
        self.waiting += 1
        try:
            async with acting.turn:
                return await self._act_in_turn(acting, key, action, timeout)
        except EnvironmentFailure:
            self.count("failed_calls")
            raise
        finally:
            self.waiting -= 1

    async def _act_in_turn(self, acting: ActingIn, key: Key, action: str | None, timeout: float) -> Step:
        digest, recorder = acting.digest(key, action), self._recorder
        if recorder is None:
            return await acting.act(action, timeout)
        known = acting.known(digest, action)
        if known is None:
            await self._refuse_to_start_over()
            self.count("environments_started_over", action is None and acting.starts_over(digest))
            await recorder.add_action(key, digest, acting.name, action)
        step = known or await acting.act(action, timeout)
        recorder.add_observation(key, digest, step, replayed=known is not None)
        return step

    async def gather(self, *coroutines: Coroutine[Any, Any, Result], width: int | None = None) -> list[Result]:
        """The results of coroutines run side by side, at most `width` at a time; the first failure cancels the rest."""
        here = self._here()
        gate = asyncio.Semaphore(width or len(coroutines) or 1)

        async def run(coroutine: Coroutine[Any, Any, Result], mark: _Mark) -> Result:
            mark.task = asyncio.current_task()
            _MARK.set(mark)
            async with gate:
                try:
                    return await coroutine
                except SystemExit as raised:  # in a task of its own it would stop the event loop
                    raise ValueError(f"the agent raised {raised!r}, which would end more than its episode") from raised

        tasks = [asyncio.ensure_future(run(coroutine, here.child())) for coroutine in coroutines]
        try:
            return await asyncio.gather(*tasks)
        finally:
            _LAST.set((self, None))  # those of the tasks are newer
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for coroutine in coroutines:  # one that never began
                coroutine.close()

    def random(self, key: str) -> random.Random:
        """A random generator of this episode's own, the same whenever the episode is driven again."""
        return random.Random(derive_seed(self._seed, "random", key))

    def count(self, name: str, n: int = 1) -> None:
        """Add to a counter of the trajectory."""
        self.counters[name] += n

    def reward(self, reply: Reply, value: float) -> None:
        """Give the turn of a reply a reward of its own; several add up.

        Training compares it with what the other samples of the task got at the same place (`objective.step_credit`).
        """
        if not isinstance(value, Real) or not math.isfinite(value):
            raise ValueError(f"a reward must be a finite number, got {value!r}")
        self.rewards[reply.key] = self.rewards.get(reply.key, 0.0) + float(value)

    async def leave(self) -> None:
        """Wait for nobody, let nobody wait for this episode, and close its environments."""
        self._feed.leave(self)
        for acting in self._environments.values():
            await acting.close()

    def _known(
        self, key: Key, kind: str, prompt: Prompt, params: SamplingParams
    ) -> tuple[str | None, str | None, Completion | None]:
        """The digest of a call and of its prompt, and the reply if the journal has it."""
        if self._recorder is None:
            return None, None, None
        digests, prompt_hash = self._recorder.digests(key, kind, prompt, params)
        for digest in digests:
            if (completion := self._recorder.find(digest)) is not None:
                if self._keep_turns and len(completion.token_ids):
                    ids = np.asarray(self.tokenizer.render(prompt.messages, tools=prompt.tools), np.int32)
                    completion = replace(completion, prompt_ids=ids)
                return digest, prompt_hash, completion
        return digests[0], prompt_hash, None

    async def _refuse_to_start_over(self) -> None:
        """JournalMismatch where the first calls of this drive find none of the lines of another run."""
        if self._recorder is None or not self._recorder.differs():
            return
        for _ in range(_SIBLINGS):  # calls made side by side with this one may still find theirs
            await asyncio.sleep(0)
        if differing := self._recorder.differs():
            raise JournalMismatch(differing)

    async def _complete(self, prompt: Prompt, params: SamplingParams) -> Completion:
        seconds = self._limits.call_seconds
        self.waiting += 1
        try:
            async with asyncio.timeout(seconds) as timeout:
                (completion,) = await self._client.complete(prompt, params)
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise ClientError(f"{self.model} gave no reply within limits.call_seconds = {seconds:g}") from error
        finally:
            self.waiting -= 1
        if completion.finish_reason in ("error", "cancelled"):
            ended = f"{self.model} ended the reply with {completion.finish_reason!r}"
            raise ClientError(completion.error or ended)
        if not np.isfinite(completion.logprobs).all():
            raise ClientError(
                f"{self.model} gave a log-probability that is not finite: its weights or cache are damaged"
            )
        return completion

    def _keep(self, turn: Turn) -> None:
        if self._recorder:
            self._recorder.add_turn(turn)
        completion = turn.reply.completion
        self.counters.update(
            model_calls=1,
            replayed_calls=int(turn.replayed),
            prompt_tokens=completion.prompt_tokens,
            cached_tokens=completion.cached_tokens,
            generated_tokens=completion.completion_tokens,
        )
        if len(completion.token_ids):
            said, at = _said_as(turn), len(turn.prompt.messages)
            self._said[said] = self._said[at, said] = turn.key, completion.token_ids
        if self._keep_turns:
            self.turns.append(turn)
        if self._on_turn:
            self._on_turn(turn)

    def _with_own_replies(self, prompt: Prompt) -> Prompt:
        """The prompt with assistant messages that repeat a reply, its text or its calls, as that reply's ids.

        Of equal replies it is the one that stood at that place.
        """

        def own(at: int, message: Message) -> Message:
            if message.role != "assistant" or not all(isinstance(part, str) for part in message.content):
                return message
            said: Any = "".join(map(str, message.content))
            if message.tool_calls:
                said = _calls_as(said, message.tool_calls)
            elif not message.content:
                return message
            found = self._said.get((at, said)) or self._said.get(said)
            if found is None:
                return message
            key, token_ids = found
            return Message("assistant", (Quote(without_end(token_ids, self.tokenizer.eos_ids), key),))

        return replace(prompt, messages=tuple(own(at, message) for at, message in enumerate(prompt.messages)))

    def _take_key(self, given: int | str | Key | None) -> Key:
        key = self._here().next() if given is None else given if isinstance(given, tuple) else (given,)
        if not key:
            raise ValueError("a key must not be empty")
        if key in self._keys:
            raise ValueError(f"the key {key!r} was used twice in one episode: give every call a key of its own")
        self._keys.add(key)
        if len(self._keys) > (most := self._limits.calls * (1 + self._chunks_read)):
            raise ValueError(
                f"the agent made more than {most} calls ({self._limits.calls}, and as many for each of the "
                f"{self._chunks_read} chunks that it read): let it stop, or raise limits.calls"
            )
        return key

    def _here(self) -> _Mark:
        """The mark of the running asyncio task; a task that asyncio started gets the next child of its parent's."""
        mark, task = _MARK.get(None), asyncio.current_task()
        if mark is None or mark.episode is not self:
            raise RuntimeError("an episode can be used only inside the agent that it was made for")
        if mark.task is not task:
            mark = mark.child()
            mark.task = task
            _MARK.set(mark)
        return mark

    def enter(self) -> Any:
        """Make the running task the root of the episode's keys; `run_episode` calls it."""
        return _MARK.set(_Mark(self, asyncio.current_task()))

    @staticmethod
    def exit(token: Any) -> None:
        """Undo `enter`."""
        _MARK.reset(token)


@dataclass
class _Mark:
    """Where an asyncio task stands in the tree of tasks below an episode."""

    episode: Episode
    task: asyncio.Task[Any] | None
    path: Key = ()
    calls: int = 0
    children: int = 0

    def next(self) -> Key:
        self.calls += 1
        return (*self.path, self.calls)

    def child(self) -> _Mark:
        self.children += 1
        return _Mark(self.episode, None, (*self.path, self.calls, self.children))


_MARK: ContextVar[_Mark | None] = ContextVar("memjax_episode_mark")
_LAST: ContextVar[tuple[Episode | None, Reply | None]] = ContextVar("memjax_last_reply", default=(None, None))


def key_order(key: Key) -> tuple[tuple[bool, int | str], ...]:
    """What keys are sorted by: a total order, numbers before strings."""
    return tuple((isinstance(part, str), part) for part in key)


def without_end(token_ids: np.ndarray, end_ids: Collection[int]) -> tuple[int, ...]:
    """The ids of a reply without the id that ended it."""
    ids = token_ids.tolist()
    return tuple(ids[:-1] if ids and ids[-1] in end_ids else ids)


def _said_as(turn: Turn) -> Any:
    """What a later message must say to be this reply: its text or, where it calls tools, its calls."""
    parsed = parse_tool_calls(turn.reply.text) if turn.prompt.tools else None
    return _calls_as(parsed.text, parsed.calls) if parsed and parsed.calls else turn.reply.text


def _calls_as(text: str, calls: Sequence[ToolCall]) -> Any:
    return text.strip(), tuple((call.name, _canonical(call.json)) for call in calls)


def _canonical(text: str) -> str:
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except ValueError:
        return text


def _check_json(value: Any, what: str) -> None:
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the journal keeps {what} as JSON, which {value!r:.200} is not ({error})") from None


def _as_prompt(prompt: Prompt | Sequence[Message] | str) -> Prompt:
    if isinstance(prompt, Prompt):
        return prompt
    messages = (Message("user", (prompt,)),) if isinstance(prompt, str) else tuple(prompt)
    for message in messages:
        if not isinstance(message, Message):
            raise ValueError(
                f"a prompt is a str, a Prompt or a list of Message, not of {type(message).__name__}: write "
                'Message("user", ("text",)) of memjax.rollout.client, or use episode.openai(), which takes dicts'
            )
    return Prompt(messages)
