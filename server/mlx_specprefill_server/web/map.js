// The text as it was read: kept parts on paper, the rest greyed, and why. It belongs to one question at a time.

import { count, element, find, percent } from "./format.js";
import { Minimap } from "./minimap.js";
import { readTokens, whatIf } from "./selection.js";
import { server, wordsOf } from "./words.js";

const LEVELS = 6;
const STEP_MS = 4000;
const MOST_MOVING = 4000; // parts whose colours change gradually
const STEPS = [
  { scores: true, show: "all", plain: true, text: () => server.words.scoring },
  { scores: false, show: "all", plain: false, text: () => "The best parts are chosen, with their sentences. Some are always kept: the beginning, instructions, the question." },
  { scores: false, show: "kept", plain: false, text: () => server.words.reading },
];
const EMPTY = "Ask about a document, and its text appears here: which parts of it were read, which were not, and why.";
const HINT = "Click a part to see why it was read or not. With the keyboard: arrow keys, and N and P for the next and the previous part that was read.";

export class TextMap {
  constructor() {
    this.current = -1;
    this.step = 1;
    this.list = find("prompt");
    this.minimap = new Minimap(find("minimap"), this.list, (share) => this.#jump(share));
    this.list.addEventListener("click", (event) => this.select(Number(event.target.closest("[data-index]")?.dataset.index ?? -1)));
    this.list.addEventListener("focus", () => this.current < 0 && this.chunks.length && this.select(this.#visible(0, 1)));
    this.list.addEventListener("keydown", (event) => this.#key(event));
    for (const button of find("show").children) button.addEventListener("click", () => this.#filter(button.dataset.show));
    find("scores").addEventListener("change", () => this.#layer());
    find("what-if").addEventListener("input", () => this.#suppose(Number(find("what-if").value)));
    find("as-read").addEventListener("click", () => this.#suppose(null));
    find("step-back").addEventListener("click", () => this.#walk(this.step - 1));
    find("step-on").addEventListener("click", () => this.#walk(this.step + 1));
    find("step-play").addEventListener("click", () => this.#play());
    this.clear();
  }

  /** An explanation of the server's, and the report of the answer; null: nothing has been answered. */
  show(explanation, report, title) {
    Object.assign(this, { explanation, report, chunks: explanation.chunks, current: -1 });
    const pieces = document.createDocumentFragment();
    this.spans = this.chunks.map((chunk, index) => {
      const span = element("span", { id: `chunk-${index}`, textContent: chunk.text });
      span.dataset.index = index;
      span.setAttribute("role", "option");
      span.setAttribute("aria-selected", "false");
      pieces.append(span);
      return span;
    });
    this.list.replaceChildren(pieces);
    this.list.scrollTop = 0;
    this.list.removeAttribute("aria-activedescendant");
    find("map-body").hidden = false;
    find("map-title").textContent = report ? "What was read" : "What would be read";
    find("map-question").textContent = title;
    clearTimeout(this.playing);
    this.#suppose(null);
    this.#go(1);
    this.#describe(-1);
    this.#reveal();
  }

  clear(text = EMPTY) {
    this.chunks = this.spans = this.states = [];
    this.report = this.explanation = null;
    this.list.replaceChildren();
    this.minimap.set([], []);
    find("map-body").hidden = true;
    find("map-title").textContent = "What was read";
    find("map-question").textContent = find("detail").textContent = "";
    find("map-facts").textContent = text;
  }

  redraw() {
    this.minimap.redraw();
  }

  /** As it was read, or with another share, in whole percent. */
  #suppose(share) {
    this.share = share;
    const sizes = this.chunks.map(({ start, end }) => end - start);
    if (share !== null) this.read = whatIf(this.explanation, share);
    else if (!this.report) this.read = this.chunks.map((chunk) => chunk.kept_tokens);
    else if (this.report.mode === "full") this.read = sizes;
    else this.read = readTokens(this.chunks, this.report.kept_spans);
    this.states = this.chunks.map((chunk, index) =>
      this.read[index] < sizes[index] ? "dropped" : chunk.forced ? "always" : "kept");
    this.spans.forEach((span, index) => {
      const name = `${this.states[index]} s${this.#level(this.chunks[index])}`;
      if (span.className !== name) span.className = name; // only what changes is laid out anew
    });
    const read = this.read.reduce((sum, tokens) => sum + tokens, 0);
    const all = this.chunks.at(-1)?.end ?? 0;
    find("as-read").hidden = share === null;
    find("steps").hidden = share === null && this.report?.mode === "full"; // nothing was chosen then
    if (share === null) find("what-if").value = Math.max(5, Math.min(100, Math.round((100 * read) / all)));
    find("what-if-value").textContent = `${find("what-if").value} %`;
    find("map-facts").textContent = this.#facts(read, all);
    this.minimap.set(this.chunks, this.states);
    this.#gaps();
    this.#describe(this.current);
  }

  #facts(read, all) {
    const share = `${count(read)} of ${count(all)} tokens (${percent(read / all)})`;
    const { reader } = this.report ? wordsOf(this.report) : server.words;
    if (this.share !== null) return `With ${this.share} % kept: ${reader[0].toLowerCase()}${reader.slice(1)} would read ${share}.`;
    if (!this.report) return `${reader} would read ${share}.`;
    if (this.report.mode === "full") return `The model read all ${count(all)} tokens.`;
    if (this.report.mode === "reuse") return `The model read ${count(this.report.read_tokens)} of ${count(all)} tokens, and kept ${read < all ? `${count(read - this.report.read_tokens)}` : "the others"} as it had read them.`;
    return `${reader} read ${share}.`;
  }

  #layer() {
    this.list.dataset.scores = find("scores").checked ? "yes" : "no";
  }

  /** By hand, which ends what plays by itself. */
  #walk(step) {
    clearTimeout(this.playing);
    if (this.spans.length < MOST_MOVING) this.#gradually(() => this.#go(step));
    else this.#go(step);
  }

  /** Colours go over into those that `change` brings. No others do: from light to dark, text would meet its ground halfway. */
  #gradually(change) {
    this.list.dataset.moving = "yes";
    void this.list.offsetHeight; // what changed before is styled, and what changes now begins to move
    change();
    void this.list.offsetHeight;
    this.list.dataset.moving = "no"; // what moves goes on
  }

  /** One step after the other, each long enough to be read. */
  #play(step = 0) {
    this.#walk(step);
    if (step < STEPS.length - 1) this.playing = setTimeout(() => this.#play(step + 1), STEP_MS);
  }

  #go(step) {
    this.step = Math.max(0, Math.min(STEPS.length - 1, step));
    const { scores, show, plain, text } = STEPS[this.step];
    find("scores").checked = scores;
    this.list.dataset.plain = plain ? "yes" : "no";
    find("step").textContent = `Step ${this.step + 1} of ${STEPS.length}. ${text()}`;
    find("step-back").disabled = this.step === 0;
    find("step-on").disabled = this.step === STEPS.length - 1;
    this.#layer();
    this.#filter(show);
  }

  #filter(wanted) {
    for (const button of find("show").children) button.setAttribute("aria-pressed", String(button.dataset.show === wanted));
    this.list.dataset.show = wanted;
    this.#gaps();
  }

  /** Hides what is not asked for; a separator says how much is missing there. */
  #gaps() {
    const { show } = this.list.dataset;
    for (const gap of this.list.querySelectorAll(".gap")) gap.remove();
    let missing = 0;
    const separate = (before) => {
      if (missing) {
        const gap = element("span", { className: "gap", textContent: `${count(missing)} tokens ${show === "kept" ? "not read" : "read"}` });
        gap.setAttribute("aria-hidden", "true");
        this.list.insertBefore(gap, before);
      }
      missing = 0;
    };
    this.spans.forEach((span, index) => {
      const kept = this.states[index] !== "dropped";
      const hidden = show !== "all" && kept !== (show === "kept");
      if (span.hidden !== hidden) span.hidden = hidden;
      if (span.hidden) missing += this.chunks[index].end - this.chunks[index].start;
      else separate(span);
    });
    separate(null);
    this.minimap.later();
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
  }

  /** To the best part that was kept for its score: what the answer most likely comes from. */
  #reveal() {
    const kept = this.chunks.filter((chunk, index) => this.states[index] === "kept");
    if (!kept.length) return;
    const best = kept.reduce((one, other) => (one.rank < other.rank ? one : other));
    this.#scrollTo(this.chunks.indexOf(best));
  }

  #scrollTo(index) {
    this.list.scrollTop = this.spans[index].offsetTop - this.list.clientHeight / 3;
  }

  #jump(share) {
    const index = this.#visible(Math.floor(share * this.chunks.length), 1);
    if (!this.spans[index]) return;
    this.#scrollTo(index);
    this.select(index);
  }

