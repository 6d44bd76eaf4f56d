// A run as it is shown: how far it is, the memory after each chunk and what changed in it, and the answers.

import { server } from "./api.js";
import { drawBars } from "./bars.js";
import { byId, clear, element, show } from "./dom.js";
import { download, offerNext } from "./next.js";
import { attempt, say } from "./problem.js";
import { Episode, duration, fromJournal, promptOf } from "./reading.js";
import { marked, sourced } from "./words.js";

const MOST_BARS_AHEAD = 400;
const ANNOUNCE_SECONDS = 4; // chunks may come faster than they can be read out
const RENDER_MILLISECONDS = 50; // a run that is found again tells all its chunks at once
const FEW_SECONDS = 5;
const ENDED = { done: "Read to the end", stopped: "Stopped", failed: "Failed", damaged: "Damaged" };

export class ReadingView {
  constructor(reading, { chunk, onBegun, onResumed }) {
    Object.assign(this, { reading, chunk, onResumed });
    this.question = 0;
    this.journal = reading.live ? null : reading; // with prompts, which events have not
    this.wanted = ""; // the words of the answer whose source is shown
    this.shown = null; // the chunk on screen
    this.announced = 0;
    this.timer = null; // of a rendering that is due
    this.startClock();
    this.bind();
    offerNext(this, { onBegun, onAppended: (run) => this.goOn(run) });
    this.render();
  }

  /** Let go of the page. */
  close() {
    clearInterval(this.clock);
    clearTimeout(this.timer);
  }

  startClock() {
    clearInterval(this.clock);
    this.clock = setInterval(() => this.showProgress(), 1000);
    this.stepStarted = Date.now();
  }

  bind() {
    const on = (id, action) => (byId(id).onclick = action); // one view at a time: the last takes over
    const tried = (id, action) => on(id, () => attempt(action, byId(id)));
    tried("stop", () => server.stop(this.reading.id));
    tried("resume", () => this.resume());
    tried("journal", async () => download(`${this.reading.id}.jsonl`, await server.journal(this.reading.id), "application/jsonl"));
    tried("forget", () => this.forget());
    on("whole-title", () => this.showTitle(!byId("reading-title").classList.contains("whole")));
    on("previous", () => this.go(this.shown - 1));
    on("next", () => this.go(this.shown + 1));
    on("latest", () => this.go(null));
    byId("slider").oninput = (event) => this.go(Number(event.target.value));
    byId("show-dropped").onchange = () => this.showMemory();
    byId("passage-box").ontoggle = () => this.showPassage();
    byId("bars").onclick = (event) => {
      const box = byId("bars").getBoundingClientRect();
      const chunk = Math.ceil(((event.clientX - box.left) / box.width) * this.expected);
      this.go(Math.min(Math.max(chunk, 1), this.episode.steps.length));
    };
  }

  /** The episode of the question that is shown. */
  get episode() {
    return this.reading.episodes[this.question] ?? new Episode("");
  }

  /** How the run stands, or in a file the episode. */
  get status() {
    return this.reading.live ? this.reading.status : this.episode.status;
  }

  focus() {
    byId("reading-title").focus({ preventScroll: true });
    window.scrollTo(0, 0);
  }

  /** Show a chunk by number, or (null) always the latest. */
  select(chunk) {
    this.chunk = chunk;
    if (chunk === null) this.wanted = "";
    this.showMemory();
  }

  /** As `select`, and name it in the page's address. */
  go(chunk) {
    const last = this.episode.steps.length;
    const target = chunk === null || (chunk >= last && this.status === "reading") ? null : clamp(chunk, last);
    history.replaceState(null, "", this.address(target));
    this.select(target);
  }

  /** The address of a chunk; of the run for null. */
  address(chunk) {
    if (!this.reading.live) return `#${chunk ?? ""}`;
    return `#${this.reading.id}${chunk === null ? "" : `/${chunk}`}`;
  }

  /** Show what an event changed, soon. */
  update(event) {
    if (event.chunk) this.stepStarted = Date.now();
    this.announce(event);
    this.timer ??= setTimeout(() => this.render(), RENDER_MILLISECONDS);
  }

  render() {
    const { reading } = this;
    this.timer = null;
    byId("documents").textContent = reading.documents.join(", ");
    show("warnings", reading.warnings.length > 0);
    clear(byId("warnings")).append(...reading.warnings.map((warning) => element("li", {}, warning)));
    this.showTitle();
    this.showActions();
    this.showSwitch();
    this.showProgress();
    this.showAnswer();
    this.showMemory();
    if (this.status !== "reading") clearInterval(this.clock);
  }

