"""Long contexts for multi-hop questions: a question's own paragraphs among distractors, to any length."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from memjax.data.lengths import TokenCounter, measure
from memjax.data.multihop import Example
from memjax.data.seeds import derive_seed, stream
from memjax.trajectory import Task

_GAP = "\n\n"  # between two documents
_LAST_CANDIDATES = 512  # distractors looked through for the one that fills the remaining gap best


@dataclass(frozen=True)
class DocumentsText:
    """Numbered documents of a pool, rendered while they are read."""

    name: str
    documents: Sequence[str]
    order: tuple[int, ...]  # indices into documents

    def pieces(self) -> Iterator[str]:
        """Yield one document at a time."""
        for number, index in enumerate(self.order, start=1):
            yield f"{_GAP if number > 1 else ''}{header(number)}{self.documents[index]}"


def header(number: int) -> str:
    """The line above the text of document `number`, counted from 1."""
    return f"Document {number}:\n"


class Pool:
    """The distinct paragraphs of some examples in a fixed order, each counted in tokens at most once."""

    def __init__(self, examples: Iterable[Example], tokenizer: TokenCounter):
        self.documents = tuple(sorted({text for example in examples for text in example.paragraphs}))
        self._index = {text: i for i, text in enumerate(self.documents)}
        self._tokens: dict[int, int] = {}
        self.tokenizer = tokenizer

    def index(self, text: str) -> int:
        """The index of a paragraph. Raises KeyError for one that is not in the pool."""
        return self._index[text]

    def tokens(self, index: int) -> int:
        """How many tokens a paragraph and the gap after it have by themselves."""
        if index not in self._tokens:
            self._tokens[index] = self.tokenizer.count(self.documents[index] + _GAP)
        return self._tokens[index]


@dataclass(frozen=True)
class Split:
    """Examples for training and for evaluation that share no paragraph."""

    train: list[Example]
    eval: list[Example]
    dropped: int  # examples in neither: a supporting paragraph is in both


def split_examples(examples: Sequence[Example], eval_count: int, seed: int) -> Split:
    """Draw `eval_count` examples for evaluation and take every paragraph of theirs away from the others.

    Training examples lose distractors that way; one that would lose a supporting paragraph is dropped. Paragraphs are
    compared by text, title left aside. Raises ValueError when there are too few examples.
    """
    if not 0 < eval_count < len(examples):
        raise ValueError(f"cannot set {eval_count} of {len(examples)} examples aside for evaluation")
    chosen = set(stream(seed, "split").sample(range(len(examples)), eval_count))
    held_out = [example for i, example in enumerate(examples) if i in chosen]
    taken = {_body(text) for example in held_out for text in example.paragraphs}
    train: list[Example] = []
    for i, example in enumerate(examples):
        if i not in chosen and not any(_body(example.paragraphs[k]) in taken for k in example.supporting):
            train.append(_without(example, taken))
    return Split(train, held_out, dropped=len(examples) - len(train) - len(held_out))


def with_documents(example: Example, pool: Pool, count: int, seed: int) -> Task:
    """The example among `count` documents: its own paragraphs and distractors, in random order.

    Raises ValueError when the pool has fewer documents or there is no room for the supporting paragraphs.
    """
    needed = len(example.supporting)
    if not needed <= count <= len(pool.documents):
        raise ValueError(
            f"{count} documents were asked for; {example.id} needs at least {needed}, and the pool has "
            f"{len(pool.documents)}: change the number, or add files with distractors"
        )
    rng = stream(seed, "documents")
    must, may = _own(example, pool, rng)
    chosen = [*must, *may][:count]
    chosen += _distractors(chosen, pool, rng)[: count - len(chosen)]
    return _task(example, pool, chosen, rng, seed, answer_tokens=0)


def with_length(example: Example, pool: Pool, length: int, seed: int, *, answer_tokens: int = 0) -> Task:
    """The example in a context of at most `length` tokens, question and `answer_tokens` included, and at most 1 % less.

    Raises ValueError when the supporting paragraphs do not fit or the pool is used up before the length is reached.
    """
    budget = length - pool.tokenizer.count(example.question) - answer_tokens
    allowed = budget  # lowered when the text as a whole has more tokens than its documents one by one
    for _ in range(8):
        rng = stream(seed, "documents")
        chosen = _choose(example, pool, allowed, rng)
        task = _task(example, pool, chosen, rng, seed, answer_tokens)
        if task.extra["length"] <= length:
            break
        allowed -= task.extra["length"] - length + 1
    else:
        raise ValueError(f"{example.id} cannot be brought under {length} tokens: ask for a longer context")
    if task.extra["length"] < length - length // 100 and len(chosen) == len(pool.documents):
        raise ValueError(
            f"all {len(pool.documents)} documents of the pool make {task.extra['length']} tokens, but {length} were "
            f"asked for: add files with distractors or ask for a shorter context"
        )
    return task


def _choose(example: Example, pool: Pool, budget: int, rng: random.Random) -> list[int]:
    """Supporting paragraphs, then the other own ones, then distractors, as many as fit; the last one fills the gap."""
    must, may = _own(example, pool, rng)
    chosen: list[int] = []
    used = 0

    def cost(index: int) -> int:
        return pool.tokens(index) + pool.tokenizer.count(header(len(chosen) + 1))

    for index in must:
        used += cost(index)
        chosen.append(index)
    if used > budget:
        raise ValueError(
            f"the supporting paragraphs of {example.id} take {used} tokens, but there is room for {budget}: "
            f"ask for a longer context"
        )
    candidates = may + _distractors([*must, *may], pool, rng)
    for place, index in enumerate(candidates):
        if used + cost(index) > budget and place >= len(may):
            chosen += _closest(candidates[place : place + _LAST_CANDIDATES], pool, budget - used, len(chosen))
            break
        if used + cost(index) <= budget:
            used += cost(index)
            chosen.append(index)
    return chosen


def _closest(candidates: Sequence[int], pool: Pool, room: int, count: int) -> list[int]:
    """The candidate that leaves the least of the room unused, if any fits."""
    room -= pool.tokenizer.count(header(count + 1))
    fitting = [index for index in candidates if pool.tokens(index) <= room]
    return [max(fitting, key=pool.tokens)] if fitting else []


def _own(example: Example, pool: Pool, rng: random.Random) -> tuple[list[int], list[int]]:
    """The example's supporting paragraphs and its other ones, each once; the others in random order."""
    must = list(dict.fromkeys(pool.index(example.paragraphs[i]) for i in example.supporting))
    may = [index for index in dict.fromkeys(map(pool.index, example.paragraphs)) if index not in must]
    rng.shuffle(may)
    return must, may


