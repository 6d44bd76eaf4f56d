// What can be done with a reading that has ended: take the answer away, ask again, add a document.

import { server } from "./api.js";
import { questionsIn } from "./ask_view.js";
import { Documents } from "./documents.js";
import { byId, element, show } from "./dom.js";
import { attempt } from "./problem.js";

const documents = new Documents(byId("append-form"));

/** Bind the buttons of the reading that is shown. `onBegun` gets the events of a new run, `onAppended` a run's record. */
export function offerNext(view, { onBegun, onAppended }) {
  const { reading } = view;
  byId("copied").textContent = "";
  show("answer-plain", false);
  byId("copy").onclick = () => copy(view.episode.answer);
  byId("save-answer").onclick = () => download(`${name(reading)}.txt`, asText(reading), "text/plain");
  byId("save-json").onclick = () => download(`${name(reading)}.json`, asJson(reading), "application/json");
  byId("again-form").onsubmit = (event) => {
    event.preventDefault();
    attempt(async () => {
      const response = await server.askAgain(reading.id, questionsIn(byId("again")));
      byId("again-form").reset();
      onBegun(response);
    }, byId("ask-again"));
  };
  byId("append-form").onsubmit = (event) => {
    event.preventDefault();
    attempt(async () => {
      const run = await documents.kept((ids) => server.append(reading.id, ids));
      documents.clear();
      byId("append-box").open = false;
      onAppended(run);
    }, byId("append"));
  };
}

/** Save a file. */
export function download(file, content, type) {
  const link = element("a", { href: URL.createObjectURL(new Blob([content], { type })), download: file });
  link.click();
  URL.revokeObjectURL(link.href);
}

/** Put the answer on the clipboard; a page that came over plain HTTP from another machine has none. */
async function copy(answer) {
  const told = byId("copied");
  const plain = byId("answer-plain");
  show(plain, false);
  try {
    await navigator.clipboard.writeText(answer);
    told.textContent = "Copied.";
  } catch {
    show(plain, true);
    plain.value = answer;
    plain.select();
    told.textContent = "The browser lets only pages over HTTPS copy. The answer is selected: press Ctrl+C (⌘C on a Mac).";
  }
}

function name({ id, live }) {
  return live ? id : "answers";
}

/** Questions, answers and last memories. */
function told({ episodes }) {
  return episodes.map(({ question, answer, end, memories }) => ({
    question,
    answer,
    reply: end?.answer ?? null,
    memory: memories.at(-1) ?? "",
    memories,
  }));
}

function asText(reading) {
  const parts = told(reading).map(({ question, answer, memory }) =>
    [question, "", answer ?? "(no answer)", "", "Memory after the last chunk:", memory].join("\n"),
  );
  return `${[`Read: ${reading.documents.join(", ")}`, ...parts].join("\n\n")}\n`;
}

function asJson(reading) {
  return `${JSON.stringify({ run: reading.id, documents: reading.documents, questions: told(reading) }, null, 2)}\n`;
}
