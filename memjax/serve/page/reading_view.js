// A reading as it is shown: how far it is, the memory after each piece and what changed in it, and the answers.

import { server } from "./api.js";
import { byId, clear, element, show } from "./dom.js";
import { duration, passage } from "./reading.js";
import { marked, sourced } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";
const BARS_HEIGHT = 100;
const MOST_BARS_AHEAD = 400;
const ANNOUNCE_SECONDS = 4; // pieces may come faster than they can be read out
const RENDER_MILLISECONDS = 50; // a reading that is found again tells all its pieces at once
const ENDED = { done: "Read to the end", stopped: "Stopped", failed: "Failed" };

export class ReadingView {
  /** `trace` is the text of the trace where the reading is one that was opened from a file. */
  constructor(reading, { chunk, trace, onProblem, onResumed }) {
    Object.assign(this, { reading, chunk, trace, onProblem, onResumed });
    this.question = 0;
    this.wanted = ""; // the words of the answer whose source is shown
    this.shown = null; // the piece on screen
    this.announced = 0;
    this.timer = null; // of a rendering that is due
    this.startClock();
    this.bind();
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
    on("stop", () => this.attempt(() => server.stop(this.reading.id)));
    on("resume", () => this.attempt(() => this.resume()));
    on("trace", () => this.attempt(() => this.download()));
    on("forget", () => this.attempt(() => this.forget()));
    on("previous", () => this.go(this.shown - 1));
    on("next", () => this.go(this.shown + 1));
    on("latest", () => this.go(null));
    byId("slider").oninput = (event) => this.go(Number(event.target.value));
    byId("show-dropped").onchange = () => this.showMemory();
    byId("passage-box").ontoggle = () => this.showPassage();
    byId("bars").onclick = (event) => {
      const box = byId("bars").getBoundingClientRect();
      const chunk = Math.ceil(((event.clientX - box.left) / box.width) * this.expected);
      this.go(Math.min(Math.max(chunk, 1), this.reading.steps.length));
    };
  }

  focus() {
    byId("reading-title").focus({ preventScroll: true });
    window.scrollTo(0, 0);
  }

  /** Show a piece by number, or (null) always the latest. */
  select(chunk) {
    this.chunk = chunk;
    if (chunk === null) this.wanted = "";
    if (this.reading.last) this.showMemory();
  }

  /** As `select`, and name it in the page's address. */
  go(chunk) {
    const last = this.reading.steps.length;
    const target = chunk === null || (chunk >= last && this.reading.status === "reading") ? null : clamp(chunk, last);
    const base = this.trace === null ? `#${this.reading.id}` : "#";
    const rest = target === null ? "" : this.trace === null ? `/${target}` : `${target}`;
    history.replaceState(null, "", base + rest);
    this.select(target);
  }

  /** Show what an event changed, soon. */
  update(event) {
    if (event.type === "chunk") this.stepStarted = Date.now();
    this.announce(event);
    this.timer ??= setTimeout(() => this.render(), RENDER_MILLISECONDS);
  }

  render() {
    const { reading } = this;
    this.timer = null;
    byId("documents").textContent = reading.documents.join(", ");
    byId("reading-title").textContent = reading.questions.join(" · ") || "Reading";
    this.showActions();
    this.showSwitch();
    this.showProgress();
    this.showAnswer();
    if (reading.last) this.showMemory();
    show("memory-box", Boolean(reading.last));
    if (reading.status !== "reading") clearInterval(this.clock);
  }

  showActions() {
    const { status, steps, answers } = this.reading;
    const live = this.trace === null;
    show("stop", live && status === "reading");
    show("resume", live && (status === "stopped" || status === "failed"));
    show("trace", live && (steps.length > 0 || answers !== null));
    show("forget", live && status !== "reading");
  }

  showProgress() {
    const { reading } = this;
    const bar = byId("progress");
    const last = reading.last;
    show(bar, reading.status !== "done");
    bar.max = last?.tokens || 1;
    if (last || reading.status !== "reading") bar.value = last?.read ?? 0;
    else bar.removeAttribute("value"); // not known yet
    byId("progress-text").textContent = this.progressWords().filter(Boolean).join(" · ");
    document.title = [
      reading.status === "reading" && last ? `${reading.steps.length}/${last.chunks}` : "",
      reading.questions[0],
      "memjax",
    ].filter(Boolean).join(" · ");
  }

