"""The page in a headless Chromium: a book is uploaded, asked about, watched, left and found again.

Needs Debian's chromium (or the path of another in MEMJAX_CHROMIUM) and `uv sync --group browser`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
import uvicorn

from memjax.episodes.journal import Journal
from memjax.episodes.packed import packed
from memjax.rewards.answers import extract_answer
from memjax.serve.journal_view import create_view
from memjax.serve.listening import bind
from tests.serve.conftest import serving

playwright = pytest.importorskip("playwright.sync_api")
axe = pytest.importorskip("axe_playwright_python.sync_playwright")
CHROMIUM = os.environ.get("MEMJAX_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium, or set MEMJAX_CHROMIUM"),
]

BOOK = Path(__file__).parents[2] / "memjax" / "data" / "books" / "sherlock_holmes_adventures.txt.gz"
BUDGETS = {"Tokens of a chunk": 200, "Tokens of the memory": 40, "Tokens of an answer": 16}
QUESTION = "Who is the woman?"
expect = playwright.expect


@pytest.fixture(scope="module")
def chromium():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(chromium):
    """A page in which no script may fail and nothing may be refused by the policy."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(20_000)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if "Security Policy" in message.text else None)
    yield page
    context.close()
    assert not wrong


@pytest.fixture
def book(tmp_path) -> Path:
    import gzip

    text = gzip.decompress(BOOK.read_bytes()).decode()
    path = tmp_path / "sherlock.txt"
    path.write_text(text[20_000:26_000])
    return path


def ask(page, url: str, *, files: Path | None = None, text: str = "", questions: str = QUESTION) -> None:
    page.goto(url)
    if files:
        page.set_input_files("#files", files)
    page.get_by_label("Or paste the text").fill(text)
    page.get_by_label("What do you want to know?").fill(questions)
    page.get_by_text("How it reads").click()
    for label, tokens in BUDGETS.items():
        page.get_by_label(label).fill(str(tokens))
    page.get_by_role("button", name="Read it").click()


@contextmanager
def slowed(server, seconds: float):
    """The engine takes its time for every step, so that a reading can be watched."""
    engine = server.engine
    generate = engine.generate

    def slow(params, state):
        time.sleep(seconds)
        return generate(params, state)

    engine.generate = slow
    try:
        yield
    finally:
        engine.generate = generate


def shown_chunk(page) -> int:
    return int(page.locator("#memory-title").inner_text().rsplit(" ", 1)[1])


def wait_for_chunk(page, number: int) -> None:
    expect(page.locator("#memory-title")).to_have_text(re.compile(r"\d+"), timeout=20_000)
    while shown_chunk(page) < number:  # an expectation of text would miss chunks that come fast
        page.wait_for_timeout(20)


def test_a_book_is_read_left_in_the_middle_found_again_and_answered(server, page, book):
    with slowed(server, 0.01):
        ask(page, server.url, files=book)
        expect(page.get_by_role("heading", name=QUESTION)).to_be_focused()
        seen = set()
        while len(seen) < 5:
            wait_for_chunk(page, max(seen, default=0) + 1)
            seen.add(shown_chunk(page))
            expect(page.locator("#change")).to_have_text(re.compile(r"words? added, \d+ dropped|Nothing changed"))
        expect(page.locator("#progress-text")).to_contain_text(
            re.compile(r"\d+ of about \d+ chunks read · .* tokens/s · .* left")
        )
        address = page.url
        assert re.search(r"#run-[0-9a-f]{24}$", address)
        page.reload()
        wait_for_chunk(page, max(seen))
        assert page.url == address
        assert page.locator("#documents").inner_text() == "sherlock.txt"
    expect(page.get_by_role("heading", name="Answer")).to_be_visible(timeout=60_000)
    expect(page.locator("#progress-text")).to_contain_text("Read to the end")
    run = server.get(f"/v1/memory/answers/{address.partition('#')[2]}").json()
    assert run["status"] == "done"
    assert shown_chunk(page) == run["chunks_read"] > 5
    with page.expect_download() as download:
        page.get_by_role("button", name="Download the journal").click()
    lines = map(json.loads, Path(download.value.path()).read_text().splitlines())
    assert sum(line["type"] == "call" for line in lines) == run["counters"]["model_calls"]


