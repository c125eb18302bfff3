// The bar that shows where the time of one answer goes: it moves while the server works, and ends to scale.

import { count, element, seconds } from "./format.js";

const STAGES = ["cached", "draft", "select", "prefill", "decode"];

export class StageBar {
  constructor() {
    this.parts = {};
    const bar = element("div", { className: "bar" });
    const list = element("ol");
    bar.setAttribute("aria-hidden", "true");
    list.setAttribute("aria-label", "Stages");
    for (const name of STAGES) {
      const value = element("span", { className: "figure", textContent: "–" });
      const fill = element("span", { className: `fill ${name}` });
      const track = element("span", { className: "track" }, fill);
      const item = element("li", {}, element("span", { className: `name ${name}`, textContent: name }), value);
      item.dataset.stage = name;
      this.parts[name] = { item, track, fill, value };
      bar.append(track);
      list.append(item);
    }
    this.element = element("div", { className: "stages" }, bar, list);
  }

  /** A prompt_progress object of the stream. */
  progress({ stage, total, processed, cache }) {
    if (cache) this.#mark("cached", 1, count(cache));
    const part = STAGES.includes(stage) ? stage : null;
    if (!part) return;
    for (const name of STAGES.slice(1, STAGES.indexOf(part))) {
      if (this.parts[name].item.dataset.state === "working") this.#mark(name, 1);
    }
    const share = total ? processed / total : 0;
    this.#mark(part, share, `${Math.round(100 * share)} %`);
  }

  /** Answer tokens are coming. */
  decoding(tokens) {
    for (const name of STAGES.slice(1, -1)) {
      if (this.parts[name].item.dataset.state === "working") this.#mark(name, 1);
    }
    this.#mark("decode", 1, count(tokens));
    this.parts.decode.item.dataset.state = "working";
  }

  /** The account: every stage as wide as it took long. */
  finish(account) {
    const times = account.timings;
    const spent = { draft: times.draft_ms, select: times.select_ms, prefill: times.prefill_ms, decode: times.decode_ms };
    const whole = Object.values(spent).reduce((sum, ms) => sum + ms, 0) || 1;
    for (const [name, ms] of Object.entries(spent)) {
      this.#mark(name, ms > 0 ? 1 : 0, ms > 0 ? seconds(ms) : "–");
      this.parts[name].track.style.flexGrow = ms / whole;
    }
    const cached = account.cached_tokens;
    this.#mark("cached", cached ? 1 : 0, cached ? count(cached) : "–");
    this.parts.cached.track.style.flexGrow = 0;
    this.element.dataset.state = "done";
  }

  #mark(name, share, text) {
    const { item, fill, value } = this.parts[name];
    fill.style.width = `${100 * Math.min(1, share)}%`;
    item.dataset.state = share >= 1 ? "done" : share > 0 ? "working" : "idle";
    if (text !== undefined) value.textContent = text;
  }
}