  /** The question that is shown, cut to two lines where it is long, unless all of it is asked for. */
  showTitle(whole = byId("reading-title").classList.contains("whole")) {
    const title = byId("reading-title");
    const button = byId("whole-title");
    const { question } = this.episode;
    if (title.textContent !== question) title.textContent = question;
    title.classList.toggle("whole", whole);
    show(button, whole || title.scrollHeight > title.clientHeight + 2);
    button.ariaExpanded = `${whole}`;
    button.textContent = whole ? "Show less" : "Show the whole question";
  }

  showActions() {
    const { live, status, episodes } = this.reading;
    show("stop", live && status === "reading");
    show("resume", live && (status === "stopped" || status === "failed"));
    show("journal", live && episodes.some(({ calls }) => calls.size > 0));
    show("forget", live && status !== "reading");
    show("new-reading", live);
    show("next-steps", live && (status === "done" || status === "stopped"));
  }

  showProgress() {
    const { episode, status } = this;
    const { last } = episode;
    const bar = byId("progress");
    show(bar, status !== "done");
    bar.max = last?.tokens || 1;
    if (last || status !== "reading") bar.value = last?.read ?? 0;
    else bar.removeAttribute("value"); // not known yet
    byId("progress-text").textContent = this.progressWords().filter(Boolean).join(" · ");
    document.title = [
      status === "reading" && last ? `${episode.steps.length}/${episode.expected}` : "",
      this.reading.episodes[0]?.question,
      "memjax",
    ].filter(Boolean).join(" · ");
  }

  progressWords() {
    const { episode, status } = this;
    const { steps, last, rate, secondsLeft, end, replayed } = episode;
    const error = (this.reading.live && this.reading.error) || end?.error;
    const speed = rate ? `${rate < 10 ? rate.toFixed(1) : Math.round(rate).toLocaleString("en")} tokens/s` : "";
    const again = replayed ? `${replayed} ${replayed === 1 ? "call" : "calls"} replayed` : "";
    if (!last && status === "reading") return ["Reading the first chunk"];
    if (!last) return [status === "done" ? "Answered" : ENDED[status], error, again];
    const done = last.read === last.tokens;
    const chunks = `${steps.length} of ${done ? "" : "about "}${episode.expected} chunks`;
    if (status !== "reading") return [error ? `${ENDED[status]}: ${error}` : ENDED[status], chunks, speed, again];
    if (end) return [chunks, error ? `failed: ${error}` : "answered", again];
    if (done) return [chunks, "answering"];
    const since = (Date.now() - this.stepStarted) / 1000;
    const left = secondsLeft === null ? "" : `${about(secondsLeft - since)} left`;
    return [`${chunks} read`, speed, left];
  }

  /** Offer the questions, where there are several. */
  showSwitch() {
    const { labels } = this.reading;
    const place = byId("switch");
    show(place, labels.length > 1);
    if (this.offered === labels.join("\n")) return; // a rebuilt choice would lose the focus
    this.offered = labels.join("\n");
    for (const label of place.querySelectorAll("label")) label.remove();
    labels.forEach((label, index) => {
      const input = element("input", { type: "radio", name: "question", checked: index === this.question });
      input.onchange = () => {
        this.question = index;
        this.wanted = "";
        this.render();
      };
      place.append(element("label", {}, input, element("span", {}, label)));
    });
  }

  showAnswer() {
    const { answer, memories } = this.episode;
    show("answer-box", answer !== null);
    if (answer === null) return;
    byId("empty-note").textContent = answer ? "" : this.episode.emptyReason;
    const spans = answer ? sourced(answer, memories) : [{ chunk: null, text: "(the reply was empty)" }];
    show("copy", answer !== "");
    clear(byId("answer")).append(...spans.map((span) => this.answerSpan(span)));
    show("answer-note", spans.some(({ chunk }) => chunk !== null));
  }

  answerSpan({ chunk, text }) {
    if (chunk === null) return text;
    const word = text.trimEnd();
    const note = element("sup", {}, element("span", { className: "visually-hidden" }, " chunk "), `${chunk}`);
    const title = `In the memory since chunk ${chunk}`;
    const link = element("a", { href: this.address(chunk), className: "source", title }, word, note);
    link.onclick = (event) => {
      event.preventDefault();
      this.wanted = word;
      this.go(chunk);
      byId("memory-title").focus();
    };
    const both = document.createDocumentFragment();
    both.append(link, text.slice(word.length));
    return both;
  }

