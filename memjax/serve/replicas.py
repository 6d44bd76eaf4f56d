"""Several engines behind one server: a Ray actor for each group of devices, and the pool that spreads prompts.

A prompt goes to the replica with the fewest samples under way. A replica that dies, or whose engine does, is replaced,
and its prompts are drawn again elsewhere: a seed gives the same tokens anywhere, so those that a client has already are
compared and left out. Where they differ, after other weights were loaded, the request fails instead.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from memjax.rollout.client import ClientError, Prompt
from memjax.rollout.scheduler import ANYONE, Caller, Counters, OnToken, TokenEvent
from memjax.serve.backend import load_client
from memjax.serve.settings import ServeSettings
from memjax.tokenizer import Tokenizer
from memjax.trajectory import Completion, SamplingParams

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_ATTEMPTS = 3  # replicas that may die under one prompt
_STATUS_SECONDS = 2.0
_RESTART_SECONDS = 5.0  # between two tries to start a replica


@dataclass(frozen=True)
class Status:
    """How a replica stands."""

    model: str
    window: int
    slots: int
    running: int = 0
    compilations: int = 0
    weights_version: int = 0
    counters: Counters = field(default_factory=Counters)


class Replica:
    """The actor: one engine on the devices that Ray gave it."""

    async def load(self, settings: ServeSettings) -> None:
        """Load the model. Not in the constructor, whose errors would come as the death of the actor."""
        self._client = await asyncio.to_thread(load_client, settings)

    async def warm_up(self) -> None:
        """Compile every program."""
        await asyncio.to_thread(self._client.warm_up)

    async def status(self) -> Status:
        """How it stands. An actor whose engine is dead ends: what asked sees that, and starts another."""
        client = self._client
        if client.failure:
            _end_process()
        return Status(
            client.model,
            client.window,
            client.slots,
            client.running,
            client.compilations,
            client.weights_version,
            replace(client.counters),
        )

    async def load_weights(self, directory: Path, version: int) -> None:
        """Run other weights."""
        await self._client.load_weights(directory, version)

    async def generate(
        self, ids: Sequence[int], params: SamplingParams, shared: int, caller: Caller
    ) -> AsyncIterator[list[TokenEvent] | list[Completion]]:
        """The tokens of a prompt as they come, all that there are at a time, and at last its completions."""
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        events: list[TokenEvent] = []

        def take(event: TokenEvent) -> None:
            events.append(event)
            loop.call_soon_threadsafe(arrived.set)

        future: Future[list[Completion]] = self._client.submit(ids, params, shared=shared, on_token=take, caller=caller)
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(arrived.set))
        try:
            while not future.done():
                await arrived.wait()
                arrived.clear()
                if taken := events[:]:
                    del events[: len(taken)]
                    yield taken
            if events:
                yield events
            yield future.result()
        except ClientError:
            if self._client.failure:
                _end_process()
            raise
        finally:
            future.cancel()


def _end_process() -> None:
    """End this actor at once: its engine is dead, and whoever waits for it is to ask another."""
    log.error("the engine of this replica is dead")
    os._exit(1)


@dataclass(eq=False)
class _Place:
    """A living replica, how it stood last, and the samples that are under way on it."""

    actor: Any
    status: Status
    samples: int = 0


class ReplicaPool:
    """A backend over `settings.replicas` engines, from construction, which loads them, to `close`.

    It works on an event loop in a thread of its own; its methods may be called from any thread.
    """

    def __init__(self, settings: ServeSettings):
        self._settings = settings
        self._places: list[_Place] = []
        self._past = Counters()  # what the replicas that are gone had done
        self._refused: str | None = None  # why no other could be started when none was left
        self._source: tuple[Path, int] | None = None  # of other weights than those that a replica begins with
        self._started_ray = _connect(settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="memjax-replicas", daemon=True)
        self._thread.start()
        self._warm = False
        self._tasks: set[asyncio.Task[None]] = set()
        try:
            self._call(self._load()).result()
        except BaseException:
            self._end()
            raise
        self.tokenizer = Tokenizer.load(settings.model)
        first = self._places[0].status
        self.model, self.window, self.slots = first.model, first.window, first.slots * settings.replicas

    @property
    def running(self) -> int:
        """Slots in use, as the replicas told last."""
        return sum(place.status.running for place in self._places)

    @property
    def failure(self) -> str | None:
        """Why no replica is alive, once starting another has failed. It is tried again, and may pass."""
        return self._refused

    @property
    def counters(self) -> Counters:
        """What all replicas have done, as they told last."""
        total = self._past
        for place in self._places:
            total = _sum(total, place.status.counters)
        return total

    @property
    def compilations(self) -> int:
        """Programs that a replica compiled after its warm-up."""
        return sum(place.status.compilations for place in self._places)

    @property
    def weights_version(self) -> int:
        """Of the weights that run everywhere."""
        return self._source[1] if self._source else 0

    @property
    def replicas(self) -> int:
        """How many are alive."""
        return len(self._places)

    def warm_up(self) -> None:
        """Compile every program on every replica."""
        self._call(self._warm_up()).result()

    def submit(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        *,
        shared: int = 0,
        on_token: OnToken | None = None,
        caller: Caller = ANYONE,
    ) -> Future[list[Completion]]:
        """Queue a prompt. What cannot fit is told by the future."""
        params = replace(params, seed=secrets.randbits(32) if params.seed is None else params.seed)
        return self._call(self._complete(_Request(list(ids), params, shared, on_token, caller)))

    async def complete(
        self, prompt: Prompt, params: SamplingParams, on_token: OnToken | None = None, caller: Caller = ANYONE
    ) -> list[Completion]:
        """Draw `params.n` completions."""
        rendered = self.tokenizer.render_prompt(prompt)
        future = self.submit(rendered.ids, params, shared=rendered.shared, on_token=on_token, caller=caller)
        return await asyncio.wrap_future(future)

    async def load_weights(self, directory: Path, version: int | None = None) -> int:
        """Run other weights on every replica, and on those that are started later."""
        version = self.weights_version + 1 if version is None else version
        await asyncio.wrap_future(self._call(self._swap(directory, version)))
        return version

    async def close(self) -> None:
        """Fail what is under way and let go of the replicas."""
        await asyncio.to_thread(self._end)

    # -- in the thread of the pool

    def _call(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _load(self) -> None:
        self._changed = asyncio.Condition()
        actors = [self._actor() for _ in range(self._settings.replicas)]
        try:
            await asyncio.gather(*(actor.load.remote(self._settings) for actor in actors))
            self._places = [_Place(actor, await actor.status.remote()) for actor in actors]
        except RayTaskError as error:  # a model that one cannot load is told like one that cannot be loaded here
            raise _cause(error) from None
        except RayError as error:
            raise ClientError(f"a replica could not be started: {error}") from None
        self._spawn(self._watch())

    async def _warm_up(self) -> None:
        await asyncio.gather(*(place.actor.warm_up.remote() for place in self._places))
        self._warm = True

    async def _complete(self, request: _Request) -> list[Completion]:
        for _ in range(_ATTEMPTS):
            place = await self._least_loaded()
            place.samples += request.params.n
            try:
                return await self._draw(place, request)
            except RayTaskError as error:  # the replica lives: what it says would be said anywhere
                raise _cause(error) from None
            except RayActorError as error:
                self._lose(place, error)
            finally:
                place.samples -= request.params.n
        raise ClientError(
            f"{_ATTEMPTS} replicas died while they worked on this request: ask again, or look into the log"
        )

    async def _least_loaded(self) -> _Place:
        async with self._changed:
            await self._changed.wait_for(lambda: self._places or self._refused)
        if self._refused:  # then there is no place
            raise ClientError(self._refused)
        return min(self._places, key=lambda place: place.samples)

    async def _draw(self, place: _Place, request: _Request) -> list[Completion]:
        stream = place.actor.generate.options(num_returns="streaming").remote(
            request.ids, request.params, request.shared, request.caller
        )
        drawn = _Drawn(request)
        try:
            async for reference in stream:
                message = await reference
                if isinstance(message[0], Completion):
                    return message
                for event in message:
                    drawn.take(event)
        except asyncio.CancelledError:
            ray.cancel(stream)
            raise
        raise ClientError("a replica ended its reply before its end")

    def _lose(self, place: _Place, error: RayError) -> None:
        if place not in self._places:
            return
        self._places.remove(place)
        self._past = _sum(self._past, place.status.counters)
        log.error("a replica is lost, %d left; another is started: %s", len(self._places), error)
        ray.kill(place.actor)
        self._spawn(self._replace())

    async def _replace(self) -> None:
        while True:
            actor = self._actor()
            try:
                await actor.load.remote(self._settings)
                if self._warm:
                    await actor.warm_up.remote()
                source = None
                while source != self._source and (source := self._source):
                    await actor.load_weights.remote(*source)
                place = _Place(actor, await actor.status.remote())
            except RayError as error:
                log.error("a replica could not be started, it is tried again: %s", error)
                ray.kill(actor)
                if not self._places:
                    await self._tell(f"no replica is alive, and another could not be started: {_cause(error)}")
                await asyncio.sleep(_RESTART_SECONDS)
                continue
            self._places.append(place)
            await self._tell(None)
            log.info("a replica was started, %d are alive", len(self._places))
            return

    async def _tell(self, refused: str | None) -> None:
        """Wake who waits for a replica."""
        self._refused = refused
        async with self._changed:
            self._changed.notify_all()

    async def _swap(self, directory: Path, version: int) -> None:
        first, *rest = self._places
        try:
            await first.actor.load_weights.remote(directory, version)
        except RayTaskError as error:
            raise _cause(error) from None
        self._source = directory, version
        for place in rest:
            try:
                await place.actor.load_weights.remote(directory, version)
            except RayError as error:  # it runs other weights than the first: one that runs them takes its place
                self._lose(place, error)

    async def _watch(self) -> None:
        while True:
            for place in list(self._places):
                try:
                    place.status = await place.actor.status.remote()
                except RayError as error:
                    self._lose(place, error)
            await asyncio.sleep(_STATUS_SECONDS)

    def _actor(self) -> Any:
        return ray.remote(Replica).options(**_share(self._settings)).remote()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _end(self) -> None:
        async def cancel_all() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self._call(cancel_all()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for place in self._places:
            with suppress(RayError):
                ray.kill(place.actor)
        if self._started_ray:
            ray.shutdown()


@dataclass
class _Request:
    ids: list[int]
    params: SamplingParams
    shared: int
    on_token: OnToken | None
    caller: Caller
    given: dict[int, list[int]] = field(default_factory=dict)  # the ids that the client has, by sample


class _Drawn:
    """The tokens of one try at a request: those that the client has from an earlier try are not given again."""

    def __init__(self, request: _Request):
        self._request = request
        self._counts: dict[int, int] = {}

    def take(self, event: TokenEvent) -> None:
        """Give a token on; ClientError where it is not the one that the client has."""
        given = self._request.given.setdefault(event.sample, [])
        at = self._counts.get(event.sample, 0)
        self._counts[event.sample] = at + 1
        if at < len(given):
            if given[at] != event.token_id:
                raise ClientError("the replica that drew this reply died, and another draws a different one: ask again")
            return
        given.append(event.token_id)
        if self._request.on_token:
            self._request.on_token(event)


def _connect(settings: ServeSettings) -> bool:
    """Join the cluster of RAY_ADDRESS, or start one on this machine, and say whether this process did so.

    Raises ValueError where the replicas do not fit its devices.
    """
    begun = not ray.is_initialized()
    if begun:
        # `uv run` would otherwise make every worker build the environment anew.
        os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        ray.init(os.environ.get("RAY_ADDRESS", "local"), logging_level=logging.WARNING)
    wanted, held = settings.replicas * settings.tensor, ray.cluster_resources()
    for kind in ("GPU", "TPU"):
        if kind in held and held[kind] < wanted:
            raise ValueError(
                f"{settings.replicas} replicas over {settings.tensor} devices each need {wanted} {kind}s, "
                f"the cluster has {held[kind]:g}: lower replicas or tensor"
            )
    return begun


def _share(settings: ServeSettings) -> dict[str, Any]:
    """What Ray reserves for a replica: a group of accelerators, or nothing where there are none."""
    held = ray.cluster_resources()
    if "GPU" in held:
        return {"num_cpus": 0, "num_gpus": settings.tensor}
    if "TPU" in held:
        return {"num_cpus": 0, "resources": {"TPU": settings.tensor}}
    return {"num_cpus": 0}


def _cause(error: RayError) -> Exception:
    """What a replica itself raised; where it raised nothing, the error of Ray."""
    if not isinstance(error, RayTaskError):
        return error
    return error.cause if isinstance(error.cause, ValueError | ClientError) else ClientError(str(error.cause))


def _sum(one: Counters, other: Counters) -> Counters:
    return Counters(**{part.name: getattr(one, part.name) + getattr(other, part.name) for part in fields(Counters)})
