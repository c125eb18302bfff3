// The conversation: one question at a time, answered once or twice side by side.

import { ApiError, events, json } from "./api.js";
import { count, element, find, percent, seconds } from "./format.js";
import { StageBar } from "./stages.js";

const LONGEST_ANSWER = 2048; // tokens
const LARGEST = 16 * 1024 * 1024; // bytes of a dropped file; the server takes 32 MB in all

export class Conversation {
  constructor(map) {
    this.map = map;
    this.messages = [];
    this.running = null;
    find("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#run((signal) => this.#ask(signal));
    });
    find("score").addEventListener("click", () => this.#run((signal) => this.#explain(this.#next(), signal)));
    find("stop").addEventListener("click", () => this.running?.abort());
    find("clear").addEventListener("click", () => this.#clear());
    find("keep").addEventListener("input", () => { find("keep-value").textContent = `${find("keep").value} %`; });
    find("question").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) find("form").requestSubmit();
    });
    this.#takeFiles();
  }

  #takeFiles() {
    const drop = find("drop");
    find("browse").addEventListener("click", () => find("file").click());
    find("file").addEventListener("change", () => this.#read(find("file").files[0]));
    find("document").addEventListener("input", () => this.#measure());
    for (const name of ["dragenter", "dragover"]) {
      drop.addEventListener(name, (event) => {
        event.preventDefault();
        drop.dataset.over = "yes";
      });
    }
    for (const name of ["dragleave", "drop"]) drop.addEventListener(name, () => delete drop.dataset.over);
    drop.addEventListener("drop", (event) => {
      event.preventDefault();
      const [file] = event.dataTransfer.files;
      if (file) this.#read(file);
    });
  }

  async #read(file) {
    if (!file) return;
    if (file.size > LARGEST) {
      this.#notice(`${file.name} is larger than ${LARGEST >> 20} MB.`);
      return;
    }
    find("document").value = await file.text();
    find("file").value = "";
    this.#notice(`${file.name} is the document now.`);
    this.#measure();
  }

  #measure() {
    const { length } = find("document").value;
    find("document-size").textContent = length ? `${count(length)} characters` : "";
  }

  #notice(text) {
    find("notice").textContent = text;
  }

  #clear() {
    this.running?.abort();
    this.messages = [];
    find("turns").replaceChildren();
    this.map.clear();
    this.#notice("");
    find("question").focus();
  }

  async #run(work) {
    if (this.running || !find("form").reportValidity()) return;
    this.running = new AbortController();
    find("send").disabled = find("score").disabled = true;
    find("stop").hidden = false;
    this.#notice("");
    try {
      await work(this.running.signal);
    } catch (error) {
      this.#notice(error.name === "AbortError" ? "Stopped." : describe(error));
    } finally {
      const focused = document.activeElement;
      this.running = null;
      find("send").disabled = find("score").disabled = false;
      find("stop").hidden = true;
      if (focused === find("stop") || focused === document.body) find("question").focus({ preventScroll: true });
    }
  }

  /** The conversation with the next question; the document goes in front of the first one. */
  #next() {
    const question = find("question").value.trim();
    const text = this.messages.length ? "" : find("document").value.trimEnd();
    return [...this.messages, { role: "user", content: text ? `${text}\n\n${question}` : question }];
  }

  #options(mode) {
    const options = { specprefill_keep_pct: Number(find("keep").value) / 100 };
    if (mode !== "auto") options.specprefill = mode === "sparse";
    return options;
  }

  async #ask(signal) {
    const mode = new FormData(find("form")).get("mode");
    const messages = this.#next();
    const lanes = [new Lane(mode)];
    if (find("compare").checked && mode !== "full") lanes.push(new Lane("full"));
    const question = find("question").value.trim();
    const card = element("li", {}, element("p", { className: "asked", textContent: question }),
      element("div", { className: "lanes" }, ...lanes.map((lane) => lane.element)));
    find("turns").prepend(card);
    await lanes[0].run(messages, this.#options(lanes[0].mode), signal);
    this.messages = [...messages, { role: "assistant", content: lanes[0].text }];
    find("question").value = "";
    await this.#explain(messages, signal, mode);
    if (lanes[1]) await lanes[1].run(messages, this.#options("full"), signal);
  }

  async #explain(messages, signal, mode = new FormData(find("form")).get("mode")) {
    try {
      const body = { messages, ...this.#options(mode) };
      this.map.render(await json("/v1/specprefill/explain", { method: "POST", body, signal }));
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      find("map-facts").textContent = error.message;
    }
  }
}

