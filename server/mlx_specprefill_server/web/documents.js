// The documents that go with the next question: chips with their tokens, and how much of the window all of it takes.

import { ApiError, asked, json } from "./api.js";
import { count, element, find } from "./format.js";
import { textOf, UnreadableError } from "./reading.js";

const LONG_PASTE = 2000; // characters; what is longer becomes a document
const SHOWN = 100_000; // characters of a document; browsers need seconds to lay out megabytes
const PAUSE_MS = 400; // of typing, before the question is counted

/** Tokens of a text; Infinity where the server finds it too long to count. */
export async function tokensOf(text) {
  if (!text) return 0;
  try {
    if (!asked.there) throw new Error("the model is not in memory, where its tokenizer is");
    return (await json("/tokenize", { method: "POST", body: { content: text } })).count;
  } catch (error) {
    if (error instanceof ApiError && error.status === 400) return Infinity;
    throw error;
  }
}

/** The same; estimated where there is no server to ask: English has about 4 characters per token. */
export const sizeOf = (text) => tokensOf(text).catch(() => Math.ceil(text.length / 4));

export class Documents {
  /** `changed`: called after every change; `tell`: shows a sentence; `begins`: awaited before one is added. */
  constructor(changed, tell, begins) {
    this.list = [];
    this.window = Infinity; // tokens of the model's context
    this.before = 0; // tokens of the conversation so far
    this.question = 0; // tokens of what is typed
    this.changed = changed;
    this.tell = tell;
    this.begins = begins;
    find("browse").addEventListener("click", () => find("file").click());
    find("file").addEventListener("change", async () => {
      await this.take(find("file").files);
      find("file").value = "";
    });
    find("shorten").addEventListener("click", () => this.#shorten());
    find("question").addEventListener("paste", (event) => this.#paste(event));
    find("question").addEventListener("input", () => this.#typed());
    this.#drops(document, find("ask"));
  }

  /** Files are caught wherever they are dropped; `place` shows that they would be. */
  #drops(page, place) {
    for (const name of ["dragenter", "dragover"]) {
      page.addEventListener(name, (event) => {
        event.preventDefault();
        place.dataset.over = "yes";
      });
    }
    for (const name of ["dragleave", "drop"]) page.addEventListener(name, () => delete place.dataset.over);
    page.addEventListener("drop", (event) => {
      event.preventDefault();
      this.take(event.dataTransfer.files);
    });
  }

  async #paste(event) {
    const text = event.clipboardData.getData("text/plain");
    if (text.length <= LONG_PASTE) return;
    event.preventDefault();
    await this.begins();
    const [body, question] = find("question").value.trim() ? [text, ""] : parted(text);
    this.add("Pasted text", body);
    if (question) {
      find("question").value = question;
      this.measure();
    }
    this.tell(`The long text that you pasted is a document now${question ? ", and its question stands below" : ""}.`);
  }

  #typed() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.measure(), PAUSE_MS);
  }

  /** Files, one after the other; those that are no text are named. */
  async take(files) {
    const left = [];
    await this.begins();
    for (const file of files) {
      this.tell(`Reading ${file.name} …`);
      try {
        if (!this.add(file.name, await textOf(file))) left.push(`${file.name} is here already.`);
      } catch (error) {
        if (!(error instanceof UnreadableError)) throw error;
        left.push(error.message);
      }
    }
    this.tell(left.join(" "));
  }

  /** Whether it was not there yet, under the same name. */
  add(name, text) {
    find("question").focus({ preventScroll: true });
    if (this.list.some((one) => one.name === name && one.text === text)) return false;
    const added = { name, text, tokens: null };
    this.list.push(added);
    this.#recount(added);
    return true;
  }

  set(list) {
    this.list = list;
    for (const one of list) if (one.tokens === null) this.#recount(one);
    this.show();
  }