def test_a_reading_is_stopped_and_goes_on_and_is_deleted(server, page, book):
    with slowed(server, 0.02):
        ask(page, server.url, text=book.read_text())
        wait_for_chunk(page, 2)
        address = page.url
        page.get_by_role("button", name="Stop").click()
        expect(page.locator("#progress-text")).to_contain_text("Stopped")
        stopped = shown_chunk(page)
        page.get_by_role("button", name="Resume").click()
        wait_for_chunk(page, stopped + 1)
    expect(page.get_by_role("heading", name="Answer")).to_be_visible(timeout=60_000)
    expect(page.locator("#progress-text")).to_contain_text(re.compile(r"Read to the end · .* calls? replayed"))
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.get_by_role("button", name="Read it")).to_be_visible()
    assert address.partition("#")[2] not in [run["id"] for run in readings(server)]


def readings(server) -> list[dict]:
    return server.get("/v1/memory/answers").json()["data"]


def test_two_questions_have_their_own_memories_and_the_list_names_the_reading(server, page, book):
    ask(page, server.url, text=book.read_text()[:1500], questions=f"{QUESTION}\nWhere is the photograph?\n")
    expect(page.get_by_role("heading", name="Answer")).to_be_visible(timeout=60_000)
    run = readings(server)[0]
    for memory in run["memories"]:
        page.locator("#switch").get_by_text(memory["question"]).click()
        assert re.sub(r"\s", "", page.locator("#memory").inner_text()) != ""
        with_memory = "".join(page.locator("#memory ins, #memory span").all_text_contents())
        assert with_memory == memory["memory"]
    page.goto(server.url)
    page.get_by_role("link", name=" · ".join(run["questions"])).click()
    expect(page.get_by_role("heading", name="Answer")).to_be_visible()


def test_the_page_can_be_used_with_the_keyboard_alone(server, page, book):
    page.goto(server.url)
    keyboard = page.keyboard
    focused = lambda: page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()")  # noqa: E731
    order = []
    for _ in range(6):
        keyboard.press("Tab")
        order.append(focused())
    assert order == ["memjax", "files", "text", "questions", "How it reads", "ask"]
    page.get_by_label("Or paste the text").focus()
    keyboard.insert_text(book.read_text()[:1500])
    keyboard.press("Tab")
    keyboard.insert_text(QUESTION)
    keyboard.press("Tab")
    keyboard.press("Enter")
    for tokens in BUDGETS.values():
        keyboard.press("Tab")
        keyboard.type(str(tokens))
    keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Answer")).to_be_visible(timeout=60_000)
    last = shown_chunk(page)
    page.get_by_label("Chunk of the text").focus()
    keyboard.press("ArrowLeft")
    assert shown_chunk(page) == last - 1
    assert page.url.endswith(f"/{last - 1}")
    keyboard.press("Home")
    assert shown_chunk(page) == 1


def test_a_dropped_file_is_chosen_and_can_be_taken_back(server, page):
    page.goto(server.url)
    data = page.evaluate_handle(
        "() => { const d = new DataTransfer(); d.items.add(new File(['Some text.'], 'notes.md')); return d; }"
    )
    page.dispatch_event("h1 >> visible=true", "drop", {"dataTransfer": data})
    expect(page.locator("#chosen")).to_contain_text("notes.md")
    page.get_by_role("button", name="Remove notes.md").click()
    expect(page.locator("#chosen li")).to_have_count(0)


def test_errors_are_told_in_words_and_the_form_keeps_what_was_written(server, page):
    ask(page, server.url, text="", questions=QUESTION)
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("There is nothing to read yet")
    page.get_by_label("Or paste the text").fill("Some text.")
    page.get_by_label("Tokens of a chunk").fill("100000")
    page.get_by_role("button", name="Read it").click()
    expect(alert).to_contain_text("lower the chunk budget")
    assert page.get_by_label("What do you want to know?").input_value() == QUESTION
    page.goto(f"{server.url}/#run-{'0' * 24}")
    expect(alert).to_contain_text("There is no run")


def in_sight(page, selector: str) -> bool:
    """Whether all of an element is in the window."""
    box = page.locator(selector).bounding_box()
    return box is not None and box["y"] >= 0 and box["y"] + box["height"] <= page.viewport_size["height"]


