"""Question answering sets with their paragraphs: HotpotQA, 2WikiMultihopQA, MuSiQue and SQuAD as published."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from memjax.data.corpus import hotpot_documents
from memjax.data.json_rows import read_rows


@dataclass(frozen=True)
class Example:
    """One question with the paragraphs that its data set gives it.

    A paragraph is its title, a line end and its text. `supporting` are the indices of the paragraphs that hold the
    answer; the others are the data set's own distractors.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    paragraphs: tuple[str, ...]
    supporting: tuple[int, ...]
    extra: Mapping[str, Any] = field(default_factory=dict)


Format = Literal["hotpotqa", "2wiki", "musique", "squad"]


def read_examples(path: Path, kind: Format) -> list[Example]:
    """Read a file as its authors publish it, plain or .gz.

    Questions that have no answer in their paragraphs (SQuAD 2, full MuSiQue) are left out. Raises ValueError that names
    the file and the record for anything malformed, for duplicate ids and for a file without questions.
    """
    examples: dict[str, Example] = {}
    for place, record in read_rows(path):
        try:
            found = list(_PARSERS[kind](record))
        except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"{place} is not {kind} ({reason}); check the file and its format") from error
        for example in found:
            if example.id in examples:
                raise ValueError(f"{place} repeats the id {example.id!r}; every question needs its own")
            examples[example.id] = example
    if not examples:
        raise ValueError(f"{path} holds no answerable question in the {kind} format")
    return list(examples.values())


def _parse_hotpotqa(record: Mapping[str, Any]) -> Iterator[Example]:
    """HotpotQA and 2WikiMultihopQA: context [[title, [sentences]]], supporting_facts [[title, sentence]]."""
    titles = [title for title, _ in record["context"]]
    supporting = {title for title, _ in record["supporting_facts"]}
    yield Example(
        id=_text(record["_id"]),
        question=_text(record["question"]),
        answers=(_text(record["answer"]),),
        paragraphs=tuple(hotpot_documents(record)),
        supporting=tuple(i for i, title in enumerate(titles) if title in supporting),
        extra={name: record[name] for name in ("type", "level") if name in record},
    )


def _parse_musique(record: Mapping[str, Any]) -> Iterator[Example]:
    """MuSiQue: paragraphs [{title, paragraph_text, is_supporting}], an answer with aliases."""
    if not record.get("answerable", True):
        return
    paragraphs = record["paragraphs"]
    yield Example(
        id=_text(record["id"]),
        question=_text(record["question"]),
        answers=tuple(dict.fromkeys(map(_text, (record["answer"], *record.get("answer_aliases", ()))))),
        paragraphs=tuple(f"{item['title']}\n{item['paragraph_text']}" for item in paragraphs),
        supporting=tuple(i for i, item in enumerate(paragraphs) if item["is_supporting"]),
        extra={"hops": len(record["question_decomposition"])} if "question_decomposition" in record else {},
    )


def _parse_squad(record: Mapping[str, Any]) -> Iterator[Example]:
    """SQuAD: each question comes with its paragraph and, as distractors, the other paragraphs of the article."""
    for article in record["data"]:
        paragraphs = tuple(f"{article['title']}\n{item['context']}" for item in article["paragraphs"])
        for index, item in enumerate(article["paragraphs"]):
            for question in item["qas"]:
                if not question.get("is_impossible", False):
                    yield Example(
                        id=_text(question["id"]),
                        question=_text(question["question"]),
                        answers=tuple(dict.fromkeys(_text(answer["text"]) for answer in question["answers"])),
                        paragraphs=paragraphs,
                        supporting=(index,),
                    )


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"expected a text that is not empty, got {value!r}")
    return value


_PARSERS: Mapping[Format, Callable[[Any], Iterator[Example]]] = {
    "hotpotqa": _parse_hotpotqa,
    "2wiki": _parse_hotpotqa,
    "musique": _parse_musique,
    "squad": _parse_squad,
}
