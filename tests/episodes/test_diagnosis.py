import numpy as np
import pytest

from memjax.data.chunks import Chunk
from memjax.data.corpus import Corpus, Documents, write_corpus
from memjax.data.evidence import passages
from memjax.episodes.diagnosis import Diagnosis, Evidence, Fate, counters, evidence_of, losses_by_tenth
from memjax.episodes.episode import Reply, Turn
from memjax.rollout.client import Message, Prompt
from memjax.rollout.fake import ByteTokenizer
from memjax.trajectory import Completion, Task

FACT = Evidence("code", ("The code is 4711.",), ("4711",))
TOKENIZER = ByteTokenizer()


def turn(number: int, reply: str, text: str | None, kind: str = "memory", *before: str) -> Turn:
    """A turn whose prompt shows `before` and the text of a chunk, if there is one."""
    empty = np.zeros(0, np.int32)
    completion = Completion(empty, empty, np.zeros(0, np.float32), reply, "stop")
    ids = tuple(TOKENIZER.encode(text or ""))
    prompt = Prompt((Message("user", (*before, ids)),))
    chunk = None if text is None else Chunk(number, ids, 0, len(ids))
    return Turn((number + 1,), kind, prompt, Reply(completion, (), ()), chunk)


def shown_in(texts: list[str], evidence: Evidence) -> tuple[int, ...]:
    """The chunks that are said to show the evidence."""
    diagnosis = Diagnosis([evidence], TOKENIZER)
    for number, text in enumerate(texts):
        diagnosis.add(turn(number, "-", text))
    return diagnosis.fates(correct=False)[0].shown_in


def diagnose(steps: list[tuple[bool, str]], correct: bool) -> list[Fate]:
    """The fates of FACT after turns of (was the fact shown, memory written)."""
    diagnosis = Diagnosis([FACT], TOKENIZER)
    for number, (shown, memory) in enumerate(steps):
        diagnosis.add(turn(number, memory, "Now: the code\nis 4711. Yes." if shown else "Nothing."))
    return list(diagnosis.fates(correct=correct))


@pytest.mark.parametrize(
    ("steps", "correct", "stage", "lost_at"),
    [
        ([(False, "-"), (False, "-")], False, "unseen", None),
        ([(False, "-"), (True, "nothing here"), (False, "-")], False, "capture", 1),
        ([(True, "code 4711"), (False, "code 4711"), (False, "gone")], False, "retention", 2),
        ([(True, "code 4711"), (False, ""), (False, "gone"), (False, "-")], False, "retention", 2),
        ([(True, "4711"), (False, "gone"), (True, "4711"), (False, "4711"), (False, "gone")], False, "retention", 4),
        ([(True, "code 4711"), (False, "code 4711")], False, "use", None),
        ([(True, "code 4711"), (False, "code 4711")], True, "kept", None),
        ([(True, "code 47110")], False, "capture", 0),  # another number that contains it
    ],
)
def test_each_fact_gets_the_stage_and_chunk_at_which_it_was_lost(steps, correct, stage, lost_at):
    (fate,) = diagnose(steps, correct)
    assert (fate.stage, fate.lost_at) == (stage, lost_at)


def test_an_empty_update_keeps_the_memory_before_it():
    (fate,) = diagnose([(True, "4711"), (False, "")], correct=True)
    assert (fate.stage, fate.updates, fate.drops) == ("kept", 1, 0)


def test_rates_are_given_that_the_stage_before_went_well():
    fates = [
        *diagnose([(False, "-")], False),
        *diagnose([(True, "-")], False),
        *diagnose([(True, "4711"), (False, "4711"), (False, "-")], False),
        *diagnose([(True, "4711"), (False, "4711")], False),
        *diagnose([(True, "4711"), (False, "4711")], True),
    ]
    assert counters(fates) == pytest.approx(
        {
            "memory/evidence_seen": 4 / 5,
            "memory/capture_rate": 3 / 4,
            "memory/retention_rate": 2 / 3,
            "memory/retention_rate_per_update": 3 / 4,
            "memory/use_rate": 1 / 2,
        }
    )
    assert counters([]) == {}


def test_losses_are_placed_in_their_tenth_of_the_document():
    late = diagnose([*[(True, "4711")] * 19, (False, "gone")], False)
    early = diagnose([(True, "-"), *[(False, "-")] * 19], False)
    tenths = losses_by_tenth([(late, 20), (early, 20)])
    assert tenths == {"capture": [1] + [0] * 9, "retention": [0] * 9 + [1]}


def test_passages_of_a_streamed_context_are_read_by_their_characters(tmp_path):
    write_corpus(tmp_path / "pool.jsonl", ["Ada\nShe wrote notes.", "Bob\nHe baked bread."])
    corpus = Corpus(tmp_path / "pool.jsonl")
    context = Documents(corpus, (1, 0))
    whole = "".join(context.pieces())
    start = whole.index("Ada")
    places = [{"title": "Ada", "start": start, "end": len(whole)}, 3]
    task = Task("t", "Who wrote notes?", context, ("Ada",), extra={"evidence": places})
    assert [text for _, text in passages(task)] == ["Ada\nShe wrote notes."]
    assert evidence_of(task) == (Evidence("Ada", ("Ada\nShe wrote notes.",), ("Ada",)),)
    corpus.close()


def test_a_title_that_the_question_gives_away_is_no_sign_of_a_captured_passage():
    text = "Ed Wood\nHe was an American director."
    extra = {"evidence": [{"title": "Ed Wood", "text": text}]}
    task = Task("t", "Was Ed Wood an American?", text, ("yes",), extra=extra)
    assert evidence_of(task) == ()


def test_without_named_evidence_the_answers_are_watched():
    spellings = Task("t", "q", "c", ("NYC", "New York"))
    assert evidence_of(spellings) == (Evidence("answer", ("NYC", "New York"), ("NYC", "New York")),)
    all_wanted = Task("t", "q", "c", ("17", "23"), metric="ruler_all")
    assert [fact.name for fact in evidence_of(all_wanted)] == ["17", "23"]


@pytest.mark.parametrize("memory", ["The code is 4711. Keep it.", "- 4711"])
def test_a_fact_in_the_memory_or_the_question_was_not_shown_by_the_chunk(memory):
    diagnosis = Diagnosis([FACT, Evidence("other", ("code is 9",), ("9",))], TOKENIZER)
    diagnosis.add(turn(0, memory, "Chunk: The code\nis 4711.", "memory", "Which? The code is 9.", "no notes"))
    diagnosis.add(turn(1, memory, "Chunk: nothing.", "memory", "Which? The code is 9.", memory))
    assert [fate.shown_in for fate in diagnosis.fates(correct=True)] == [(0,), ()]
    assert diagnosis.memories == [memory, memory]


def test_turns_that_read_no_chunk_or_write_no_memory_are_passed_over():
    diagnosis = Diagnosis([FACT], TOKENIZER)
    diagnosis.add(turn(0, "4711", None))
    diagnosis.add(turn(1, "4711", "The code is 4711.", kind="final"))
    assert diagnosis.fates(correct=True) == ()
    assert diagnosis.memories == []


def test_a_passage_cut_by_a_chunk_border_is_known_by_either_end():
    passage = "It was found in the cellar of the mill, behind the third barrel. " * 3
    cut = [passage[:100], passage[100:], passage[65:95]]
    assert shown_in(cut, Evidence("where", (passage,), ("cellar",))) == (0, 1)
