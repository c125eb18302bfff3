// Which of several models is asked, and which of them are in memory. With one model there is nothing to choose.

import { asked, json } from "./api.js";
import { bytes, count, element, find } from "./format.js";

const EVERY_MS = 3000;
const STATES = {
  unloaded: "not in memory", loading: "loading…", loaded: "in memory", unloading: "leaving memory…", failed: "failed to load",
};

export class Models {
  /** `changed`: called when another model is asked from now on, or that one has come or gone. */
  constructor(changed) {
    this.changed = changed;
    this.list = [];
    this.rows = new Map();
    find("model").addEventListener("change", () => {
      asked.model = find("model").value;
      localStorage.setItem("model", asked.model);
      this.#show();
      this.changed();
    });
  }

  /** Whether models come and go here. */
  get several() {
    return this.list.some((model) => model.aliases !== undefined);
  }

  get current() {
    return this.list.find((model) => model.id === asked.model) ?? this.list[0];
  }

  /** What the server says now. Asks for the key if one is needed. */
  async refresh() {
    const before = this.current?.state;
    this.list = (await json("/v1/models")).data;
    if (this.several) {
      const wanted = asked.model ?? localStorage.getItem("model");
      asked.model = this.list.some((model) => model.id === wanted) ? wanted : this.list[0].id;
      this.timer ??= setInterval(() => this.#look(), EVERY_MS);
    }
    this.#show();
    if (before !== undefined && before !== this.current.state) this.changed();
  }

  /** Nobody is asked for a key because of it. */
  async #look() {
    if (document.hidden || find("key-dialog").open) return;
    try {
      await this.refresh();
    } catch {
      clearInterval(this.timer);
      this.timer = undefined;
    }
  }

  #show() {
    asked.there = !this.several || this.current.state === "loaded";
    const picker = find("model");
    find("picker").hidden = !this.several;
    if (this.several) {
      const options = this.list.map(({ id, state }) => [id, `${id}: ${STATES[state]}`]);
      options.forEach(([id, text], index) => {
        picker.options[index] ??= new Option();
        Object.assign(picker.options[index], { value: id, textContent: text });
      });
      picker.length = options.length;
      picker.value = asked.model;
    }
    find("model-list").replaceChildren(...this.list.map((model) => this.#row(model)));
  }

  /** The same element from look to look, so that focus and clicks stay where they are. */
  #row(model) {
    const known = this.rows.get(model.id) ?? this.#newRow(model);
    known.facts.textContent = ` ${factsOf(model, this.several).join(" · ")}`;
    const there = model.state === "loaded";
    known.button.hidden = !this.several || model.pinned || !["unloaded", "loaded", "failed"].includes(model.state);
    known.button.textContent = there ? "Unload" : "Load";
    known.button.setAttribute("aria-label", `${there ? "Unload" : "Load"} ${model.id}`);
    known.move = there ? "unload" : "load";
    return known.element;
  }

  #newRow({ id, display_name: name }) {
    const facts = element("span");
    const button = element("button", { type: "button", className: "quiet" });
    const row = { facts, button, element: element("li", {}, element("strong", { textContent: name }), facts, button) };
    button.addEventListener("click", () => this.#move(id, row));
    this.rows.set(id, row);
    return row;
  }

  async #move(id, row) {
    row.button.disabled = true;
    setTimeout(() => this.#look(), 200); // what it says by then
    try {
      await json(`/v1/models/${id}/${row.move}`, { method: "POST", body: {} });
      find("live-state").textContent = "";
    } catch (error) {
      find("live-state").textContent = error.message;
    }
    row.button.disabled = false;
    await this.#look();
  }
}

function factsOf(model, several) {
  const { state, error, loading, memory, specprefill } = model;
  const facts = several ? [STATES[state], ...(error ? [error] : [])] : [];
  if (loading?.total) facts.push(`${loading.step} ${loading.done} of ${loading.total}`);
  facts.push(`answers as ${[model.id, ...(model.aliases ?? [])].join(", ")}`);
  if (specprefill) facts.push(...readingOf(model));
  if (several && memory) facts.push(`holds ${bytes(memory.weights + memory.requests + memory.caches)}`);
  return facts;
}

function readingOf({ specprefill, estimates, draft, scorer, context_window: room }) {
  const scoring = draft ? `small model ${draft}` : "no small model";
  return [scorer === "own first layers" ? "its first layers choose what all layers read" : scoring, `window of ${count(room)} tokens`,
    specprefill.available ? "reads selectively" : `reads everything: ${specprefill.reason}`, ...estimatesOf(estimates)];
}

function estimatesOf({ state, share }) {
  if (state === "used") return ["estimates what it does not read"];
  if (state === "fitted") return ["will estimate from its next start on what it does not read"];
  return state === "fitting" ? [`learns in idle time to estimate what it does not read: ${Math.floor(100 * share)} %`] : [];
}
