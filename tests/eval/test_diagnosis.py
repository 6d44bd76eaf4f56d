import asyncio

import pytest

from memjax.data.corpus import Corpus, Documents, write_corpus
from memjax.eval.diagnosis import Evidence, counters, diagnose, evidence_of, losses_by_tenth, passages
from memjax.eval.recording import RecordingClient, Turn
from memjax.rollout.client import Message, Prompt
from memjax.rollout.fake import ByteTokenizer, ScriptedClient
from memjax.trajectory import SamplingParams, Task

FACT = Evidence("code", ("The code is 4711.",), ("4711",))


def turns(*steps: tuple[bool, str]) -> list[Turn]:
    """Turns from (was the fact shown, memory written)."""
    return [Turn(memory, 10, 5, 0, False, (shown,)) for shown, memory in steps]


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
    (fate,) = diagnose([FACT], turns(*steps), correct)
    assert (fate.stage, fate.lost_at) == (stage, lost_at)


def test_an_empty_update_keeps_the_memory_before_it():
    (fate,) = diagnose([FACT], turns((True, "4711"), (False, "")), correct=True)
    assert (fate.stage, fate.updates, fate.drops) == ("kept", 1, 0)


def test_rates_are_given_that_the_stage_before_went_well():
    fates = [
        *diagnose([FACT], turns((False, "-")), False),
        *diagnose([FACT], turns((True, "-")), False),
        *diagnose([FACT], turns((True, "4711"), (False, "4711"), (False, "-")), False),
        *diagnose([FACT], turns((True, "4711"), (False, "4711")), False),
        *diagnose([FACT], turns((True, "4711"), (False, "4711")), True),
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
    late = diagnose([FACT], turns(*[(True, "4711")] * 19, (False, "gone")), False)
    early = diagnose([FACT], turns((True, "-"), *[(False, "-")] * 19), False)
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


def ask(client: RecordingClient, *parts: str | list[int]) -> None:
    prompt = Prompt((Message("user", tuple(parts)),))
    asyncio.run(client.complete(prompt, SamplingParams(max_tokens=100)))


@pytest.mark.parametrize("as_ids", [False, True])
def test_a_fact_in_the_memory_or_the_question_was_not_shown_by_the_chunk(as_ids):
    tokenizer = ByteTokenizer()
    replies = iter(["The code is 4711. Keep it.", "The code is 4711. Keep it.", "done"])
    watched = [["code is 4711"], ["code is 9"]]
    reader = ScriptedClient(lambda prompt, params: next(replies))
    client = RecordingClient(reader, tokenizer.decode, "Which? The code is 9.", watched)
    part = tokenizer.encode if as_ids else (lambda text: text)
    ask(client, "Which? The code is 9.", "\n", part("no notes"), "\n", part("Chunk: The code\nis 4711."))
    ask(client, "Which? The code is 9.", "\n", part("The code is 4711. Keep it."), "\n", part("Chunk: nothing."))
    assert [turn.shown for turn in client.turns] == [(True, False), (False, False)]


def test_a_short_memory_is_not_taken_for_what_the_chunk_shows():
    tokenizer = ByteTokenizer()
    client = RecordingClient(ScriptedClient(lambda prompt, params: "- 4711"), tokenizer.decode, watched=[["4711"]])
    ask(client, "Notes:\n", "none", "\nText:\n", "The code is 4711.")
    ask(client, "Notes:\n", tokenizer.encode("- 4711"), "\nText:\n", "Nothing.")
    assert [turn.shown for turn in client.turns] == [(True,), (False,)]


def test_the_prompt_hash_tells_prompts_apart_whatever_their_parts_are_made_of():
    tokenizer = ByteTokenizer()

    def hash_of(*parts):
        client = RecordingClient(ScriptedClient(lambda prompt, params: "ok"), tokenizer.decode)
        ask(client, *parts)
        return client.prompt_hash

    assert hash_of("read ", "this") == hash_of("read ", tokenizer.encode("this"))
    assert hash_of("read ", "this") != hash_of("read ", "that")


def test_a_passage_cut_by_a_chunk_border_is_known_by_either_end():
    passage = "It was found in the cellar of the mill, behind the third barrel. " * 3
    client = RecordingClient(ScriptedClient(lambda prompt, params: "ok"), ByteTokenizer().decode, watched=[[passage]])
    ask(client, passage[:100])
    ask(client, passage[100:])
    ask(client, passage[65:95])
    assert [turn.shown for turn in client.turns] == [(True,), (True,), (False,)]
