"""Driving agents in tests: a byte tokenizer, a scripted model, and a journal where one is wanted."""

from __future__ import annotations

from memjax.episodes.journal import EpisodeJournal, Journal
from memjax.episodes.run import run_episode
from memjax.rollout.fake import ByteTokenizer, ScriptedClient
from memjax.rollout.identity import ModelIdentity
from memjax.trajectory import SamplingParams, Task

TOKENIZER = ByteTokenizer()
MODEL = ModelIdentity("scripted", weights="w", dtype="float32", tokenizer="bytes")
GREEDY = SamplingParams(temperature=0.0, seed=1)


def task(context="", question="What is the code?", **fields):
    return Task("t", question, context, group="g", **fields)


async def drive(agent, given, client, *, sampling=GREEDY, **options):
    return await run_episode(agent, given, client, TOKENIZER, sampling, **options)


async def drive_with(path, agent, given, client, *, name="0", model=MODEL, fresh=False, **options):
    """Drive once, with the journal at `path`."""
    with Journal(path, fresh=fresh) as journal:
        return await drive(agent, given, client, journal=EpisodeJournal(journal, name, model, TOKENIZER), **options)


def echo(prompt, params):
    """A reply that depends on every word of the prompt and on the seed."""
    import hashlib

    return hashlib.sha256(f"{params.seed} {prompt}".encode()).hexdigest()[:20]


def scripted(reply=echo, **options):
    return ScriptedClient(reply, **options)
