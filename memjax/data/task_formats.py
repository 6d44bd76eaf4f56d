"""Rows of other projects' task files as tasks: RULER, MemAgent, HotpotQA, SQuAD and GSM8K."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from memjax.data.corpus import Corpus, Documents, hotpot_documents, numbered
from memjax.trajectory import Task, TextSource

_RULER_TASK = re.compile(r"(?<![a-z])(niah|vt|cwe|fwe|qa)(?![a-z])")
_QUESTION = re.compile(r"^Question:", re.MULTILINE)


def squad(row: Mapping[str, Any]) -> Iterator[Task]:
    """Tasks of SQuAD's original JSON (1.1 and 2.0): a paragraph each; questions without an answer are left out."""
    for article in row["data"]:
        for paragraph in article["paragraphs"]:
            for qa in paragraph["qas"]:
                if not qa.get("is_impossible", False):
                    yield Task(
                        id=qa["id"],
                        question=qa["question"],
                        context=paragraph["context"],
                        answers=tuple(dict.fromkeys(answer["text"] for answer in qa["answers"])),
                        metric="f1",
                        extra={"title": article["title"]},
                    )


def hotpotqa(row: Mapping[str, Any]) -> Task:
    """The task of an example of HotpotQA (or 2WikiMultihopQA, which has its form).

    `extra["evidence"]` says where the supporting documents stand: number from 1, title, characters [start, end).
    """
    documents = hotpot_documents(row)
    supporting = {title for title, _ in row["supporting_facts"]}
    context, evidence = "", []
    for number, piece in enumerate(numbered(documents), start=1):
        context += piece
        document = documents[number - 1]
        title = document.partition("\n")[0]
        if title in supporting:
            place = {"start": len(context) - len(document), "end": len(context)}
            evidence.append({"document": number, "title": title, **place})
    return Task(
        id=row["_id"],
        question=row["question"],
        context=context,
        answers=(row["answer"],),
        metric="hotpot_f1",
        extra={**_rest(row, "_id", "question", "context", "answer"), "evidence": evidence},
    )


def ruler(row: Mapping[str, Any], position: int, path: Path, corpus: Corpus | None) -> Task:
    """The task of a RULER row, NVIDIA's (context inside `input`) or MemAgent's (context apart, as text or as numbers).

    The id is the position in the file: `index` starts again in every part that RULER's generators join.
    """
    question, context = row["input"], row.get("context")
    if context is None:
        question, context = _split_input(question, row.get("answer_prefix", ""))
    return Task(
        id=str(position),
        question=question,
        context=_context(context, corpus),
        answers=answers_of(row["answers"] if "answers" in row else row["outputs"]),
        metric="sub_em" if "answers" in row else _ruler_metric(path),
        extra=_rest(row, "input", "context", "answers", "outputs"),
    )


def memagent_training(row: Mapping[str, Any], position: int, corpus: Corpus | None) -> Task:
    """The task of a row of MemAgent's training parquet, whose reward is that of MemAgent's own training."""
    extra = row.get("extra_info") or {}
    return Task(
        id=str(position),
        question=row["prompt"][-1]["content"],
        context=_context(row["context"], corpus),
        answers=answers_of(row["reward_model"]["ground_truth"]),
        metric="memagent_reward",
        extra={**extra, "data_source": row.get("data_source")},
    )


def gsm8k(row: Mapping[str, Any], position: int) -> Task:
    """The task of a line of GSM8K: the number after #### is the answer, and what stands before it is its derivation."""
    solution, mark, answer = row["answer"].rpartition("####")
    gold = answer.strip().replace(",", "")
    if not mark or not gold:
        raise ValueError(f"the answer {row['answer'][-40:]!r} has nothing after ####, where GSM8K has the number")
    extra = {**_rest(row, "question", "answer"), "solution": solution.strip()}
    return Task(str(position), row["question"], "", (gold,), metric="number", extra=extra)


def answers_of(value: Any) -> tuple[str, ...]:
    """Gold answers. ValueError for a string, which a metric would take for a list of characters."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"the answers must be a list of strings, got {value!r}")
    return tuple(value)


def _rest(row: Mapping[str, Any], *used: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in used}


def _context(value: Any, corpus: Corpus | None) -> str | TextSource:
    if not isinstance(value, list):
        return value
    if corpus is None:
        raise ValueError("the context is a list of document numbers; give the corpus that they number")
    return Documents(corpus, tuple(value))


def _split_input(text: str, answer_prefix: str) -> tuple[str, str]:
    """Question and context of NVIDIA's `input`: the question is the last "Question:", or else the last line."""
    text = text.rstrip().removesuffix(answer_prefix.strip()).rstrip()
    marks = list(_QUESTION.finditer(text))
    cut = marks[-1].start() if marks else text.rfind("\n") + 1
    if not text[:cut].strip():
        raise ValueError("the input holds no context before its question, and there is no context field")
    question = text[cut:].removeprefix("Question:")
    return re.sub(r"\s+Answer:[^\n]*\Z", "", question).strip(), text[:cut].strip()


def _ruler_metric(path: Path) -> str:
    """RULER's metric by the task in the name of the file or its folder: any gold answer for qa, all for the others."""
    for name in (path.stem, path.parent.name):
        if found := _RULER_TASK.search(name.lower()):
            return "ruler_part" if found[1] == "qa" else "ruler_all"
    return "ruler_all"