  progressWords() {
    const { status, steps, last, rate, secondsLeft, answers, error } = this.reading;
    const speed = rate ? `${rate < 10 ? rate.toFixed(1) : Math.round(rate).toLocaleString("en")} tokens/s` : "";
    if (!last) return [status === "reading" ? "Reading the first piece" : (ENDED[status] ?? status), error];
    const done = last.read === last.tokens;
    const pieces = `${steps.length} of ${done ? "" : "about "}${last.chunks} pieces`;
    if (status !== "reading") return [error ? `${ENDED[status]}: ${error}` : ENDED[status], pieces, speed];
    if (done && answers === null) return [pieces, "answering"];
    const since = (Date.now() - this.stepStarted) / 1000;
    const left = secondsLeft === null ? "" : `${duration(Math.max(1, secondsLeft - since))} left`;
    return [`${pieces} read`, speed, left];
  }

  /** Offer the questions, where there are several. */
  showSwitch() {
    const { questions } = this.reading;
    const place = byId("switch");
    show(place, questions.length > 1);
    if (this.offered === questions) return; // a rebuilt choice would lose the focus
    this.offered = questions;
    for (const label of place.querySelectorAll("label")) label.remove();
    questions.forEach((question, index) => {
      const input = element("input", { type: "radio", name: "question", checked: index === this.question });
      input.onchange = () => {
        this.question = index;
        this.wanted = "";
        this.showAnswer();
        if (this.reading.last) this.showMemory();
      };
      place.append(element("label", {}, input, element("span", {}, question)));
    });
  }

  showAnswer() {
    const answer = this.reading.answers?.[this.question];
    show("answer-box", Boolean(answer));
    if (!answer) return;
    const text = answer.answer.trim() || "(the reply was empty)";
    const pieces = sourced(text, this.reading.memories(this.question));
    clear(byId("answer")).append(...pieces.map((piece) => this.answerPiece(piece)));
    show("answer-note", pieces.some(({ chunk }) => chunk !== null));
  }

  answerPiece({ chunk, text }) {
    if (chunk === null) return text;
    const word = text.trimEnd();
    const note = element("sup", {}, element("span", { className: "visually-hidden" }, " piece "), `${chunk}`);
    const href = this.trace === null ? `#${this.reading.id}/${chunk}` : `#${chunk}`;
    const link = element("a", { href, className: "source", title: `In the memory since piece ${chunk}` }, word, note);
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
    const { reading } = this;
    const last = reading.steps.length;
    this.shown = clamp(this.chunk ?? last, last);
    const change = reading.change(this.shown, this.question);
    byId("memory-title").textContent = `Memory after piece ${this.shown}`;
    byId("change").textContent = changeWords(change);
    const withDropped = byId("show-dropped").checked;
    const pieces = change.pieces.filter(({ kind }) => withDropped || kind !== "dropped");
    clear(byId("memory")).append(...pieces.map((piece) => this.memoryPiece(piece)));
    if (!reading.memory(this.shown, this.question).trim()) {
      byId("memory").append(element("p", { className: "quiet" }, "Nothing is remembered yet."));
    }
    show("dropped-legend", withDropped);
    const slider = byId("slider");
    Object.assign(slider, { max: Math.max(last, 1), value: this.shown });
    slider.style.width = `${(100 * last) / this.expected}%`; // it ends under the last bar
    slider.setAttribute("aria-valuetext", `${this.shown} of ${last}`);
    byId("previous").disabled = this.shown <= 1;
    byId("next").disabled = this.shown >= last;
    show("latest", this.shown < last);
    this.showBars();
    this.showPassage();
  }

  memoryPiece({ kind, text }) {
    const inner = this.wanted && kind !== "dropped" ? withMarks(text, this.wanted) : [text];
    if (kind === "same") return element("span", {}, ...inner);
    return element(kind === "added" ? "ins" : "del", {}, ...inner);
  }

  /** How many pieces there will be, as far as is known. */
  get expected() {
    const { last, steps } = this.reading;
    return Math.min(Math.max(last?.chunks ?? 1, steps.length), steps.length + MOST_BARS_AHEAD);
  }