def _distractors(own: Sequence[int], pool: Pool, rng: random.Random) -> list[int]:
    """All other documents of the pool in random order."""
    taken = set(own)
    others = [index for index in range(len(pool.documents)) if index not in taken]
    rng.shuffle(others)
    return others


def _task(
    example: Example, pool: Pool, chosen: Sequence[int], rng: random.Random, seed: int, answer_tokens: int
) -> Task:
    order = list(chosen)
    rng.shuffle(order)
    context = DocumentsText(example.id, pool.documents, tuple(order))
    context_tokens = measure(context.pieces(), pool.tokenizer)
    extra = {
        "seed": seed,
        "num_docs": len(order),
        "context_tokens": context_tokens,
        "length": context_tokens + pool.tokenizer.count(example.question) + answer_tokens,
        "own": sorted(
            order.index(pool.index(text)) + 1 for text in set(example.paragraphs) if pool.index(text) in order
        ),
        "evidence": _evidence(example, pool, context),
    }
    return Task(example.id, example.question, context, example.answers, extra={**example.extra, **extra})


def _evidence(example: Example, pool: Pool, context: DocumentsText) -> list[dict[str, int | str]]:
    """Where the supporting documents stand: number, characters [start, end), and the token near which each starts.

    Tokens are counted document by document; in the whole text the count may differ by a few.
    """
    supporting = {pool.index(example.paragraphs[i]) for i in example.supporting}
    found: list[dict[str, int | str]] = []
    chars = tokens = 0
    for number, index in enumerate(context.order, start=1):
        head, text = header(number), pool.documents[index]
        chars += len(head)
        tokens += pool.tokenizer.count(head)
        if index in supporting:
            title = text.partition("\n")[0]
            found.append({"document": number, "title": title, "start": chars, "end": chars + len(text), "token": tokens})
        chars += len(text) + len(_GAP)
        tokens += pool.tokens(index)
    return found


def _without(example: Example, taken: set[str]) -> Example:
    kept = [i for i, text in enumerate(example.paragraphs) if _body(text) not in taken]
    return Example(
        id=example.id,
        question=example.question,
        answers=example.answers,
        paragraphs=tuple(example.paragraphs[i] for i in kept),
        supporting=tuple(kept.index(i) for i in example.supporting),
        extra=example.extra,
    )


def _body(paragraph: str) -> str:
    """The text of a paragraph without its title, white space normalised."""
    return " ".join(paragraph.partition("\n")[2].split())


def sample_seed(seed: int, example: Example, length: int) -> int:
    """The seed of one sample: the same question at another length gets other distractors and another order."""
    return derive_seed(seed, "multihop", example.id, length)
