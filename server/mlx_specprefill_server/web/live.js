// The server's own numbers, once a second while somebody looks.

import { asked, events, json } from "./api.js";
import { ago, bytes, count, element, find, seconds } from "./format.js";
import { explain, word } from "./glossary.js";
import { Plot } from "./plots.js";
import { Timeline } from "./timeline.js";

const CACHE_EVERY_MS = 3000;
const CONSUMERS = [
  ["target_weights", "Large model"],
  ["draft_weights", "Small model"],
  ["requests", "Requests in work"],
  ["prefix_cache", "Texts read before"],
];

export class LivePanel {
  constructor() {
    this.looking = null;
    this.plots = [
      new Plot("Tokens per second", (stats) => stats.tokens_per_second, (value) => value.toFixed(1)),
      new Plot("Requests in work", (stats) => stats.prefilling + stats.decoding, count),
      new Plot("Requests that wait", (stats) => stats.waiting, count),
      new Plot("Memory in use", (stats) => stats.memory.active, bytes),
    ];
    find("plots").replaceChildren(...this.plots.map((plot) => plot.element));
    find("drop-all").addEventListener("click", () => this.#drop());
    for (const head of document.querySelectorAll("#server :is(h2, th)")) explain(head);
  }

  show() {
    if (this.looking) return;
    if (!asked.there) {
      find("live-state").textContent = "The model that is asked is not in memory.";
      return;
    }
    this.looking = new AbortController();
    this.#follow(this.looking.signal);
    this.#refresh();
    this.timer = setInterval(() => this.#refresh(), CACHE_EVERY_MS);
  }

  hide() {
    this.looking?.abort();
    this.looking = null;
    clearInterval(this.timer);
  }

  async #follow(signal) {
    while (!signal.aborted) {
      try {
        for await (const stats of events("/v1/specprefill/stats/stream", { signal })) {
          if (stats.error) {
            find("live-state").textContent = stats.error.message;
            continue;
          }
          find("live-state").textContent = stats.alive ? "" : "The engine has stopped.";
          render(stats);
          for (const plot of this.plots) plot.add(stats);
        }
      } catch (error) {
        if (signal.aborted) return;
        if (error.status === 401) {
          this.#refused(error);
          return;
        }
        find("live-state").textContent = error.message;
      }
      await new Promise((resolve) => setTimeout(resolve, 2000));
    }
  }

  async #refresh() {
    try {
      const signal = this.looking?.signal;
      renderCache((await json("/v1/specprefill/cache", { signal })).data, (id) => this.#drop(id));
    } catch (error) {
      if (error.status === 401) this.#refused(error);
      else if (error.name !== "AbortError") find("live-state").textContent = error.message;
    }
  }

  /** Nobody is asked for the key every few seconds. */
  #refused(error) {
    this.hide();
    find("live-state").textContent = `${error.message} Enter a key with the button above.`;
  }

  async #drop(id) {
    const path = id === undefined ? "/v1/specprefill/cache" : `/v1/specprefill/cache/${encodeURIComponent(id)}`;
    try {
      await json(path, { method: "DELETE" });
    } catch (error) {
      find("live-state").textContent = error.message;
    }
    await this.#refresh();
  }
}

function render(stats) {
  renderNow(stats);
  renderRunning(stats);
  renderMemory(stats.memory);
  const rows = stats.recent.map((answer) => row("recent", recentCells(answer, stats.time)));
  find("recent").replaceChildren(...(rows.length ? rows : [empty("recent", "No answer yet.")]));
  renderVerdicts(stats.verdicts);
}

function renderNow(stats) {
  const lookups = stats.prefix_hits + stats.prefix_misses;
  const tiles = {
    Answering: count(stats.decoding),
    Reading: count(stats.prefilling),
    Waiting: count(stats.waiting),
    "Found in cache": lookups ? `${count(stats.prefix_hits)} of ${count(lookups)}` : "–",
    "Since last step": seconds(1000 * stats.heartbeat_age_s),
  };
  for (const [name, value] of Object.entries(tiles)) fact(find("now"), name, value);
}

/** One lane each, on one axis, from when it came until now. */
function renderRunning({ running, time }) {
  const lanes = new Timeline();
  for (const request of running) {
    const begun = request.stages[0].since;
    const lane = lanes.lane(`${count(request.prompt_tokens)} tokens, for ${seconds(1000 * (time - begun))}`);
    for (const { stage, since } of request.stages) lane.enter(stage === "queued" ? "queue" : stage, 1000 * (since - begun));
    lane.moveTo(1000 * (time - begun), request.total ? request.done / request.total : undefined);
    if (request.completion_tokens) lane.note(`answer, ${count(request.completion_tokens)} tokens so far`);
  }
  find("running").replaceChildren(running.length ? lanes.element
    : element("p", { className: "faint", textContent: "Nothing is being answered." }));
}