def beside(page, button: str) -> bool:
    """Whether the problem is in sight, has the focus, and stands right below the button."""
    expect(page.locator("#problem")).to_be_focused()
    gap = page.locator("#problem").bounding_box()["y"] - page.locator(button).bounding_box()["y"]
    return in_sight(page, "#problem") and in_sight(page, button) and 0 < gap < 150


FAILING = {"stop": "stop", "resume": "resume", "delete": "forget", "append": "append", "ask again": "ask-again"}


@pytest.mark.parametrize("width", [1280, 360])
def test_whatever_fails_says_so_beside_its_button(server, page, book, width):
    page.set_viewport_size({"width": width, "height": 500})
    said = "the server's state directory is full (No space left on device)"
    refuse = {"status": 507, "json": {"error": {"message": said}}}
    ask(page, server.url, text="Some text.\n" * 40, questions="")
    expect(page.locator("#problem")).to_have_text("Write at least one question.")
    assert beside(page, "#ask")
    page.get_by_label("What do you want to know?").fill(QUESTION)
    page.route("**/v1/memory/answers", lambda route: route.fulfill(**refuse))
    page.get_by_role("button", name="Read it").click()
    expect(page.locator("#problem")).to_contain_text(said[1:])
    assert beside(page, "#ask")
    page.unroute("**/v1/memory/answers")
    page.on("dialog", lambda dialog: dialog.accept())
    with slowed(server, 0.02):
        page.get_by_label("Or paste the text").fill(book.read_text())
        page.get_by_role("button", name="Read it").click()
        wait_for_chunk(page, 1)
        failing = re.compile(r"/v1/memory/answers/[^/]+(/(stop|resume|append))?$")
        for action, button in FAILING.items():
            if action == "resume":
                page.get_by_role("button", name="Stop").click()
                expect(page.locator("#resume")).to_be_visible()
            if action == "append":
                page.get_by_text("Add a document").click()
                page.locator("#more-text").fill("More.")
            if action == "ask again":
                failing = "**/v1/memory/answers"
                page.locator("#again").fill("Where?")
            page.route(failing, lambda route: route.fulfill(**refuse))
            page.locator(f"#{button}").click()
            expect(page.locator("#problem")).to_contain_text(said[1:])
            assert beside(page, f"#{button}"), action
            page.unroute(failing)
    assert not server.get("/v1/files").json()["data"]  # what was uploaded for the append


def test_a_paste_of_megabytes_is_read_and_named_by_its_first_words(server, page):
    page.goto(server.url)
    text = "The lamp room door opens\nwith a code. " * 80_000
    page.evaluate("text => (document.getElementById('text').value = text)", text)
    page.get_by_label("What do you want to know?").fill(QUESTION)
    page.get_by_role("button", name="Read it").click()
    expect(page.locator("#documents")).to_have_text(re.compile("^The lamp room door opens with a code"), timeout=60_000)
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#progress-text")).to_contain_text("Stopped", timeout=60_000)
    run = readings(server)[0]
    assert run["bytes"] == len(text)
    page.goto(server.url)
    expect(page.locator("#readings li").first).to_contain_text("The lamp room door opens with a code")
    page.evaluate("import('/page/api.js').then(({ limits }) => (limits.body = 2_000_000))")
    page.evaluate("text => (document.getElementById('text').value = text)", text)
    page.get_by_role("button", name="Read it").click()
    expect(page.locator("#problem")).to_have_text(re.compile(r"This is 3\.\d MB; the server takes 2\.0 MB at once\."))
    assert beside(page, "#ask")
    httpx.delete(f"{server.url}/v1/memory/answers/{run['id']}")


