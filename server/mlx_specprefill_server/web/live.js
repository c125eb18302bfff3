// The server's own numbers, once a second while somebody looks.

import { asked, events, json } from "./api.js";
import { ago, bytes, count, element, find, seconds } from "./format.js";
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
      renderCache((await json("/v1/specprefill/cache", { signal: this.looking?.signal })).data, (id) => this.#drop(id));
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
  const rows = stats.recent.map((answer) => recentRow(answer, stats.time));
  find("recent").replaceChildren(...(rows.length ? rows : [empty(9, "No answer yet.")]));
}

function renderNow(stats) {
  const lookups = stats.prefix_hits + stats.prefix_misses;
  const tiles = {
    Answering: count(stats.decoding),
    Reading: count(stats.prefilling),
    Waiting: count(stats.waiting),
    "Found read before": lookups ? `${count(stats.prefix_hits)} of ${count(lookups)}` : "–",
    "Engine's last step": `${seconds(1000 * stats.heartbeat_age_s)} ago`,
  };
  const parts = Object.entries(tiles).map(([name, value]) =>
    element("div", {}, element("dt", { textContent: name }), element("dd", { className: "figure", textContent: value })));
  find("now").replaceChildren(...parts);
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
  const lines = CONSUMERS.map(([name, label]) => fact(label, bytes(memory[name]), name));
  lines.push(fact("Texts read before, on disk", bytes(memory.prefix_disk)), fact("Held free for requests", bytes(memory.reserved)));
  lines.push(fact("All arrays", bytes(memory.active)), fact("Limit", memory.limit ? bytes(memory.limit) : "unknown"));
  find("memory").replaceChildren(...lines);
}

function fact(label, value, swatch) {
  const term = element("dt", {}, ...(swatch ? [element("span", { className: `swatch ${swatch}` })] : []), label);
  return element("div", {}, term, element("dd", { className: "figure", textContent: value }));
}

/** Rows stay the same elements from look to look, so that focus and clicks stay where they are. */
function renderCache(entries, drop) {
  const table = find("cache");
  const known = new Map([...table.rows].map((line) => [line.dataset.entry, line]));
  const rows = entries.map((entry) => known.get(entry.id) ?? cacheRow(entry, drop));
  rows.forEach((line, index) => cacheCells(entries[index]).forEach((text, cell) => {
    line.cells[cell].textContent = text;
  }));
  const shown = rows.length ? rows : [empty(8, "Nothing is kept.")];
  if (shown.length !== table.rows.length || shown.some((line, index) => line !== table.rows[index])) {
    table.replaceChildren(...shown);
  }
  find("drop-all").disabled = !entries.length;
}

const KINDS = { target: "large model", draft: "small model", session: "conversation read in parts" };
const cacheCells = (entry) => [entry.id.slice(0, 8), KINDS[entry.kind] ?? entry.kind, count(entry.tokens), bytes(entry.nbytes),
  count(entry.hits), ago(entry.last_use), entry.on_disk ? "yes" : "no"];

function cacheRow(entry, drop) {
  const button = element("button", { type: "button", className: "quiet", textContent: "Drop" });
  button.setAttribute("aria-label", `Drop ${KINDS[entry.kind] ?? entry.kind} entry ${entry.id.slice(0, 8)}`);
  button.addEventListener("click", () => drop(entry.id));
  const line = row([...cacheCells(entry), button], [2, 3, 4]);
  line.dataset.entry = entry.id;
  return line;
}

function recentRow(answer, now) {
  const account = answer.specprefill;
  if (!account) return row([ago(answer.ended, now), "–", "–", "–", "–", "–", "–", answer.finish, ""], []);
  return row([ago(answer.ended, now), account.mode === "sparse" ? "selective" : "full", count(account.prompt_tokens), count(account.kept_tokens),
    count(account.cached_tokens), seconds(account.timings.queue_ms + account.timings.ttft_ms),
    count(answer.completion_tokens), answer.finish, account.reason], [2, 3, 4, 5, 6]);
}

function row(cells, numbers) {
  return element("tr", {}, ...cells.map((cell, index) =>
    element("td", { className: numbers.includes(index) ? "number figure" : "" }, cell)));
}

function empty(columns, text) {
  return element("tr", {}, element("td", { colSpan: columns, className: "faint", textContent: text }));
}