  async #recount(one) {
    this.show();
    this.changed();
    const { text } = one;
    const tokens = await sizeOf(text);
    if (one.text === text) one.tokens = tokens;
    this.show();
    this.changed();
  }

  /** Counts what is typed. */
  async measure() {
    this.question = await sizeOf(find("question").value);
    this.show();
    this.changed();
  }

  get tokens() {
    return this.before + this.question + this.list.reduce((sum, one) => sum + (one.tokens ?? 0), 0);
  }

  /** Why nothing can be asked like this; empty where it can. */
  get excess() {
    if (this.tokens < this.window) return "";
    const over = Number.isFinite(this.tokens) ? `${count(this.tokens - this.window + 1)} tokens` : "far";
    return `Too long by ${over}: the model's window holds ${count(this.window)} tokens. Remove a document, shorten it, or begin a new conversation.`;
  }

  show() {
    find("documents").replaceChildren(...this.list.map((one) => this.#chip(one)));
    find("documents").hidden = !this.list.length;
    const all = this.tokens;
    const known = Number.isFinite(this.window);
    const taken = Number.isFinite(all) ? `${count(all)} of` : "far more than";
    find("room").textContent = known && all ? `${taken} ${count(this.window)} tokens` : "";
    find("excess").textContent = this.excess;
    find("shorten").hidden = !this.excess || !this.list.length;
  }

  #chip(one) {
    const button = element("button", { type: "button", className: "quiet", textContent: "×" });
    button.setAttribute("aria-label", `Remove ${one.name}`);
    button.addEventListener("click", () => {
      this.list = this.list.filter((other) => other !== one);
      this.show();
      this.changed();
      find("question").focus();
    });
    return chip(one, button);
  }

  /** Cuts the longest document until all of it fits, with a quarter of the window left for the answer. */
  async #shorten() {
    const longest = this.list.reduce((one, other) => (one.text.length > other.text.length ? one : other));
    const room = 0.75 * this.window - (this.tokens - longest.tokens || this.before + this.question);
    if (room < 1) {
      this.tell("There is no room for a document in this conversation. Begin a new one.");
      return;
    }
    if (!Number.isFinite(longest.tokens)) longest.text = longest.text.slice(0, 8 * this.window);
    while ((longest.tokens = await tokensOf(longest.text)) > room) {
      const share = Number.isFinite(longest.tokens) ? Math.min(0.98, room / longest.tokens) : 0.5;
      longest.text = longest.text.slice(0, Math.floor(longest.text.length * share));
    }
    longest.name = longest.name.replace(/( \(beginning\))?$/, " (beginning)");
    this.show();
    this.changed();
  }
}

/** A text without the question that is its last or first line, and that question; empty where there is none. */
function parted(whole) {
  const text = whole.trim();
  const end = text.lastIndexOf("\n"), start = text.indexOf("\n");
  const asks = (line) => line.length < LONG_PASTE / 4 && line.trim().endsWith("?");
  if (end < 0) return [whole, ""];
  if (asks(text.slice(end))) return [text.slice(0, end).trimEnd(), text.slice(end).trim()];
  return asks(text.slice(0, start)) ? [text.slice(start).trimStart(), text.slice(0, start).trim()] : [whole, ""];
}

/** As much of a text as a person looks through. */
export const shown = (text) => (text.length > SHOWN ? `${text.slice(0, SHOWN)}\n\n… and ${count(text.length - SHOWN)} more characters` : text);

/** The text as the model gets it. */
function preview(name, text) {
  find("preview-title").textContent = name;
  find("preview-text").textContent = shown(text);
  find("preview").showModal();
  find("preview-text").scrollTop = 0;
}

export function chip({ name, text, tokens }, ...more) {
  const size = tokens === null ? "…" : Number.isFinite(tokens) ? `${count(tokens)} tokens` : "too long";
  const open = element("button", { type: "button", className: "quiet name", textContent: name, title: `Read ${name}` });
  open.addEventListener("click", () => preview(name, text));
  return element("li", { className: "chip" }, open,
    element("span", { className: "faint figure", textContent: size }), ...more);
}
