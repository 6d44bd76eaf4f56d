// The form that begins a reading, and the list of those that there are.

import { ServerError, server } from "./api.js";
import { byId, clear, element, listen, show } from "./dom.js";

const STATES = { reading: "being read", stopped: "stopped", done: "answered", failed: "failed", damaged: "damaged" };

let files = [];
let callbacks = null;

export async function showAsk(given) {
  callbacks = given;
  const runs = await server.list();
  const list = clear(byId("readings"));
  show("recent", runs.length > 0);
  for (const run of runs) {
    list.append(
      element(
        "li",
        {},
        element("a", { href: `#${run.id}` }, run.questions.join(" · ") || run.error),
        element("span", { className: "quiet" }, [run.documents.join(", "), STATES[run.status], when(run)].join(" · ")),
      ),
    );
  }
}

function when({ created }) {
  return new Date(created * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
}

function choose(added) {
  files = [...files, ...added];
  const list = clear(byId("chosen"));
  for (const file of files) {
    const remove = element("button", { type: "button" }, "Remove");
    remove.setAttribute("aria-label", `Remove ${file.name}`);
    remove.addEventListener("click", () => {
      files = files.filter((other) => other !== file);
      choose([]);
      byId("files").focus();
    });
    list.append(element("li", {}, element("span", {}, file.name), element("span", { className: "quiet" }, size(file)), remove));
  }
}

function size({ size: bytes }) {
  return bytes < 1e6 ? `${Math.max(1, Math.round(bytes / 1000))} kB` : `${(bytes / 1e6).toFixed(1)} MB`;
}

/** The form as the server takes it. Throws an Error that says what is missing. */
function request() {
  const questions = byId("questions").value.split("\n").map((line) => line.trim()).filter(Boolean);
  const text = byId("text").value;
  if (!files.length && !text.trim()) throw new Error("There is nothing to read yet: choose a file, or paste a text.");
  if (!questions.length) throw new Error("Write at least one question.");
  const form = new FormData();
  if (text.trim()) form.append("text", text);
  for (const file of files) form.append("file", file);
  for (const question of questions) form.append("questions", question);
  for (const input of byId("ask-form").querySelectorAll(".budgets input")) {
    if (input.value !== "") form.append(input.name, input.value);
  }
  form.append("stream", "true");
  return form;
}

async function submit(event) {
  event.preventDefault();
  const button = byId("ask");
  callbacks.onProblem(null);
  try {
    const form = request();
    button.disabled = true;
    button.textContent = "Sending…";
    const response = await server.ask(form);
    files = [];
    choose([]);
    byId("ask-form").reset();
    callbacks.onBegun(response);
  } catch (error) {
    if (error instanceof ServerError && error.status === 0 && files.length) {
      error.message += " A file that was changed after you chose it must be chosen again.";
    }
    callbacks.onProblem(error);
  } finally {
    button.disabled = false;
    button.textContent = "Read it";
  }
}

listen("ask-form", "submit", submit);
listen("files", "change", (event) => {
  choose(event.target.files);
  event.target.value = "";
});
for (const name of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(name, (event) => {
    event.preventDefault(); // the browser would leave the page for the file
    byId("drop").classList.toggle("over", name === "dragover");
    if (name === "drop" && !byId("ask-view").hidden) choose(event.dataTransfer.files);
  });
}
