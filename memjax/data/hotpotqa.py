"""Long contexts for multi-hop questions: a question's own paragraphs among distractors, to any length."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from memjax.data.corpus import Corpus, Documents, write_corpus
from memjax.data.lengths import TokenCounter, measure
from memjax.data.multihop import Example
from memjax.data.seeds import derive_seed, stream
from memjax.trajectory import Task

# What fills the last gap is looked for among this many distractors, again after each of a few that are too large.
_LAST_CANDIDATES = 512
_LAST_TRIES = 16


class Pool:
    """The distinct paragraphs of some examples as a corpus on disk, each counted in tokens at most once.

    Holds no text, only a fingerprint and a count for each paragraph.
    """

    def __init__(self, corpus: Corpus, tokenizer: TokenCounter):
        self.corpus = corpus
        self.tokenizer = tokenizer
        self._numbers = {_fingerprint(corpus[number]): number for number in range(len(corpus))}
        self._tokens: dict[int, int] = {}

    def number(self, paragraph: str) -> int:
        """The number of a paragraph. Raises KeyError for one that is not in the pool."""
        return self._numbers[_fingerprint(paragraph)]

    def tokens(self, number: int) -> int:
        """How many tokens a paragraph and the gap after it have by themselves."""
        if number not in self._tokens:
            self._tokens[number] = self.tokenizer.count(f"{self.corpus[number]}\n\n")
        return self._tokens[number]

    def heading_tokens(self, position: int) -> int:
        """How many tokens the line above the document at this position has."""
        return self.tokenizer.count(f"Document {position}:\n")


def write_pool(path: Path, examples: Iterable[Example]) -> None:
    """Write the paragraphs of the examples, sorted and without repeats, as a corpus."""
    write_corpus(path, sorted({text for example in examples for text in example.paragraphs}))


def apart(examples: Iterable[Example], held_out: Iterable[Example]) -> list[Example]:
    """The examples without any paragraph that `held_out` has; an example that would lose a supporting one is dropped.

    Paragraphs are compared by their text, title left aside.
    """
    taken = {_body(text) for example in held_out for text in example.paragraphs}
    kept: list[Example] = []
    for example in examples:
        if not any(_body(example.paragraphs[i]) in taken for i in example.supporting):
            kept.append(_without(example, taken))
    return kept


def split_examples(examples: Sequence[Example], eval_count: int, seed: int) -> tuple[list[Example], list[Example]]:
    """Examples for training and `eval_count` examples for evaluation that share no paragraph: see `apart`.

    Raises ValueError when there are too few examples.
    """
    if not 0 < eval_count < len(examples):
        raise ValueError(f"cannot set {eval_count} of {len(examples)} examples aside for evaluation")
    chosen = set(stream(seed, "split").sample(range(len(examples)), eval_count))
    held_out = [example for i, example in enumerate(examples) if i in chosen]
    return apart((example for i, example in enumerate(examples) if i not in chosen), held_out), held_out


def with_documents(example: Example, pool: Pool, count: int, seed: int) -> Task:
    """The example among `count` documents: its own paragraphs and distractors, in random order.

    Raises ValueError when the pool has fewer documents or there is no room for the supporting paragraphs.
    """
    needed = len(set(example.supporting))
    if not needed <= count <= len(pool.corpus):
        raise ValueError(
            f"{count} documents were asked for; {example.id} needs at least {needed}, and the pool has "
            f"{len(pool.corpus)}: change the number, or add files with distractors"
        )
    rng = stream(seed, "documents")
    must, may = _own(example, pool, rng)
    chosen = [*must, *may, *_distractors([*must, *may], pool, rng)][:count]
    return _task(example, pool, chosen, seed, answer_tokens=0)


def with_length(example: Example, pool: Pool, length: int, seed: int, *, answer_tokens: int = 0) -> Task:
    """The example in a context of at most `length` tokens, question and `answer_tokens` included, and at most 1 % less.

    Raises ValueError when the supporting paragraphs do not fit or the pool is used up before the length is reached.
    """
    room = length - pool.tokenizer.count(example.question) - answer_tokens
    while True:
        chosen = _choose(example, pool, room, stream(seed, "documents"))
        task = _task(example, pool, chosen, seed, answer_tokens)
        excess = task.extra["length"] - length
        if excess <= 0:
            break
        room -= excess  # the text as a whole has more tokens than its documents one by one
    if excess < -(length // 100) and len(chosen) == len(pool.corpus):
        raise ValueError(
            f"all {len(pool.corpus)} documents of the pool make {task.extra['length']} tokens, but {length} were asked "
            f"for: add files with distractors or ask for a shorter context"
        )
    return task


def _choose(example: Example, pool: Pool, room: int, rng: random.Random) -> list[int]:
    """Supporting paragraphs, then the other own ones, then distractors, as many as fit; the last one fills the gap."""
    must, may = _own(example, pool, rng)
    used = sum(pool.tokens(number) for number in must) + sum(map(pool.heading_tokens, range(1, len(must) + 1)))
    if used > room:
        raise ValueError(
            f"the supporting paragraphs of {example.id} take {used} tokens, but there is room for {room}: "
            f"ask for a longer context"
        )
    chosen = list(must)
    tries = 0
    candidates = may + _distractors([*must, *may], pool, rng)
    for place, number in enumerate(candidates):
        heading = pool.heading_tokens(len(chosen) + 1)
        if used + heading + pool.tokens(number) <= room:
            used += heading + pool.tokens(number)
            chosen.append(number)
        elif place >= len(may):
            gap = room - used - heading
            last = _closest(candidates[place : place + _LAST_CANDIDATES], pool, gap)
            tries += 1
            if gap - sum(map(pool.tokens, last)) <= room // 250 or tries == _LAST_TRIES:
                return chosen + last
    return chosen


def _closest(candidates: Sequence[int], pool: Pool, room: int) -> list[int]:
    """The candidate that leaves the least of the room unused, if any fits."""
    fitting = [number for number in candidates if pool.tokens(number) <= room]
    return [max(fitting, key=pool.tokens)] if fitting else []


def _own(example: Example, pool: Pool, rng: random.Random) -> tuple[list[int], list[int]]:
    """The example's supporting paragraphs and its other ones, each once; the others in random order."""
    must = _supporting(example, pool)
    may = [number for number in dict.fromkeys(map(pool.number, example.paragraphs)) if number not in must]
    rng.shuffle(may)
    return must, may


