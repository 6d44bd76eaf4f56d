// What the page asks of the server: requests with the API key, and streams of events.

const ANSWERS = "/v1/memory/answers";
const FILES = "/v1/files";
const KEY = "memjax-key";

/** What the server takes, once it has said so: the most bytes of a request. */
export const limits = { body: Infinity };

/** A failure in words; `status` is 0 where the server was not reached. */
export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

export const server = {
  ready: () => json("/ready"),
  list: async () => (await json(ANSWERS)).data,
  get: (id) => json(`${ANSWERS}/${id}`),
  ask: (form) => send(ANSWERS, { method: "POST", body: form }),
  askAgain: (id, questions) => send(ANSWERS, posted({ from_run: id, questions, stream: true })),
  append: (id, file_ids) => json(`${ANSWERS}/${id}/append`, posted({ file_ids })),
  events: (id, after, signal) => send(`${ANSWERS}/${id}/events`, { headers: { "Last-Event-ID": `${after}` }, signal }),
  stop: (id) => json(`${ANSWERS}/${id}/stop`, { method: "POST" }),
  resume: (id) => json(`${ANSWERS}/${id}/resume`, { method: "POST" }),
  forget: (id) => json(`${ANSWERS}/${id}`, { method: "DELETE" }),
  files: async () => (await json(FILES)).data,
  dropFile: (id) => json(`${FILES}/${id}`, { method: "DELETE" }),
  upload: (file) => {
    const form = new FormData();
    form.append("file", file);
    return json(FILES, { method: "POST", body: form });
  },
  journal: async (id) => (await send(`${ANSWERS}/${id}/journal`)).text(),
};

/** The journal that `memjax view` shows. */
export async function viewedJournal() {
  return (await send("/journal.jsonl")).text();
}

/** The events of a stream as they come. */
export async function* eventsOf(response) {
  const decoder = new TextDecoder();
  let text = "";
  for await (const bytes of chunksOf(response.body)) {
    text += decoder.decode(bytes, { stream: true });
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const fields = part.split("\n").map((line) => line.match(/^(\w+): (.*)$/)).filter(Boolean);
      const data = fields.find(([, name]) => name === "data");
      if (data) yield JSON.parse(data[2]);
    }
  }
}

async function* chunksOf(body) {
  const reader = body.getReader(); // Safari's streams are not iterable
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } catch {
    throw new ServerError(0, "The connection to the server was lost.");
  } finally {
    reader.releaseLock();
  }
}

function posted(body) {
  return { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
}

async function json(path, options) {
  return (await send(path, options)).json();
}

async function send(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, "The server cannot be reached.");
  }
  if (response.ok) return response;
  let message = `The server answered ${response.status}.`;
  try {
    const told = (await response.json()).error.message;
    message = `${told[0].toUpperCase()}${told.slice(1)}${/[.!?]$/.test(told) ? "" : "."}`;
  } catch {
    // something between the server and this page answered: its status is all there is
  }
  throw new ServerError(response.status, message);
}
