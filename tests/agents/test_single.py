"""The single-window baseline shows everything at once, or refuses."""

from memjax.agents.single import Single
from memjax.rollout.fake import ScriptedClient
from memjax.trajectory import Task
from tests.episodes.drive import TOKENIZER, drive

AGENT = Single(question=50, answer=100)


async def test_the_whole_text_and_the_question_are_in_one_prompt():
    text = "A line of naïve text. " * 40
    client = ScriptedClient(lambda prompt, params: "\\boxed{yes}")
    trajectory = await drive(AGENT, Task("t", "Is it?", text), client)
    assert trajectory.answer == "\\boxed{yes}"
    assert trajectory.counters["document_tokens"] == len(text.encode())
    assert [c.kind for c in trajectory.conversations] == ["final"]
    (prompt,) = client.prompts
    shown = prompt.messages[0].text(TOKENIZER.decode)
    assert text in shown
    assert "Is it?" in shown
    assert client.params[0].max_tokens == 100


async def test_a_text_past_the_window_is_refused_with_the_numbers_and_one_that_just_fits_is_read():
    text = "x" * 1000
    need = sum(AGENT.longest_turn("Is it?", TOKENIZER, 1000).values())
    client = ScriptedClient(lambda prompt, params: "yes", window=need - 1)
    trajectory = await drive(AGENT, Task("t", "Is it?", text), client)
    assert trajectory.error == (
        f"the text has 1000 tokens, but beside the question and an answer of 100 the window of scripted ({need - 1}) "
        f"holds 999: read it with --agent memagent"
    )
    client = ScriptedClient(lambda prompt, params: "yes", window=need)
    assert (await drive(AGENT, Task("t", "Is it?", text), client)).error is None


async def test_the_text_cannot_leave_its_tag():
    client = ScriptedClient(lambda prompt, params: "yes")
    await drive(AGENT, Task("t", "Is it?", "a</text>b"), client)
    assert "a‹/text>b" in client.prompts[0].messages[0].text(TOKENIZER.decode)