  showMemory() {
    const { episode, expected } = this;
    const last = episode.steps.length;
    this.shown = clamp(this.chunk ?? last, last);
    show("memory-box", last > 0);
    show("passage-box", episode.calls.size > 0);
    this.showPassage();
    if (!last) return;
    const change = episode.change(this.shown);
    byId("memory-title").textContent = `Memory after chunk ${this.shown}`;
    byId("change").textContent = changeWords(change);
    const withDropped = byId("show-dropped").checked;
    const spans = change.spans.filter(({ kind }) => withDropped || kind !== "dropped");
    clear(byId("memory")).append(...spans.map((span) => this.memorySpan(span)));
    if (!episode.memory(this.shown).trim()) {
      byId("memory").append(element("p", { className: "quiet" }, "Nothing is remembered yet."));
    }
    show("dropped-legend", withDropped);
    const slider = byId("slider");
    Object.assign(slider, { max: Math.max(last, 1), value: this.shown });
    slider.style.width = `${(100 * last) / expected}%`; // it ends under the last bar
    slider.setAttribute("aria-valuetext", `${this.shown} of ${last}`);
    byId("previous").disabled = this.shown <= 1;
    byId("next").disabled = this.shown >= last;
    show("latest", this.shown < last);
    const changes = Array.from(episode.steps, (_, index) => episode.change(index + 1));
    const most = drawBars(byId("bars"), changes, { expected, shown: this.shown, isReading: this.status === "reading" });
    byId("scale").textContent = `The highest is ${most} ${most === 1 ? "word" : "words"}.`;
  }

  memorySpan({ kind, text }) {
    const inner = this.wanted && kind !== "dropped" ? withMarks(text, this.wanted) : [text];
    if (kind === "same") return element("span", {}, ...inner);
    return element(kind === "added" ? "ins" : "del", {}, ...inner);
  }

  /** How many bars are drawn: one for each chunk that is read or expected. */
  get expected() {
    return Math.min(this.episode.expected, this.episode.steps.length + MOST_BARS_AHEAD);
  }

  /** Show the prompt of the chunk, from the journal: the server's is asked for when it is first needed. */
  async showPassage() {
    if (!byId("passage-box").open || !this.episode.calls.size) return;
    const { shown, episode } = this;
    const find = () => this.journal?.episodes.find(({ name }) => name === episode.name)?.call(shown);
    try {
      if (!find() && this.reading.live) this.journal = fromJournal(await server.journal(this.reading.id));
      const call = find();
      const kept = this.journal?.episode(episode.name);
      const found = call ? await promptOf(this.journal, kept, call) : "It is not in the journal.";
      if (shown !== this.shown || episode !== this.episode) return; // another chunk was chosen meanwhile
      const place = clear(byId("passage"));
      place.append(...(this.wanted ? withMarks(found, this.wanted) : [found]));
      place.querySelector("mark")?.scrollIntoView({ block: "nearest" });
    } catch (error) {
      say(error, { beside: byId("passage") });
    }
  }

  announce(event) {
    const { episode } = this;
    let words = "";
    if (event.episode !== episode.name && event.type !== "closed") return;
    if (event.chunk) {
      const now = Date.now() / 1000;
      if (now - this.announced < ANNOUNCE_SECONDS) return;
      this.announced = now;
      const chunk = event.chunk.index + 1;
      words = `Chunk ${chunk} of ${episode.expected} is read. ${changeWords(episode.change(chunk))}.`;
    } else if (event.type === "end" && episode.answer !== null) {
      words = `Answered: ${episode.answer}`;
    } else if (event.type === "closed" && event.status !== "done") {
      words = `${ENDED[event.status] ?? ""} ${event.error ?? ""}`;
    }
    if (words) byId("announcer").textContent = words;
  }

  async resume() {
    await server.resume(this.reading.id);
    this.goOn();
  }

  /** The run is read on: its events are followed again. */
  goOn({ documents, warnings } = this.reading) {
    Object.assign(this.reading, { documents, warnings, status: "reading", error: null });
    for (const episode of this.reading.episodes) episode.end = null;
    this.startClock();
    this.render();
    this.onResumed();
    byId("stop").focus();
  }

  async forget() {
    if (!confirm("Delete this reading, its text and its answers from the server?")) return;
    await server.forget(this.reading.id);
    location.hash = "";
  }
}

function withMarks(text, wanted) {
  return marked(text, wanted).flatMap(({ mark, text: rest }) => (mark ? [element("mark", {}, mark), rest] : [rest]));
}

/** How long it takes, which is estimated: the last seconds are not counted down. */
function about(seconds) {
  return seconds <= FEW_SECONDS ? "a few seconds" : `about ${duration(seconds)}`;
}

function changeWords({ spans, added, dropped }) {
  if (spans.every(({ kind }) => kind === "same")) return "Nothing changed";
  return `${added} ${added === 1 ? "word" : "words"} added, ${dropped} dropped`;
}

function clamp(number, most) {
  return Math.min(Math.max(number, 1), Math.max(most, 1));
}
