// A reading as the page knows it: made of a server's events, or of the lines of a trace.

import { counts, diff } from "./words.js";

const RATED_STEPS = 5; // the rate is that of the last few pieces

export class Reading {
  constructor({ id = null, documents = [], questions = [], status = "reading" } = {}) {
    Object.assign(this, { id, documents, questions, status, error: null, answers: null });
    this.steps = []; // by piece: numbers, and the memory of every question after it
    this.lastEvent = -1;
    this.diffs = new Map();
  }

  /** Take one event of the server. */
  apply(event) {
    if (event.id !== undefined) this.lastEvent = event.id;
    if (event.type === "run") {
      this.documents = event.documents;
      this.questions = event.questions;
    } else if (event.type === "chunk") {
      this.answers = null; // a document was appended after an answer
      this.status = "reading";
      this.error = null;
      this.steps[event.chunk - 1] = {
        chunks: event.chunks,
        read: event.tokens_read,
        tokens: event.document_tokens,
        seconds: event.seconds ?? 0,
        memories: event.memories.map(({ memory }) => memory),
      };
    } else if (event.type === "answer") {
      this.answers = event.answers;
    } else if (event.type === "end") {
      this.status = event.status;
      this.error = event.error;
    }
  }

  get last() {
    return this.steps.at(-1);
  }

  memory(chunk, question) {
    return this.steps[chunk - 1]?.memories[question] ?? "";
  }

  memories(question) {
    return this.steps.map((_, index) => this.memory(index + 1, question));
  }

  /** What a piece changed in a memory. */
  change(chunk, question) {
    const name = `${chunk}/${question}`;
    if (!this.diffs.has(name)) {
      const pieces = diff(this.memory(chunk - 1, question), this.memory(chunk, question));
      this.diffs.set(name, { pieces, ...counts(pieces) });
    }
    return this.diffs.get(name);
  }

  /** Document tokens per second of late; null before anything is known. */
  get rate() {
    const from = Math.max(0, this.steps.length - RATED_STEPS);
    let seconds = 0;
    let tokens = 0;
    for (let index = from; index < this.steps.length; index++) {
      if (!this.steps[index].seconds) continue;
      seconds += this.steps[index].seconds;
      tokens += this.steps[index].read - (this.steps[index - 1]?.read ?? 0);
    }
    return seconds ? tokens / seconds : null;
  }

  /** Seconds until the last piece is read. */
  get secondsLeft() {
    return this.rate ? (this.last.tokens - this.last.read) / this.rate : null;
  }
}

/** The lines of a trace file. Throws an Error that says which line is none. */
export function traceLines(text) {
  return text
    .split("\n")
    .map((line, index) => [line.trim(), index + 1])
    .filter(([line]) => line)
    .map(([line, number]) => {
      try {
        const record = JSON.parse(line);
        if (typeof record.question === "string" && typeof record.reply === "string") return record;
      } catch {
        // said below
      }
      throw new Error(`Line ${number} is no line of a trace of memjax ask.`);
    });
}

/** The reading that a trace tells of. */
export function fromTrace(text) {
  const lines = traceLines(text);
  const reading = new Reading({ questions: [...new Set(lines.map((line) => line.question))] });
  let answers = [];
  for (const line of lines) {
    const question = reading.questions.indexOf(line.question);
    if (line.chunk === null) {
      answers[question] = { question: line.question, answer: line.answer, reply: line.reply };
    } else {
      answers = [];
      const step = (reading.steps[line.chunk] ??= { memories: [], seconds: 0 });
      Object.assign(step, { read: line.tokens_read, tokens: line.document_tokens });
      step.seconds = Math.max(step.seconds, line.seconds);
      step.memories[question] = line.memory;
    }
  }
  const total = reading.steps.length; // those that a resumed reading had read before the trace was begun are unknown
  reading.steps = Array.from(reading.steps, (step) => ({ read: 0, seconds: 0, memories: [], ...step, chunks: total }));
  reading.answers = answers.length ? answers : null;
  reading.status = reading.answers ? "done" : "stopped";
  return reading;
}

/** What the model was shown at a piece: the last prompt of it in the trace. */
export function passage(text, chunk, question) {
  const line = traceLines(text).findLast((one) => one.chunk === chunk - 1 && one.question === question);
  return line?.prompt.map(({ content }) => content).join("\n\n") ?? null;
}

/** Seconds as people say them. */
export function duration(seconds) {
  if (seconds < 60) return `${Math.max(1, Math.round(seconds))} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