  #level(chunk) {
    return LEVELS - 1 - Math.floor(((chunk.rank - 1) * LEVELS) / this.chunks.length);
  }

  #describe(index) {
    const chunk = this.chunks[index];
    if (!chunk) {
      find("detail").textContent = this.chunks.length ? HINT : "";
      return;
    }
    const asking = this.explanation.asking ?? []; // stored conversations may lack it
    const asks = asking.some(([start, end]) => start < chunk.end && chunk.start < end);
    const asked = asks ? " What a line of it looks at is read: it may be the question." : "";
    find("detail").replaceChildren(...this.#why(index), asked, element("span", { className: "faint",
      textContent: ` Tokens ${count(chunk.start)} to ${count(chunk.end - 1)}, score ${chunk.score.toExponential(2)}.` }));
  }

  #why(index) {
    const chunk = this.chunks[index];
    const place = `Its score is number ${count(chunk.rank)} of ${count(this.chunks.length)}.`;
    const rules = this.#rules(chunk);
    const shared = [index - 1, index + 1].some((other) => this.chunks[other]?.score === chunk.score);
    const sentence = shared ? " It has the score of its whole line or sentence." : "";
    const said = (head, text) => [element("strong", { textContent: head }), ` ${text}`];
    if (this.states[index] === "always") return said("Always kept:", `${rules}.`);
    if (this.share === null && this.report?.mode === "full") return said("Read, like everything.", place);
    if (this.states[index] === "dropped") {
      const part = this.read[index] ? ` ${this.read[index]} tokens of it are always kept: ${rules}.` : "";
      return said(this.report || this.share !== null ? "Not read." : "Would not be read.", `${place}${sentence}${part}`);
    }
    if (this.share === null && !chunk.kept) return said("Read for an earlier question.", place);
    return said("Read for its score.", `${place}${sentence}`);
  }

  #rules({ start, end }) {
    const named = this.explanation.forced.filter((range) => range.start < end && range.end > start);
    return [...new Set(named.map(({ reason }) => reason))].join(", ");
  }

  #key(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, PageDown: 20, PageUp: -20 }[event.key];
    const last = this.chunks.length - 1;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
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
    while (this.states[index] === "dropped" || this.spans[index]?.hidden) index += step;
    return index;
  }

  #visible(index, step) {
    while (this.spans[index]?.hidden) index += step;
    return index;
  }
}