  /** For every piece a bar: the words that stayed, those it added, and below the line those it dropped. */
  showBars() {
    const { reading, question, expected } = this;
    const changes = reading.steps.map((_, index) => reading.change(index + 1, question));
    const above = Math.max(1, ...changes.map(({ same, added }) => same + added));
    const below = Math.max(1, ...changes.map(({ dropped }) => dropped));
    const scale = (BARS_HEIGHT - 4) / (above + below);
    const line = above * scale + 2;
    const svg = byId("bars");
    svg.parentElement.style.maxWidth = `${Math.max(6, expected * 3)}rem`; // few pieces are no wide blocks
    svg.setAttribute("viewBox", `0 0 ${expected} ${BARS_HEIGHT}`);
    clear(svg);
    const draw = (index, y, height, name) => {
      if (height <= 0) return;
      const rect = document.createElementNS(SVG, "rect");
      const gap = expected > 150 ? 0.05 : 0.14;
      for (const [key, value] of Object.entries({ x: index + gap, width: 1 - 2 * gap, y, height, class: name })) {
        rect.setAttribute(key, value);
      }
      svg.append(rect);
    };
    draw(this.shown - 1, 0, BARS_HEIGHT, "selected");
    changes.forEach(({ same, added, dropped }, index) => {
      draw(index, line - same * scale, same * scale, "same");
      draw(index, line - (same + added) * scale, added * scale, "added");
      draw(index, line, dropped * scale, "dropped");
    });
    for (let index = changes.length; index < expected; index++) {
      const current = index === changes.length && reading.status === "reading";
      draw(index, line - 3, 3, current ? "current" : "ahead");
    }
  }

  /** Show the prompt of the piece, from the trace: the server's is asked for when it is first needed. */
  async showPassage() {
    if (!byId("passage-box").open || !this.reading.last) return;
    const { shown, question } = this;
    const text = this.reading.questions[question];
    try {
      let found = passage(this.trace ?? this.fetched ?? "", shown, text);
      if (found === null && this.trace === null) {
        this.fetched = await server.trace(this.reading.id);
        found = passage(this.fetched, shown, text);
      }
      if (shown !== this.shown || question !== this.question) return; // another piece was chosen meanwhile
      const place = clear(byId("passage"));
      place.append(...(this.wanted && found ? withMarks(found, this.wanted) : [found ?? "It is not in the trace."]));
      place.querySelector("mark")?.scrollIntoView({ block: "nearest" });
    } catch (error) {
      this.onProblem(error);
    }
  }

  announce(event) {
    const { reading } = this;
    let words = "";
    if (event.type === "chunk") {
      const now = Date.now() / 1000;
      if (now - this.announced < ANNOUNCE_SECONDS) return;
      this.announced = now;
      const change = reading.change(event.chunk, this.question);
      words = `Piece ${event.chunk} of ${event.chunks} is read. ${changeWords(change)}.`;
    } else if (event.type === "answer") {
      words = `Answered: ${event.answers.map(({ answer }) => answer).join("; ")}`;
    } else if (event.type === "end" && event.status !== "done") {
      words = `${ENDED[event.status] ?? ""} ${event.error ?? ""}`;
    }
    if (words) byId("announcer").textContent = words;
  }

  async resume() {
    await server.resume(this.reading.id);
    this.reading.status = "reading";
    this.reading.error = null;
    this.startClock();
    this.render();
    this.onResumed();
    byId("stop").focus();
  }

  async download() {
    const blob = new Blob([await server.trace(this.reading.id)], { type: "application/jsonl" });
    const link = element("a", { href: URL.createObjectURL(blob), download: `${this.reading.id}.jsonl` });
    link.click();
    URL.revokeObjectURL(link.href);
  }

  async forget() {
    if (!confirm("Delete this reading, its text and its answers from the server?")) return;
    await server.forget(this.reading.id);
    location.hash = "";
  }

  async attempt(action) {
    this.onProblem(null);
    try {
      await action();
    } catch (error) {
      this.onProblem(error);
    }
  }
}

function withMarks(text, wanted) {
  return marked(text, wanted).flatMap(({ mark, text: rest }) => (mark ? [element("mark", {}, mark), rest] : [rest]));
}

function changeWords({ pieces, added, dropped }) {
  if (pieces.every(({ kind }) => kind === "same")) return "Nothing changed";
  return `${added} ${added === 1 ? "word" : "words"} added, ${dropped} dropped`;
}

function clamp(number, most) {
  return Math.min(Math.max(number, 1), Math.max(most, 1));
}
