// The form that begins a reading, and the lists of the readings and the files that there are.

import { ServerError, server } from "./api.js";
import { Documents } from "./documents.js";
import { byId, clear, element, listen, show } from "./dom.js";
import { attempt } from "./problem.js";
import { size } from "./words.js";

const STATES = { reading: "being read", stopped: "stopped", done: "answered", failed: "failed", damaged: "damaged" };

const documents = new Documents(byId("ask-form"));
let callbacks = null;

export async function showAsk(given) {
  callbacks = given;
  await Promise.all([showReadings(), showFiles()]);
}

async function showReadings() {
  const runs = await server.list();
  show("recent", runs.length > 0);
  const told = (run) => [run.documents.join(", "), STATES[run.status], size(run.bytes), when(run.created)];
  clear(byId("readings")).append(
    ...runs.map((run) => {
      const title = run.questions.join(" · ") || run.error;
      const link = element("a", { href: `#${run.id}`, title }, title);
      return element("li", {}, link, element("span", { className: "quiet" }, told(run).filter(Boolean).join(" · ")));
    }),
  );
}

async function showFiles() {
  const files = await server.files();
  show("kept", files.length > 0);
  byId("kept-size").textContent = `${size(files.reduce((sum, file) => sum + file.bytes, 0))} in all`;
  clear(byId("kept-files")).append(...files.map(fileLine));
}

function fileLine(file) {
  const name = file.filename || file.id;
  const read = element("button", { ariaLabel: `Read ${name}` }, "Read");
  read.onclick = () => {
    documents.add([file]);
    byId("questions").focus();
  };
  const drop = element("button", { ariaLabel: `Delete ${name}` }, "Delete");
  drop.onclick = () => {
    if (!confirm(`Delete ${name} from the server? Readings of it keep their own copy.`)) return;
    attempt(async () => {
      await server.dropFile(file.id);
      documents.files = documents.files.filter(({ id }) => id !== file.id);
      documents.show();
      await showFiles();
      byId(byId("kept").hidden ? "ask-title" : "kept-title").focus();
    }, drop);
  };
  const told = [size(file.bytes), when(file.created_at), file.status_details, ...(file.warnings ?? [])];
  const about = element("span", { className: "quiet" }, told.filter(Boolean).join(" · "));
  return element("li", {}, element("span", {}, element("b", {}, name), about), ...(file.status_details ? [drop] : [read, drop]));
}

function when(seconds) {
  return new Date(seconds * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
}

/** The questions in a field, one on each line. Throws an Error where there is none. */
export function questionsIn(field) {
  const questions = field.value.split("\n").map((line) => line.trim()).filter(Boolean);
  if (!questions.length) throw new Error("Write at least one question.");
  return questions;
}

/** The form as the server takes it. Throws an Error that says what is missing. */
function request() {
  const form = documents.form();
  for (const question of questionsIn(byId("questions"))) form.append("questions", question);
  for (const input of byId("ask-form").querySelectorAll(".budgets input")) {
    if (input.value !== "") form.append(input.name, input.value);
  }
  form.append("stream", "true");
  return form;
}

async function ask() {
  const button = byId("ask");
  try {
    const form = request();
    button.textContent = "Sending…";
    const response = await server.ask(form);
    documents.clear();
    byId("ask-form").reset();
    callbacks.onBegun(response);
  } catch (error) {
    if (error instanceof ServerError && error.status === 0 && documents.files.length) {
      error.message += " A file that was changed after you chose it must be chosen again.";
    }
    throw error;
  } finally {
    button.textContent = "Read it";
  }
}

listen("ask-form", "submit", (event) => {
  event.preventDefault();
  attempt(ask, byId("ask"));
});
for (const name of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(name, (event) => {
    event.preventDefault(); // the browser would leave the page for the file
    byId("drop").classList.toggle("over", name === "dragover");
    if (name === "drop" && !byId("ask-view").hidden) documents.add(event.dataTransfer.files);
  });
}
