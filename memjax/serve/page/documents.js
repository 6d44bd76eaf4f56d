// What is to be read: files that are chosen, dropped or kept by the server, and a pasted text, which is sent as a file.

import { limits, server } from "./api.js";
import { element } from "./dom.js";
import { firstWords, size } from "./words.js";

const FORM_BYTES = 4096; // what a form needs beside its files

export class Documents {
  /** Of a form with an input of files, a list with the class `chosen`, and a `.paste` textarea. */
  constructor(form) {
    this.input = form.querySelector("input[type=file]");
    this.list = form.querySelector(".chosen");
    this.text = form.querySelector(".paste");
    this.files = [];
    this.input.addEventListener("change", () => {
      this.add(this.input.files);
      this.input.value = "";
    });
  }

  /** Add Files, or records of files that the server keeps. */
  add(files) {
    this.files.push(...files);
    this.show();
  }

  clear() {
    this.files = [];
    this.text.value = "";
    this.show();
  }

  show() {
    this.list.replaceChildren(...this.files.map((file) => this.line(file)));
  }

  line(file) {
    const name = file.filename ?? file.name;
    const remove = element("button", { type: "button", ariaLabel: `Remove ${name}` }, "Remove");
    remove.addEventListener("click", () => {
      this.files = this.files.filter((other) => other !== file);
      this.show();
      this.input.focus();
    });
    return element("li", {}, element("span", {}, name), element("span", { className: "quiet" }, size(file.bytes ?? file.size)), remove);
  }

  /** The files, the pasted text among them. Throws an Error where there are none, or more than the server takes. */
  chosen() {
    const pasted = this.text.value;
    const all = [...this.files];
    if (pasted.trim()) all.unshift(new File([pasted], `${firstWords(pasted)}.txt`, { type: "text/plain" }));
    if (!all.length) throw new Error("There is nothing to read yet: choose a file, or paste a text.");
    const bytes = all.reduce((sum, file) => sum + (file.id ? 0 : file.size), FORM_BYTES);
    if (bytes > limits.body) {
      throw new Error(`This is ${size(bytes)}; the server takes ${size(limits.body)} at once. Send less, or ask for a larger --max-body.`);
    }
    return all;
  }

  /** A form with the documents. */
  form() {
    const form = new FormData();
    for (const file of this.chosen()) form.append(file.id ? "file_ids" : "file", file.id ?? file);
    return form;
  }

  /** Let the action have the ids of the documents; those uploaded for it are deleted behind it, a run has its own copy. */
  async kept(action) {
    const uploaded = [];
    const ids = [];
    try {
      for (const file of this.chosen()) {
        ids.push(file.id ?? (await server.upload(file)).id);
        if (!file.id) uploaded.push(ids.at(-1));
      }
      return await action(ids);
    } finally {
      await Promise.allSettled(uploaded.map((id) => server.dropFile(id)));
    }
  }
}