/** One answer: its stages, its figures and its text. */
class Lane {
  constructor(mode) {
    this.mode = mode;
    this.text = "";
    this.pieces = 0;
    this.cut = this.finished = false;
    this.stages = new StageBar();
    this.ttft = element("span", { className: "figure big", textContent: "…" });
    this.title = element("h3", { textContent: mode === "auto" ? "Auto" : mode === "sparse" ? "Sparse" : "Full" });
    this.facts = element("p", { className: "faint" });
    this.why = element("p", { className: "why", hidden: true });
    this.thought = element("p", { className: "thought faint", hidden: true });
    this.answer = element("p", { className: "answer" });
    const head = element("header", {}, this.title,
      element("p", { className: "ttft" }, this.ttft, element("span", { className: "faint", textContent: "to the first token" })));
    this.element = element("article", { className: "lane" }, head, this.stages.element, this.why, this.thought,
      this.answer, this.facts);
    this.element.setAttribute("aria-live", "polite"); // read out when it is no longer busy
  }

  async run(messages, options, signal) {
    const begun = performance.now();
    const stream = { stream: true, stream_options: { include_usage: true }, return_progress: true };
    const body = { messages, max_tokens: LONGEST_ANSWER, ...stream, ...options };
    this.element.setAttribute("aria-busy", "true");
    try {
      for await (const chunk of events("/v1/chat/completions", { method: "POST", body, signal })) {
        if (chunk.prompt_progress) this.stages.progress(chunk.prompt_progress);
        const choice = chunk.choices?.[0];
        this.#add(choice?.delta ?? {}, begun);
        this.cut ||= choice?.finish_reason === "length";
        if (chunk.specprefill) this.#finish(chunk);
        if (chunk.engine_error) throw new Error(chunk.engine_error.message);
      }
      if (!this.finished) throw new Error("the server closed the connection.");
    } finally {
      if (!this.pieces) this.ttft.textContent = "–";
      this.element.removeAttribute("aria-busy");
    }
  }

  #add({ content, reasoning_content: thought }, begun) {
    if (!content && !thought) return;
    if (!this.pieces) this.ttft.textContent = seconds(performance.now() - begun);
    this.pieces += 1;
    this.text += content ?? "";
    this.answer.textContent = this.text;
    this.thought.append(thought ?? "");
    this.thought.hidden = !this.thought.textContent;
    this.stages.decoding(this.pieces);
  }

  #finish({ specprefill: account, usage }) {
    this.finished = true;
    this.stages.finish(account);
    const sparse = account.mode === "sparse";
    this.title.textContent = sparse ? "Sparse" : "Full";
    const cached = account.cached_tokens ? `, ${count(account.cached_tokens)} of them from the cache` : "";
    const read = `${count(account.kept_tokens)} of ${count(account.prompt_tokens)} prompt tokens`;
    const share = sparse ? ` (${percent(account.kept_tokens / account.prompt_tokens)})` : "";
    this.facts.textContent = `The target read ${read}${share}${cached}; ${count(usage?.completion_tokens ?? this.pieces)} tokens answered${this.cut ? ", cut off there" : ""}.`;
    this.why.hidden = sparse || this.mode === "full";
    this.why.textContent = sparse ? "" : `Why full: ${account.reason}.`;
  }
}

function describe(error) {
  return error instanceof ApiError ? error.message : `The answer broke off: ${error.message}`;
}
