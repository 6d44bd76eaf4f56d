// What went wrong is said beside what was tried: the box moves there, comes into sight and gets the focus.

import { hasKey } from "./api.js";
import { byId, clear, element, show } from "./dom.js";

const box = byId("problem"); // kept here: the list that it stands in may be emptied

/** Say what went wrong, behind an element or at the top of the page; null says that it is over. */
export function say(error, { beside = null, more = "" } = {}) {
  clear(box);
  show(box, error !== null);
  if (error === null) return;
  if (beside) beside.after(box);
  else document.querySelector("main").prepend(box);
  if (error.status === 401) askForKey();
  else box.append(element("p", {}, `${error.message}${more}`));
  if (error.status === 404 && !beside) box.append(element("p", {}, element("a", { href: "/" }, "Begin another reading")));
  if (!beside || error.status === 401) return;
  box.focus({ preventScroll: true });
  box.scrollIntoView({ block: "center" });
}

/** Do what a button asks for, which cannot be asked twice meanwhile, and say beside it what went wrong. */
export async function attempt(action, button, beside = button.closest(".actions") ?? button) {
  say(null);
  button.disabled = true;
  try {
    await action();
  } catch (error) {
    say(error, { beside });
  } finally {
    button.disabled = false;
  }
}

function askForKey() {
  box.append(element("p", {}, hasKey() ? "This is no key of this server." : "Enter the API key of this server above."));
  show("key-box", true);
  byId("key-box").open = true;
  byId("key").focus();
}
