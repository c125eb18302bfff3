// The prompt as a heat map: every chunk as text, a bar in the minimap, and a line that says why it is kept or dropped.

import { count, element, find, percent } from "./format.js";

const LEVELS = 6;
const MARKS = { forced: "◆", kept: "✓" };

const stateOf = (chunk) => (chunk.forced ? "forced" : chunk.kept ? "kept" : "dropped");

export class HeatMap {
  constructor() {
    this.chunks = [];
    this.spans = [];
    this.current = -1;
    this.list = find("prompt");
    this.canvas = find("minimap");
    this.detail = find("detail");
    this.list.addEventListener("mouseover", (event) => this.#describe(this.#indexOf(event.target)));
    this.list.addEventListener("mouseleave", () => this.#describe(this.current));
    this.list.addEventListener("click", (event) => this.select(this.#indexOf(event.target)));
    this.list.addEventListener("focus", () => this.current < 0 && this.chunks.length && this.select(0));
    this.list.addEventListener("keydown", (event) => this.#key(event));
    this.list.addEventListener("scroll", () => this.#later(), { passive: true });
    this.canvas.addEventListener("pointerdown", (event) => this.#drag(event));
    this.canvas.addEventListener("pointermove", (event) => event.buttons && this.#drag(event));
    new ResizeObserver(() => this.#later()).observe(this.canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
    for (const button of find("show").children) button.addEventListener("click", () => this.#show(button));
  }

  /** An explanation of the server's; `facts` is the line above it. */
  render(explanation) {
    this.chunks = explanation.chunks;
    this.current = -1;
    const pieces = document.createDocumentFragment();
    this.spans = this.chunks.map((chunk, index) => {
      const begins = chunk.kept && (index === 0 || stateOf(this.chunks[index - 1]) !== stateOf(chunk));
      const span = element("span", { id: `chunk-${index}`, className: `${stateOf(chunk)} s${this.#level(chunk)}` },
        ...(begins ? [element("b", { textContent: MARKS[stateOf(chunk)] })] : []), chunk.text);
      span.dataset.index = index;
      span.setAttribute("role", "option");
      span.setAttribute("aria-selected", "false");
      pieces.append(span);
      return span;
    });
    this.list.replaceChildren(pieces);
    this.list.scrollTop = 0;
    this.list.hidden = this.canvas.hidden = false;
    this.list.removeAttribute("aria-activedescendant");
    find("map-facts").textContent = facts(explanation);
    this.#describe(-1);
    this.redraw();
    this.#reveal();
  }

  clear() {
    this.chunks = this.spans = [];
    this.list.replaceChildren();
    this.list.hidden = this.canvas.hidden = true;
    this.detail.textContent = "";
  }

  select(index) {
    if (index < 0 || index >= this.chunks.length) return;
    this.spans[this.current]?.setAttribute("aria-selected", "false");
    this.current = index;
    const span = this.spans[index];
    span.setAttribute("aria-selected", "true");
    this.list.setAttribute("aria-activedescendant", span.id);
    span.scrollIntoView({ block: "nearest" });
    this.#describe(index);
    this.#later();
  }

  redraw() {
    this.bars = null;
    this.#later();
  }

  /** To the best chunk that was kept for its score: what the answer most likely comes from. */
  #reveal() {
    const kept = this.chunks.filter((chunk) => chunk.kept && !chunk.forced);
    if (!kept.length) return;
    const best = kept.reduce((a, b) => (a.rank < b.rank ? a : b));
    const span = this.spans[this.chunks.indexOf(best)];
    this.list.scrollTop = span.offsetTop - this.list.offsetTop - this.list.clientHeight / 3;
  }

  #level(chunk) {
    return LEVELS - 1 - Math.floor(((chunk.rank - 1) * LEVELS) / this.chunks.length);
  }

  #indexOf(target) {
    return Number(target.closest("[data-index]")?.dataset.index ?? -1);
  }

  #describe(index) {
    const chunk = this.chunks[index];
    if (!chunk) {
      this.detail.textContent = this.chunks.length
        ? "Point at a chunk, or move with the arrow keys; N and P go to the next and previous kept chunk." : "";
      return;
    }
    this.detail.replaceChildren(
      element("strong", { textContent: `Chunk ${index}` }),
      ` · tokens ${count(chunk.start)} to ${count(chunk.end - 1)} · score ${chunk.score.toExponential(2)} · ${chunk.reason}`,
    );
  }

  #key(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, PageDown: 20, PageUp: -20 }[event.key];
    const last = this.chunks.length - 1;
    if (step) this.select(this.#visible(Math.max(0, Math.min(last, this.current + step)), Math.sign(step)));
    else if (event.key === "Home") this.select(this.#visible(0, 1));
    else if (event.key === "End") this.select(this.#visible(last, -1));
    else if (event.key === "n") this.select(this.#search(1));
    else if (event.key === "p") this.select(this.#search(-1));
    else return;
    event.preventDefault();
  }

  #search(step) {
    let index = this.current + step;
    while (this.chunks[index] && !this.chunks[index].kept) index += step;
    return index;
  }

  #visible(index, step) {
    while (this.spans[index] && this.spans[index].hidden) index += step;
    return index;
  }

  #show(button) {
    for (const other of find("show").children) other.setAttribute("aria-pressed", String(other === button));
    const wanted = button.dataset.show;
    this.spans.forEach((span, index) => {
      span.hidden = wanted !== "all" && this.chunks[index].kept !== (wanted === "kept");
    });
    this.list.dataset.show = wanted;
    this.#later();
  }

  #drag(event) {
    const share = event.offsetX / this.canvas.clientWidth;
    const index = Math.max(0, Math.min(this.chunks.length - 1, Math.floor(share * this.chunks.length)));
    this.list.scrollTop = this.spans[index].offsetTop - this.list.offsetTop - this.list.clientHeight / 3;
    this.select(index);
  }

  #later() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.#draw();
    });
  }

  /** The bars are drawn once per size and prompt; what is in view is drawn over them. */
  #draw() {
    const { canvas } = this;
    const scale = devicePixelRatio || 1;
    const width = Math.round(canvas.clientWidth * scale);
    const height = Math.round(canvas.clientHeight * scale);
    if (!width || !this.chunks.length) return;
    if (!this.bars || canvas.width !== width || canvas.height !== height) {
      canvas.width = width;
      canvas.height = height;
      this.bars = this.#drawBars(width, height);
    }
    const context = canvas.getContext("2d");
    context.clearRect(0, 0, width, height);
    context.drawImage(this.bars, 0, 0);
    const { scrollTop, clientHeight, scrollHeight } = this.list;
    context.fillStyle = getComputedStyle(canvas).getPropertyValue("--window");
    context.fillRect((scrollTop / scrollHeight) * width, 0, Math.max(2, (clientHeight / scrollHeight) * width), height);
  }

  /** One bar per chunk, or per column of pixels: then the best chunk of the column stands for it. */
  #drawBars(width, height) {
    const bars = Object.assign(document.createElement("canvas"), { width, height });
    const context = bars.getContext("2d");
    const style = getComputedStyle(this.canvas);
    const colours = Object.fromEntries(["kept", "forced", "dropped"].map((s) => [s, style.getPropertyValue(`--${s}`)]));
    const total = this.chunks.length;
    const columns = Math.min(width, total);
    for (let column = 0; column < columns; column++) {
      const first = Math.floor((column * total) / columns);
      const end = Math.max(first + 1, Math.floor(((column + 1) * total) / columns));
      let best = this.chunks[first];
      for (let index = first + 1; index < end; index++) {
        const chunk = this.chunks[index];
        if (chunk.kept > best.kept || (chunk.kept === best.kept && chunk.rank < best.rank)) best = chunk;
      }
      const tall = height * (0.12 + 0.88 * (1 - (best.rank - 1) / total) ** 2);
      context.fillStyle = colours[stateOf(best)];
      const left = Math.round((column * width) / columns);
      const right = Math.round(((column + 1) * width) / columns);
      context.fillRect(left, height - tall, Math.max(1, right - left - (right - left > 3 ? 1 : 0)), tall);
    }
    return bars;
  }
}

function facts(explanation) {
  const { mode, reason, kept_tokens: kept, prompt_tokens: all, predicted } = explanation;
  const lead = mode === "sparse" ? "The target reads" : "Prefilled in full; sparse, the target would read";
  const times = predicted
    ? ` Predicted: ${(predicted.sparse_ms / 1e3).toFixed(2)} s sparse, ${(predicted.full_ms / 1e3).toFixed(2)} s full.` : "";
  return `${lead} ${count(kept)} of ${count(all)} tokens, ${percent(kept / all)}. ${mode === "sparse" ? "" : `Why full: ${reason}.`}${times}`;
}