def test_after_the_answer_it_is_asked_again_read_on_and_taken_away(server, page, book):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    ask(page, server.url, text=book.read_text()[:1500])
    expect(page.get_by_role("heading", name="Answer")).to_be_visible(timeout=60_000)
    first = readings(server)[0]
    with page.expect_download() as saved:
        page.get_by_role("button", name="as JSON").click()
    kept = json.loads(Path(saved.value.path()).read_text())
    assert [one["memory"] for one in kept["questions"]] == [one["memory"] for one in first["memories"]]
    with page.expect_download() as saved:
        page.get_by_role("button", name="Download as text").click()
    assert QUESTION in Path(saved.value.path()).read_text()
    answer = first["answers"][0]["answer"]
    if answer:
        page.get_by_role("button", name="Copy the answer").click()
        expect(page.locator("#copied")).to_have_text("Copied.")
        assert page.evaluate("navigator.clipboard.readText()") == answer
        page.evaluate("void (navigator.clipboard.writeText = () => Promise.reject())")
        page.get_by_role("button", name="Copy the answer").click()
        expect(page.locator("#copied")).to_contain_text("The answer is selected")
        expect(page.locator("#answer-plain")).to_be_focused()
    page.get_by_label("About the same text").fill("Where is the photograph?")
    page.get_by_role("button", name="Ask it").click()
    expect(page.get_by_role("heading", name="Where is the photograph?")).to_be_visible()
    expect(page.get_by_role("heading", name="Answer")).to_be_visible(timeout=60_000)
    second = readings(server)[0]
    assert (second["documents"], second["id"] != first["id"]) == (first["documents"], True)
    assert second["settings"]["memory_tokens"] == first["settings"]["memory_tokens"]
    page.get_by_text("Add a document").click()
    page.locator("#more-text").fill(book.read_text()[1500:2500])
    page.set_input_files("#more-files", {"name": "more.md", "mimeType": "text/markdown", "buffer": b"And more. " * 30})
    page.get_by_role("button", name="Read on").click()
    expect(page.locator("#documents")).to_contain_text("more.md")
    expect(page.get_by_role("heading", name="Answer")).to_be_visible(timeout=60_000)
    longer = server.get(f"/v1/memory/answers/{second['id']}").json()
    assert (longer["status"], len(longer["documents"])) == ("done", 3)
    assert longer["chunks_read"] > second["chunks_read"]
    assert shown_chunk(page) == longer["chunks_read"]
    assert not server.get("/v1/files").json()["data"]
    page.get_by_role("link", name="New reading").click()
    expect(page.get_by_role("button", name="Read it")).to_be_visible()


def test_uploaded_files_are_listed_read_and_deleted(server, page, book):
    kept = httpx.post(f"{server.url}/v1/files", files={"file": ("kept.txt", book.read_bytes()[:1500])}).json()
    page.goto(server.url)
    expect(page.locator("#kept")).to_contain_text("2 kB in all")
    page.get_by_role("button", name="Read kept.txt").click()
    page.get_by_label("What do you want to know?").fill(QUESTION)
    page.get_by_role("button", name="Read it").click()
    expect(page.locator("#documents")).to_have_text("kept.txt")
    expect(page.get_by_role("heading", name="Answer")).to_be_visible(timeout=60_000)
    page.goto(server.url)
    page.on("dialog", lambda dialog: dialog.accept())
    page.route(
        f"**/v1/files/{kept['id']}", lambda route: route.fulfill(status=507, json={"error": {"message": "full"}})
    )
    page.get_by_role("button", name="Delete kept.txt").click()
    expect(page.locator("#problem")).to_have_text("Full.")
    assert beside(page, "#kept-files button >> nth=1")
    page.unroute(f"**/v1/files/{kept['id']}")
    page.get_by_role("button", name="Delete kept.txt").click()
    expect(page.locator("#kept")).to_be_hidden()
    assert server.get(f"/v1/files/{kept['id']}").status_code == 404


def test_a_damaged_reading_is_told_of_and_deleted_and_one_whose_events_fail_is_not_asked_for_ever(server, page, book):
    ask(page, server.url, text=book.read_text()[:1500])
    expect(page.get_by_role("heading", name="Answer")).to_be_visible(timeout=60_000)
    run, address = readings(server)[0], page.url
    page.route("**/events", lambda route: route.fulfill(status=500, json={"error": {"message": "an error"}}))
    page.reload()
    expect(page.locator("#progress-text")).to_contain_text("Answered")
    expect(page.locator("#problem")).to_be_hidden()
    page.unroute("**/events")
    journal = next(server.settings.state_dir.rglob(f"{run['id']}/journal.jsonl"))
    journal.write_text("garbage\n")
    page.goto(server.url)
    expect(page.locator("#readings li").first).to_contain_text("damaged")
    page.goto(address)
    expect(page.locator("#progress-text")).to_contain_text("delete it and begin it again")
    expect(page.locator("#resume")).to_be_hidden()
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.get_by_role("button", name="Read it")).to_be_visible()
    assert run["id"] not in [other["id"] for other in readings(server)]


