// The page: which view is shown, by the part of its address after #, and the reading that is followed.
//
//   #              ask
//   #run-1234      a run of this server; #run-1234/5 its fifth chunk
//   at /journal    the journal that `memjax view` was called with; #5 its fifth chunk

import { ServerError, eventsOf, limits, server, setKey, viewedJournal } from "./api.js";
import { showAsk } from "./ask_view.js";
import { byId, listen, show } from "./dom.js";
import { say } from "./problem.js";
import { Reading, fromJournal } from "./reading.js";
import { ReadingView } from "./reading_view.js";

const RETRY_SECONDS = [1, 2, 5, 10];
const onFile = location.pathname === "/journal";

let view = null; // of the reading that is shown
let following = null; // ends the stream of its events

async function route() {
  const [first, second] = location.hash.slice(1).split("/");
  const id = onFile ? "file" : first;
  const chunk = Number(onFile ? first : second) || null;
  if (view && view.reading.id === id) {
    view.select(chunk);
    return;
  }
  following?.abort();
  if (view && !id) byId("ask-title").focus();
  view?.close();
  view = null;
  say(null);
  show("ask-view", !id);
  show("reading-view", false);
  document.title = "memjax";
  try {
    if (!id) await showAsk({ onBegun: begin });
    else if (onFile) open(Object.assign(fromJournal(await viewedJournal()), { id }), chunk);
    else await openRun(id, chunk);
  } catch (error) {
    say(error);
  }
}

/** Show a reading that has just begun: its events are the answer to the form. */
function begin(response) {
  following?.abort();
  view?.close();
  const reading = new Reading({ id: response.headers.get("X-Memjax-Run") });
  open(reading, null);
  history.pushState(null, "", `#${reading.id}`);
  follow(reading, response);
}

async function openRun(id, chunk) {
  const run = await server.get(id);
  const reading = new Reading(run);
  open(reading, chunk);
  follow(reading, null);
}

function open(reading, chunk) {
  show("ask-view", false);
  show("reading-view", true);
  view = new ReadingView(reading, { chunk, onBegun: begin, onResumed: () => follow(reading, null) });
  view.focus();
}

/** Take the events of a reading to its end, from the response or from the server, over lost connections. */
async function follow(reading, response) {
  following?.abort();
  const mine = (following = new AbortController());
  let troubled = false; // what is said of the connection is over with the next event
  for (let failures = 0; ; ) {
    try {
      response ??= await server.events(reading.id, reading.lastEvent, mine.signal);
      for await (const event of eventsOf(response)) {
        if (mine.signal.aborted) return;
        if (event.id !== undefined) {
          failures = 0; // it has gone on
          if (troubled) say(null);
          troubled = false;
        }
        reading.apply(event);
        view.update(event);
        if (event.type === "closed" && event.status !== "reading") {
          if (troubled) say(null);
          return;
        }
      }
      // The stream ended before the run: the server shuts down, and continues it after its restart.
      throw new ServerError(0, "The server ended the connection.");
    } catch (error) {
      if (mine.signal.aborted) return;
      if (!(error instanceof ServerError)) throw error;
      if (error.status && error.status < 500) {
        say(error);
        return;
      }
      if (await isOver(reading, mine.signal)) {
        say(null);
        return;
      }
      if (mine.signal.aborted) return;
      const seconds = RETRY_SECONDS[Math.min(failures++, RETRY_SECONDS.length - 1)];
      troubled = true;
      say(error, { more: ` Trying again in ${seconds} s.` });
      await new Promise((resolve) => setTimeout(resolve, seconds * 1000));
      if (mine.signal.aborted) return;
      response = null;
    }
  }
}

/** Whether a reading whose events do not come has ended, as failed or damaged ones do: then nothing is to come. */
async function isOver(reading, signal) {
  try {
    const { status, error } = await server.get(reading.id);
    if (status === "reading" || signal.aborted) return false;
    const closed = { type: "closed", status, error };
    reading.apply(closed);
    view.update(closed);
    return true;
  } catch {
    return false; // it is asked again
  }
}

/** Say which model is served, and wait until it takes requests. */
async function watchServer() {
  const place = byId("model");
  for (;;) {
    try {
      const { model, window: size, max_body: most } = await server.ready();
      limits.body = most;
      place.textContent = `${model} · window of ${size.toLocaleString("en")} tokens`;
      return;
    } catch (error) {
      if (!(error instanceof ServerError)) throw error;
      place.textContent = error.status === 503 ? error.message : "The server cannot be reached.";
      await new Promise((resolve) => setTimeout(resolve, 2000));
    }
  }
}

listen("key-form", "submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value);
  byId("key").value = "";
  byId("key-box").open = false;
  view?.close();
  view = null;
  route();
});
window.addEventListener("hashchange", route);
if (onFile) byId("model").textContent = "A journal of memjax";
else watchServer();
route();
