// A run as the page knows it: made of the lines of its journal, as a server tells them or as a file holds them.

import { answerOf, counts, diff, withoutThinking } from "./words.js";

const RATED_STEPS = 5; // the rate is that of the last few chunks

/** What the last drive of an episode did: its calls by key, and its memory after each chunk. */
export class Episode {
  constructor(name, question = "") {
    Object.assign(this, { name, question, end: null, replayed: 0 });
    this.forget();
  }

  forget() {
    this.calls = new Map();
    this.steps = []; // by chunk
    this.diffs = new Map();
  }

  take(call) {
    const key = JSON.stringify(call.key);
    this.calls.set(key, call);
    if (call.kind !== "memory" || !call.chunk) return;
    const { index, start, tokens, document } = call.chunk;
    const { text, seconds } = call.reply;
    const said = withoutThinking(text);
    const memory = said.trim() ? said : this.memory(index); // an empty update keeps the memory
    this.steps[index] = { key, memory, seconds, read: start + tokens, tokens: document };
    for (const chunk of [index + 1, index + 2]) this.diffs.delete(chunk);
  }

  get last() {
    return this.steps.at(-1);
  }

  get answer() {
    return this.end && this.end.error === null ? answerOf(this.end.answer) : null;
  }

  /** Why an answer is empty, as far as the events tell. */
  get emptyReason() {
    const { finish, completion_tokens: tokens, text } = [...this.calls.values()].at(-1)?.reply ?? {};
    const thought = text?.trim() ? "It holds nothing but the model’s thinking. " : "";
    if (finish === "length") return `${thought}It ended at its budget of ${tokens} tokens: give the answer more tokens.`;
    return `${thought}The model ended it by itself: ask in other words, or let it read larger chunks.`;
  }

  get status() {
    if (!this.end) return "stopped";
    return this.end.error === null ? "done" : "failed";
  }

  /** How many chunks there will be: estimated from their size so far, exact at the end. */
  get expected() {
    if (!this.last) return 1;
    const { read, tokens } = this.last;
    return Math.max(this.steps.length, Math.round((tokens / read) * this.steps.length));
  }

  /** The memory after so many chunks. */
  memory(chunk) {
    return this.steps[chunk - 1]?.memory ?? "";
  }

  get memories() {
    return Array.from(this.steps, (step) => step?.memory ?? "");
  }

  /** What a chunk changed in the memory. */
  change(chunk) {
    if (!this.diffs.has(chunk)) {
      const spans = diff(this.memory(chunk - 1), this.memory(chunk));
      this.diffs.set(chunk, { spans, ...counts(spans) });
    }
    return this.diffs.get(chunk);
  }

  /** Document tokens per second of late; null before anything is known. */
  get rate() {
    const from = Math.max(0, this.steps.length - RATED_STEPS);
    const steps = this.steps.slice(from).filter(Boolean);
    const seconds = steps.reduce((sum, step) => sum + step.seconds, 0);
    return seconds ? (this.last.read - (this.steps[from - 1]?.read ?? 0)) / seconds : null;
  }

  /** Seconds until the last chunk is read. */
  get secondsLeft() {
    return this.rate ? (this.last.tokens - this.last.read) / this.rate : null;
  }

  /** The call that a chunk was read with; the last one of an episode without chunks. */
  call(chunk) {
    return this.calls.get(this.steps[chunk - 1]?.key) ?? (this.steps.length ? undefined : [...this.calls.values()].at(-1));
  }
}

export class Reading {
  /** A server's run, or (without `live`) what a file holds. Events do not repeat what is replayed; a file does. */
  constructor({ id = null, documents = [], questions = [], warnings = [], status = "reading", error = null } = {}, live = true) {
    Object.assign(this, { id, documents, warnings, status, error, live });
    this.episodes = questions.map((question, index) => new Episode(`${index}`, question));
    this.lastEvent = -1;
    this.made = new Map(); // calls by digest
    this.chunks = new Map(); // texts by number, as the journal packs them
  }

  /** Take a line of the journal, or one of the two events that a server adds. */
  apply(line) {
    if (line.id !== undefined) this.lastEvent = line.id;
    if (line.type === "run") {
      this.documents = line.documents;
      line.questions.forEach((question, index) => (this.episode(`${index}`).question = question));
    } else if (line.type === "closed") {
      this.status = line.status;
      this.error = line.error;
    } else if (line.type === "chunk") this.chunks.set(line.n, line.text);
    else if (line.type === "begin") this.begin(line);
    else if (line.type === "call") {
      this.made.set(line.digest, line);
      this.episode(line.episode).take(line);
    } else if (line.type === "replay" && this.made.has(line.digest)) {
      this.episode(line.episode).take(this.made.get(line.digest));
      this.episode(line.episode).replayed++;
    } else if (line.type === "end") {
      this.episode(line.episode).end = line;
      this.episode(line.episode).replayed = line.counters?.replayed_calls ?? 0;
    }
  }

  begin(line) {
    const episode = this.episode(line.episode);
    episode.question = line.question;
    if (line.mixed) return; // the drive under way continues with other weights
    Object.assign(episode, { end: null, replayed: 0 });
    if (this.live) Object.assign(this, { status: "reading", error: null });
    else {
      episode.forget();
      this.documents = [line.document?.name].filter(Boolean);
    }
  }

  episode(name) {
    let found = this.episodes.find((episode) => episode.name === name);
    if (!found) this.episodes.push((found = new Episode(name)));
    return found;
  }

  /** What to call each episode: its question, with its name where several have the same. */
  get labels() {
    const questions = this.episodes.map(({ question }) => question);
    const several = (question) => questions.indexOf(question) !== questions.lastIndexOf(question);
    return this.episodes.map(({ name, question }) => (several(question) ? `${question} (${name})` : question));
  }
}

/** The run that a journal tells of. Throws an Error that says which line is none; a half-written last one is left. */
export function fromJournal(text) {
  const reading = new Reading({}, false);
  for (const [index, line] of text.split("\n").slice(0, -1).entries()) {
    try {
      reading.apply(JSON.parse(line));
    } catch {
      throw new Error(`Line ${index + 1} is not a line of a journal.`);
    }
  }
  return reading;
}

/** What the model was shown in a call of a journal. */
export async function promptOf(reading, episode, call) {
  const messages = call.prompt.map(async ({ content }) => {
    const parts = await Promise.all([content].flat().map((part) => textOf(part, reading, episode)));
    return parts.join("");
  });
  return (await Promise.all(messages)).join("\n\n");
}

async function textOf(part, reading, episode) {
  if (typeof part === "string") return part;
  if (part.reply) return episode.calls.get(JSON.stringify(part.reply))?.reply.text ?? "";
  if (part.ids) return `[${(await unpacked(part.ids)).byteLength / 4} tokens]`;
  return new TextDecoder().decode(await unpacked(reading.chunks.get(part.chunk)));
}

/** The bytes of what the journal packs: deflate in base64. */
async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
}

/** Seconds as people say them. */
export function duration(seconds) {
  if (seconds < 60) return `${Math.max(1, Math.round(seconds))} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