def test_a_long_question_is_cut_to_two_lines_and_can_be_seen(server, page, book, monkeypatch):
    monkeypatch.setitem(BUDGETS, "Tokens of a chunk", 100)
    page.set_viewport_size({"width": 360, "height": 640})
    long = "Who is the woman of whom the story tells, and what did she keep, and from whom, and for how long?"
    ask(page, server.url, text=book.read_text()[:1500], questions=f"{long}\nAnd when?")
    title = page.locator("#reading-title")
    expect(title).to_have_text(long.strip())
    assert title.bounding_box()["height"] < 70
    page.get_by_role("button", name="Show the whole question").click()
    assert title.bounding_box()["height"] > 90
    assert all(
        float(radius[:-2]) <= 16
        for radius in page.evaluate(
            "[...document.querySelectorAll('#switch label')].map((e) => getComputedStyle(e).borderRadius)"
        )
    )
    page.locator("#switch").get_by_text("And when?").click()
    expect(title).to_have_text("And when?")
    expect(page.get_by_role("heading", name="Answer")).to_be_visible(timeout=60_000)


EMPTY = [
    ("length", 16, "", "budget of 16 tokens"),
    ("stop", 1, "", "ended it by itself"),
    ("stop", 9, "<think>\nHm", "thinking"),
]


@pytest.mark.parametrize(("finish", "tokens", "text", "says"), EMPTY)
def test_an_empty_reply_says_why(viewer, page, finish, tokens, text, says):
    page.goto(viewer)
    run = """async (reply) => {
      const { Episode } = await import('/page/reading.js');
      const episode = new Episode('0');
      episode.take({ key: [1], kind: 'final', reply });
      episode.end = { error: null, answer: reply.text };
      return [episode.answer, episode.emptyReason];
    }"""
    answer, reason = page.evaluate(run, {"finish": finish, "completion_tokens": tokens, "text": text})
    assert (answer, says in reason) == ("", True), reason


def test_a_key_is_asked_for_and_kept_for_the_tab(engine, loaded, tmp_path, page, book):
    with serving(engine, loaded, tmp_path, keys=("secret",)) as server:
        page.goto(server.url)
        field = page.get_by_label("This server asks for an API key")
        expect(field).to_be_focused()
        field.fill("wrong")
        field.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("no key of this server")
        field.fill("secret")
        field.press("Enter")
        expect(page.get_by_role("alert")).to_be_hidden()
        ask(page, server.url, text=book.read_text()[:1500])
        expect(page.get_by_role("heading", name="Answer")).to_be_visible(timeout=60_000)
        assert page.evaluate("localStorage.length") == 0
        page.reload()
        expect(page.get_by_role("heading", name="Answer")).to_be_visible()


def test_a_server_that_restarts_is_found_again(engine, loaded, tmp_path, page, book):
    with serving(engine, loaded, tmp_path) as server, slowed(server, 0.02):
        ask(page, server.url, text=book.read_text())
        wait_for_chunk(page, 2)
        port = int(server.url.rpartition(":")[2])
    expect(page.get_by_role("alert")).to_contain_text("Trying again")
    with serving(engine, loaded, tmp_path, port=port):
        expect(page.get_by_role("heading", name="Answer")).to_be_visible(timeout=60_000)
        expect(page.get_by_role("alert")).to_be_hidden()


MEMORIES = ["The door is green.", "The door is green. The code is unknown.", "The code of the door is 7093."]
CHUNKS = ["The door was painted.", "Nobody <b>knew</b> it.", "Then the keeper set 7093."]


def prompt(number: int) -> list[dict]:
    memory = {"reply": [number]} if number else "Nothing yet."
    return [{"role": "user", "content": ["Known: ", memory, " Read: ", {"chunk": number}]}]