function renderMemory(memory) {
  const used = CONSUMERS.reduce((sum, [name]) => sum + memory[name], 0);
  const whole = Math.max(memory.limit ?? 0, used);
  const bars = CONSUMERS.map(([name]) => {
    const bar = element("span", { className: name });
    bar.style.width = `${whole ? (100 * memory[name]) / whole : 0}%`;
    return bar;
  });
  find("memory-bar").replaceChildren(...bars);
  const list = find("memory");
  for (const [name, label] of CONSUMERS) fact(list, label, bytes(memory[name]), name);
  fact(list, "Texts read before, on disk", bytes(memory.prefix_disk));
  fact(list, "Held free for requests", bytes(memory.reserved));
  fact(list, "All arrays", bytes(memory.active));
  fact(list, "Limit", memory.limit ? bytes(memory.limit) : "unknown");
}

/** Writes a value beside its name, into the same element from look to look, so that focus stays where it is. */
function fact(list, name, value, swatch) {
  const known = [...list.children].find(({ dataset }) => dataset.name === name) ?? newFact(list, name, swatch);
  known.lastElementChild.textContent = value;
}

function newFact(list, name, swatch) {
  const swatches = swatch ? [element("span", { className: `swatch ${swatch}` })] : [];
  const made = element("div", {}, element("dt", {}, ...swatches, word(name)), element("dd", { className: "figure" }));
  made.dataset.name = name;
  list.append(made);
  return made;
}

/** Rows stay the same elements from look to look, so that focus and clicks stay where they are. */
function renderCache(entries, drop) {
  const table = find("cache");
  const known = new Map([...table.rows].map((line) => [line.dataset.entry, line]));
  const rows = entries.map((entry) => known.get(entry.id) ?? cacheRow(entry, drop));
  rows.forEach((line, index) => cacheCells(entries[index]).forEach((text, cell) => {
    line.cells[cell].textContent = text;
  }));
  const shown = rows.length ? rows : [empty("cache", "Nothing is kept.")];
  if (shown.length !== table.rows.length || shown.some((line, index) => line !== table.rows[index])) {
    table.replaceChildren(...shown);
  }
  find("drop-all").disabled = !entries.length;
}

const KINDS = { target: "large model", draft: "small model", session: "large model, in parts" };
const cacheCells = (entry) => [entry.id.slice(0, 8), KINDS[entry.kind] ?? entry.kind, count(entry.tokens), bytes(entry.nbytes),
  count(entry.hits), ago(entry.last_use), entry.on_disk ? "yes" : "no"];

function cacheRow(entry, drop) {
  const button = element("button", { type: "button", className: "quiet", textContent: "Drop" });
  button.setAttribute("aria-label", `Drop ${KINDS[entry.kind] ?? entry.kind} entry ${entry.id.slice(0, 8)}`);
  button.addEventListener("click", () => drop(entry.id));
  const line = row("cache", [...cacheCells(entry), button]);
  line.dataset.entry = entry.id;
  return line;
}

function renderVerdicts({ same, differs, unknown }) {
  find("verdicts").hidden = !(same + differs + unknown);
  find("verdicts").textContent = `Selective answers after full reading: ${count(same)} the same, ${count(differs)} different, ${count(unknown)} unknown.`;
}

function recentCells({ ended, finish, completion_tokens: tokens, specprefill: report }, now) {
  if (!report) return [ago(ended, now), "–", "–", "–", "–", "–", "–", finish, "–"];
  const { mode, prompt_tokens: prompt, kept_tokens: kept, cached_tokens: cached, timings, reason } = report;
  return [ago(ended, now), { sparse: "selective", reuse: "edited" }[mode] ?? "full", count(prompt), count(kept), count(cached),
    timings.ttft_ms === null ? "–" : seconds(timings.queue_ms + timings.ttft_ms), count(tokens), finish, reason];
}

const headsOf = (id) => [...find(id).closest("table").tHead.rows[0].cells];

/** A row of a table. Each cell carries its column's name, which a phone shows in it. */
function row(id, cells) {
  const heads = headsOf(id);
  return element("tr", {}, ...cells.map((cell, index) => {
    const made = element("td", { className: heads[index].className }, cell);
    made.dataset.name = heads[index].textContent;
    return made;
  }));
}

function empty(id, text) {
  return element("tr", {}, element("td", { colSpan: headsOf(id).length, className: "faint", textContent: text }));
}