def _supporting(example: Example, pool: Pool) -> list[int]:
    return list(dict.fromkeys(pool.number(example.paragraphs[i]) for i in example.supporting))


def _distractors(own: Sequence[int], pool: Pool, rng: random.Random) -> list[int]:
    """All other documents of the pool in random order."""
    taken = set(own)
    others = [number for number in range(len(pool.corpus)) if number not in taken]
    rng.shuffle(others)
    return others


def _task(example: Example, pool: Pool, chosen: Sequence[int], seed: int, answer_tokens: int) -> Task:
    order = list(chosen)
    stream(seed, "order").shuffle(order)
    context = Documents(pool.corpus, tuple(order))
    context_tokens = measure(context.pieces(), pool.tokenizer)
    own = set(map(pool.number, example.paragraphs))
    extra = {
        "seed": seed,
        "num_docs": len(order),
        "context_tokens": context_tokens,
        "length": context_tokens + pool.tokenizer.count(example.question) + answer_tokens,
        "own": [position for position, number in enumerate(order, start=1) if number in own],
        "evidence": _evidence(example, pool, context),
    }
    return Task(example.id, example.question, context, example.answers, extra={**example.extra, **extra})


def _evidence(example: Example, pool: Pool, context: Documents) -> list[dict[str, int | str]]:
    """Where the supporting documents stand: position, characters [start, end), and the token near which each starts.

    Tokens are counted document by document; in the whole text the count may differ by a few.
    """
    supporting = set(_supporting(example, pool))
    found: list[dict[str, int | str]] = []
    chars = tokens = 0
    for position, (number, piece) in enumerate(zip(context.numbers, context.pieces(), strict=True), start=1):
        chars += len(piece)
        tokens += pool.heading_tokens(position)
        if number in supporting:
            text = pool.corpus[number]
            title = text.partition("\n")[0]
            place = {"start": chars - len(text), "end": chars, "token": tokens}
            found.append({"document": position, "title": title, **place})
        tokens += pool.tokens(number)
    return found


def _without(example: Example, taken: set[str]) -> Example:
    kept = [i for i, text in enumerate(example.paragraphs) if _body(text) not in taken]
    return replace(
        example,
        paragraphs=tuple(example.paragraphs[i] for i in kept),
        supporting=tuple(kept.index(i) for i in example.supporting),
    )


def _fingerprint(paragraph: str) -> bytes:
    return hashlib.blake2b(paragraph.encode(), digest_size=16).digest()


def _body(paragraph: str) -> str:
    """The text of a paragraph without its title, white space normalised."""
    return " ".join(paragraph.partition("\n")[2].split())


def sample_seed(seed: int, example: Example, length: int) -> int:
    """The seed of one sample: the same question at another length gets other distractors and another order."""
    return derive_seed(seed, "multihop", example.id, length)