def write_journal(path: Path) -> None:
    """Two drives of a question, the second after an edit of the last chunk, and an attempt without chunks."""
    lines: list[dict] = []
    for number, text in enumerate(CHUNKS):
        lines.append({"type": "chunk", "n": number, "text": packed(text.encode()), "tokens": "", "hash": f"{number}"})
    begin = {"type": "begin", "identity": {}, "seed": 0, "question": "Which code?", "document": {"name": "book.txt"}}

    def call(number: int, memory: str, **more) -> dict:
        shown = {"n": number, "index": number, "start": 100 * number, "tokens": 100, "document": 300}
        head = {"type": "call", "episode": "0", "key": [number + 1], "digest": f"{memory}{number}", "kind": "memory"}
        return head | {"prompt": prompt(number), "chunk": shown, "reply": {"text": memory, "seconds": 2.0}}

    def end(answer: str) -> dict:
        final = {"type": "call", "key": [4], "digest": answer, "kind": "final", "prompt": prompt(0)[:1]}
        lines.append(final | {"episode": "0", "reply": {"text": answer, "seconds": 1.0}})
        return {"type": "end", "episode": "0", "answer": answer, "error": None}

    lines += [begin | {"episode": "0"}, *(call(n, memory) for n, memory in enumerate([*MEMORIES[:2], "It is 1."]))]
    lines.append(end("\\boxed{1}"))
    lines.append(begin | {"episode": "0"})
    for number, memory in enumerate(MEMORIES[:2]):
        lines.append({"type": "replay", "episode": "0", "key": [number + 1], "digest": f"{memory}{number}"})
    lines.append(call(2, MEMORIES[2]))
    lines.append(end("So: \\boxed{It is 7093}") | {"counters": {"replayed_calls": 2}})
    alone = [{"role": "user", "content": ["Of ", {"ids": packed(np.arange(40, dtype=np.int32))}, " which code?"]}]
    lines.append(begin | {"episode": "task-1/2"})
    single = {"type": "call", "episode": "task-1/2", "key": [1], "digest": "x", "kind": "final", "prompt": alone}
    lines.append(single | {"reply": {"text": "None", "seconds": 1.0}})
    lines.append({"type": "end", "episode": "task-1/2", "answer": "None", "error": None, "counters": {}})
    with Journal(path) as journal:
        for line in lines:
            journal.write(line)


