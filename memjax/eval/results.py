"""A results directory: every sample on disk the moment it is finished, and lm-eval's results.json over all of them.

config.json            what was run; the directory refuses to continue with anything else
samples_<cell>.jsonl   one line per sample, in lm-eval's names where it has one for the thing
journals/              the journals of samples that are not finished, one file each
results.json           the scores; holds nothing that differs between two runs with the same outcomes (times stay
                       with the samples), so that a resumed run ends with the same bytes as an uninterrupted one
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from memjax.episodes.diagnosis import Fate, counters
from memjax.eval.statistics import interval, standard_error
from memjax.eval.verdicts import Verdict, judge_of, judged, read_verdicts
from memjax.whole_file import append_line, drop_torn_line, lock_directory, write_whole

Key = tuple[str, int]
"""Cell and number of a sample in it."""


@dataclass(frozen=True)
class Row:
    """One finished sample. A failed one has `error` set, no answer and a score of 0."""

    cell: str
    number: int
    task_id: str
    metric: str  # the one that is reported; its value is `score`
    metrics: Mapping[str, float]
    answers: tuple[str, ...]
    response: str
    extracted: str
    extraction: str  # how the answer was found in the response
    model: str
    commit: str
    config_hash: str
    doc_hash: str
    prompt_hash: str
    question: str = ""
    error: str | None = None
    metric_errors: tuple[str, ...] = ()  # metrics that crashed or hung; each counts as 0
    attempt: int = 1
    document_tokens: int = 0  # read by the agent
    dropped_tokens: int = 0  # of the document, cut out before the agent saw it
    model_calls: int = 0
    replayed_calls: int = 0  # of them, answered from the journal; not kept with the results, which do not depend on it
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    truncated_replies: int = 0
    empty_replies: int = 0  # that said nothing: blank, or thinking only
    started: float = 0.0  # Unix time
    seconds: float = 0.0
    memories: tuple[str, ...] = ()
    fates: tuple[Fate, ...] = ()

    @property
    def key(self) -> Key:
        """What names the sample in its directory."""
        return self.cell, self.number

    @property
    def score(self) -> float:
        """The reported metric."""
        return self.metrics[self.metric]

    def to_json(self) -> dict[str, Any]:
        """The line of the samples file."""
        return {
            "doc_id": self.number,
            "id": self.task_id,
            "task": self.cell,
            "target": list(self.answers),
            "resps": [[self.response]],
            "filtered_resps": [self.extracted],
            "filter": self.extraction,
            "metric": self.metric,
            "metrics": list(self.metrics),
            **self.metrics,
            "doc_hash": self.doc_hash,
            "prompt_hash": self.prompt_hash,
            "target_hash": digest(list(self.answers)),
            **{name: getattr(self, name) for name in _PLAIN},
            "metric_errors": list(self.metric_errors),
            "memories": list(self.memories),
            "evidence": [fate.to_json() for fate in self.fates],
        }

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Row:
        """The row that a line of a samples file holds."""
        return cls(
            cell=line["task"],
            number=line["doc_id"],
            task_id=line["id"],
            metric=line["metric"],
            metrics={name: line[name] for name in line["metrics"]},
            answers=tuple(line["target"]),
            response=line["resps"][0][0],
            extracted=line["filtered_resps"][0],
            extraction=line["filter"],
            doc_hash=line["doc_hash"],
            prompt_hash=line["prompt_hash"],
            metric_errors=tuple(line["metric_errors"]),
            memories=tuple(line["memories"]),
            fates=tuple(Fate.from_json(fate) for fate in line["evidence"]),
            **{name: line[name] for name in _PLAIN},
        )


_PLAIN = (
    "question", "error", "attempt", "model", "commit", "config_hash", "document_tokens", "dropped_tokens",
    "model_calls", "prompt_tokens", "cached_tokens", "generated_tokens", "truncated_replies", "empty_replies",
    "started", "seconds",
)  # fmt: skip


@dataclass
class ResultsDirectory:
    """The results of one config, open for one run at a time. Use as a context manager."""

    path: Path
    config: Mapping[str, Any]
    rows: dict[Key, Row] = field(default_factory=dict)  # the last attempt of each sample, without its texts
    _files: dict[str, IO[bytes]] = field(default_factory=dict)
    _lock: IO[str] | None = None

    def __enter__(self) -> ResultsDirectory:
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file, and results are a directory; give another --out")
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = lock_directory(self.path, "wait for it or give another --out")
        try:
            self._claim()
            for file in sorted(self.path.glob("samples_*.jsonl")):
                drop_torn_line(file)
                for row in read_samples(file):
                    self.rows[row.key] = slim(row)
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        if self._lock:
            self._lock.close()

    @property
    def journals(self) -> Path:
        """Where the journals of unfinished samples stand."""
        return self.path / "journals"

    def finished(self, key: Key, doc_hash: str) -> bool:
        """Whether the sample was answered; a failed one is tried again. A task that has changed is refused."""
        row = self.rows.get(key)
        if row and row.doc_hash != doc_hash:
            raise ValueError(
                f"sample {key[1]} of {key[0]} in {self.path} was another task ({row.task_id}): the data has changed "
                "since; give another --out"
            )
        return row is not None and row.error is None

    def append(self, row: Row) -> Row:
        """Put a finished sample on disk; when this returns it survives a power cut."""
        before = self.rows.get(row.key)
        row = replace(row, attempt=before.attempt + 1 if before else 1)
        if row.cell not in self._files:
            self._files[row.cell] = (self.path / f"samples_{row.cell}.jsonl").open("ab")
        file = self._files[row.cell]
        append_line(file, row.to_json())
        self.rows[row.key] = slim(row)
        return row

    def finish(self) -> dict[str, Any]:
        """Put the samples in order, one line each, and write results.json, which is returned."""
        for cell in {cell for cell, _ in self.rows}:
            if cell in self._files:
                self._files.pop(cell).close()
            _sort_samples(self.path / f"samples_{cell}.jsonl")
        results = summarise(self.rows.values(), self.config, read_verdicts(self.path))
        write_whole(self.path / "results.json", json.dumps(results, indent=2, ensure_ascii=False) + "\n")
        return results

    def _claim(self) -> None:
        """Write the config, or refuse a directory made with another one."""
        file = self.path / "config.json"
        if not file.exists():
            if any(self.path.glob("samples_*.jsonl")):
                raise ValueError(f"{self.path} holds samples but no config.json; give another --out")
            write_whole(file, json.dumps(self.config, indent=2, ensure_ascii=False) + "\n")
            return
        made_with = json.loads(file.read_text("utf-8"))
        now = json.loads(json.dumps(self.config))
        differing = [
            f"{name} was {json.dumps(made_with.get(name))}, is {json.dumps(now.get(name))}"
            for name in sorted({*made_with, *now})
            if made_with.get(name) != now.get(name)
        ]
        if differing:
            raise ValueError(f"{self.path} was made with another config ({'; '.join(differing)}); give another --out")


def summarise(
    rows: Iterable[Row], config: Mapping[str, Any], verdicts: Mapping[Key, Verdict] = MappingProxyType({})
) -> dict[str, Any]:
    """results.json in lm-eval's shape, with failures, cost, diagnosis and a judge's verdicts beside each score."""
    cells: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.key):
        cells.setdefault(row.cell, []).append(row)
    return {
        "results": {cell: _cell_results(cell, rows) | _judged(rows, verdicts) for cell, rows in cells.items()},
        "configs": {cell: {"task": cell, "metric": rows[0].metric} for cell, rows in cells.items()},
        "versions": {cell: 1 for cell in cells},
        "n-shot": {cell: 0 for cell in cells},
        "higher_is_better": {cell: {name: True for name in rows[0].metrics} for cell, rows in cells.items()},
        "n-samples": {cell: {"original": len(rows), "effective": len(rows)} for cell, rows in cells.items()},
        "config": dict(config),
        "model_name": config.get("model"),
        "git_hash": "+".join(sorted({row.commit for rows in cells.values() for row in rows})),
        **({"judge": judge_of(verdicts)} if verdicts else {}),
    }


def _judged(rows: Sequence[Row], verdicts: Mapping[Key, Verdict]) -> dict[str, Any]:
    if not verdicts:
        return {}
    of_cell = judged(rows, verdicts)
    counts = {f"judge_{name}": of_cell.rulings.get(name, 0) for name in ("unclear", "failed", "missing")}
    return {"judge,none": of_cell.score.mean, "judge_95": [of_cell.score.low, of_cell.score.high], **counts}


def _cell_results(cell: str, rows: Sequence[Row]) -> dict[str, Any]:
    scores = interval([row.score for row in rows])
    values: dict[str, Any] = {"alias": cell}
    for name in rows[0].metrics:
        of_metric = [row.metrics.get(name, 0.0) for row in rows]
        values[f"{name},none"] = sum(of_metric) / len(of_metric)
        values[f"{name}_stderr,none"] = standard_error(of_metric) if len(of_metric) > 1 else "N/A"
    return {
        **values,
        "score": scores.mean,
        "score_95": [scores.low, scores.high],
        "failed": sum(row.error is not None for row in rows),
        "metric_errors": sum(len(row.metric_errors) for row in rows),
        **{
            name: sum(getattr(row, name) for row in rows)
            for name in (
                "document_tokens",
                "dropped_tokens",
                "model_calls",
                "prompt_tokens",
                "generated_tokens",
                "truncated_replies",
                "empty_replies",
            )
        },
        **counters(fate for row in rows for fate in row.fates),
    }


def read_samples(file: Path) -> Iterator[Row]:
    """The rows of a samples file; a line that is none is refused by its number."""
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield Row.from_json(json.loads(line))
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise ValueError(
                    f"{file}:{number} is not a sample of an evaluation ({error!r}); remove the line"
                ) from error


def slim(row: Row) -> Row:
    """The row without the texts that only the file needs: a run of 4M-token samples must not hold all memories."""
    return replace(row, memories=(), response="")


def digest(value: Any) -> str:
    """SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False, default=str).encode()).hexdigest()


def commit() -> str:
    """The checkout's commit with `-dirty` when package files differ from it; "unknown" for an installed package."""
    package = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=package, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--", str(package)) else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _sort_samples(file: Path) -> None:
    """Keep each sample's last line, in order of number. Lines are copied one at a time."""
    places: dict[int, int] = {}
    with file.open("rb") as lines:
        offset = 0
        for line in lines:
            places[json.loads(line)["doc_id"]] = offset
            offset += len(line)
        temporary = file.with_name(f".{file.name}.writing")
        with temporary.open("wb") as out:
            for _, place in sorted(places.items()):
                lines.seek(place)
                out.write(lines.readline())
            out.flush()
            os.fsync(out.fileno())
    temporary.replace(file)