@pytest.fixture(scope="module")
def viewer(tmp_path_factory):
    """`memjax view` over a small journal."""
    path = tmp_path_factory.mktemp("journal") / "journal.jsonl"
    write_journal(path)
    listening = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(create_view(path), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    thread.join(30)


def test_a_journal_shows_what_changed_and_where_the_answer_comes_from(viewer, page):
    page.goto(viewer)
    expect(page.locator("#documents")).to_have_text("book.txt")
    expect(page.locator("#answer")).to_have_text("It is 7093 chunk 3")
    words = "Read to the end · 3 of 3 chunks · 50 tokens/s · 2 calls replayed"
    expect(page.locator("#progress-text")).to_have_text(words)
    page.get_by_role("link", name="7093").click()
    expect(page.locator("#memory-title")).to_be_focused()
    expect(page.locator("#change")).to_have_text("4 words added, 5 dropped")
    expect(page.locator("#memory mark")).to_have_text("7093")
    page.get_by_text("What the model was shown").click()
    expect(page.locator("#passage")).to_have_text(f"Known: {MEMORIES[1]} Read: Then the keeper set 7093.")
    expect(page.locator("#passage mark")).to_have_text("7093")
    page.get_by_label("Show what was dropped").uncheck()
    expect(page.locator("#memory")).to_have_text("The code of the door is 7093.")
    page.get_by_role("button", name="The chunk before").click()
    expect(page.locator("#passage")).to_have_text(f"Known: {MEMORIES[0]} Read: Nobody <b>knew</b> it.")
    page.reload()
    assert shown_chunk(page) == 2


def test_episodes_of_a_file_are_told_apart_and_one_without_chunks_is_shown(viewer, page):
    page.goto(viewer)
    expect(page.locator("#switch label")).to_have_text(["Which code? (0)", "Which code? (task-1/2)"])
    page.locator("#switch").get_by_text("task-1/2").click()
    expect(page.locator("#answer")).to_have_text("None")
    expect(page.locator("#progress-text")).to_have_text("Answered")
    expect(page.locator("#memory-box")).to_be_hidden()
    page.get_by_text("What the model was shown").click()
    expect(page.locator("#passage")).to_have_text("Of [40 tokens] which code?")


def test_a_journal_that_is_damaged_or_half_written_is_told_of(viewer, page):
    page.goto(viewer)
    run = """async ([text]) => {
      const { fromJournal } = await import('/page/reading.js');
      try { return fromJournal(text).episodes.length; } catch (error) { return error.message; }
    }"""
    begin = json.dumps({"type": "begin", "episode": "0", "question": "Who?"}) + "\n"
    assert page.evaluate(run, [begin + '{"type": "call", "epi']) == 1
    assert page.evaluate(run, [begin + "x\n"]) == "Line 2 is not a line of a journal."


ANSWERS = [
    ("It is \\boxed{4711}.", "4711"),
    ("\\boxed{1} or \\boxed{a {b} c}", "a {b} c"),
    ("\\boxed{1} then \\boxed{2", "1"),
    ("<think>\\boxed{1}</think> two", "two"),
    ("", ""),
]


@pytest.mark.parametrize(("reply", "expected"), ANSWERS)
def test_the_answer_in_a_reply_is_that_of_the_server(viewer, page, reply, expected):
    page.goto(viewer)
    assert page.evaluate("async (a) => (await import('/page/words.js')).answerOf(a)", reply) == expected
    assert extract_answer(reply) == expected


CASES = [
    ("The cat sat.", "The cat sat.", [["same", "The cat sat."]]),
    ("", "A b", [["added", "A b"]]),
    ("A b", "", [["dropped", "A b"]]),
    ("a b c", "a x c", [["same", "a "], ["dropped", "b "], ["added", "x "], ["same", "c"]]),
    ("it’s 3.5 km", "it’s 4.5 km", [["same", "it’s "], ["dropped", "3.5 "], ["added", "4.5 "], ["same", "km"]]),
    ("東京 駅", "京都 駅", [["dropped", "東京 "], ["added", "京都 "], ["same", "駅"]]),
]


@pytest.mark.parametrize(("before", "after", "expected"), CASES)
def test_a_diff_is_by_words_and_its_parts_are_the_texts(viewer, page, before, after, expected):
    page.goto(viewer)
    run = "async ([a, b]) => (await import('/page/words.js')).diff(a, b)"
    spans = page.evaluate(run, [before, after])
    assert [[span["kind"], span["text"]] for span in spans] == expected


def test_the_words_of_an_answer_lead_to_the_first_memory_that_held_them(viewer, page):
    page.goto(viewer)
    run = "async ([a, m]) => (await import('/page/words.js')).sourced(a, m)"
    spans = page.evaluate(run, ["The KEY is under mats, maybe", ["the key", "key under the mats", "mats"]])
    assert [(span["text"], span["chunk"]) for span in spans] == [
        ("The ", None),
        ("KEY ", 1),
        ("is ", None),
        ("under mats, ", 2),
        ("maybe", None),
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_no_rule_of_accessibility_is_broken_and_nothing_overflows(server, viewer, chromium, book, scheme, width):
    context = chromium.new_context(
        color_scheme=scheme, viewport={"width": width, "height": 800}, reduced_motion="reduce"
    )
    page = context.new_page()
    ask(page, server.url, text=book.read_text()[:1500], questions=f"{QUESTION}\nAnd when?")
    expect(page.get_by_role("heading", name="Answer")).to_be_visible(timeout=60_000)
    check(page, f"reading-{scheme}-{width}")
    page.goto(server.url)
    expect(page.get_by_role("heading", name="Readings")).to_be_visible()
    page.get_by_text("How it reads").click()
    check(page, f"ask-{scheme}-{width}")
    page.goto(viewer)
    page.get_by_role("link", name="7093").click()
    page.get_by_text("What the model was shown").click()
    check(page, f"journal-{scheme}-{width}")
    context.close()


def check(page, name: str) -> None:
    if shots := os.environ.get("MEMJAX_SCREENSHOTS"):
        page.screenshot(path=Path(shots) / f"{name}.png", full_page=True)
    found = axe.Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways"
