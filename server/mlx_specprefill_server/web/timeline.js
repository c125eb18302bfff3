// Where the time of one or two answers went: lanes on one common axis, so that a lane three times as long took that long.

import { about, element, seconds } from "./format.js";
import { server, wordsOf } from "./words.js";

const STAGES = { queue: "waiting", select: "choosing", decode: "answer" };
const TICKS = [1, 2, 5];
const MOST_TICKS = 6;
const LAST_TICK = 0.9; // of the axis: behind it there is no room for its number

export class Timeline {
  constructor() {
    this.lanes = [];
    this.axis = element("div", { className: "axis" });
    this.rows = element("div", { className: "bars" });
    this.element = element("div", { className: "timeline", hidden: true }, this.rows, this.axis);
  }

  /** `parts`: [stage, from, to] in ms since the question was sent; they grow with what goes on. */
  lane(title, parts = []) {
    const lane = new Lane(this, title, parts);
    this.lanes.push(lane);
    this.rows.append(lane.element);
    return lane;
  }

  /** What reading everything would have taken, where nobody has tried. */
  predict(title, ms) {
    const lane = this.lane(title, [["prefill", 0, ms]]);
    lane.predicted = true;
    lane.note(`${about(ms)} to the first word, predicted`);
    this.draw();
  }

  /** Every lane to the same scale: that of the longest, or of what is expected to be it. */
  draw() {
    this.element.hidden = this.lanes.every(({ parts }) => !parts.length);
    const longest = Math.max(1, ...this.lanes.flatMap((lane) => [lane.end, lane.expected]));
    for (const lane of this.lanes) lane.draw(longest);
    const step = stepOf(longest);
    const ticks = Array.from({ length: Math.floor((LAST_TICK * longest) / step) + 1 }, (_, index) => {
      const tick = element("span", { textContent: index ? tickText(index * step, step) : "0" });
      tick.style.insetInlineStart = `${(100 * index * step) / longest}%`;
      return tick;
    });
    this.axis.replaceChildren(...ticks);
  }
}

/** Milliseconds between two ticks: 1, 2 or 5 times a power of ten. */
function stepOf(longest) {
  for (let power = 1; ; power *= 10) {
    for (const one of TICKS) if (longest / (one * power) <= MOST_TICKS) return one * power;
  }
}

const tickText = (ms, step) => (step < 1000 ? (step < 100 ? `${ms} ms` : `${(ms / 1000).toFixed(1)} s`) : `${ms / 1000} s`);

/** What the first word took beyond the stages of reading. */
export const waitOf = ({ timings: times }, first) =>
  Math.max(0, first - times.draft_ms - times.select_ms - times.prefill_ms);

class Lane {
  constructor(timeline, title, parts) {
    this.timeline = timeline;
    this.parts = parts;
    this.predicted = false;
    this.expected = 0; // when the stage that goes on will end, as far as it has shown
    this.bar = element("div", { className: "bar" });
    this.bar.setAttribute("aria-hidden", "true");
    this.legend = element("p", { className: "legend figure" });
    this.name = element("p", { className: "lane-name", textContent: title });
    this.element = element("div", { className: "lane" }, this.name, this.bar, this.legend);
  }

  get end() {
    return this.parts.at(-1)?.[2] ?? 0;
  }

  /** The name of a stage; what no layers have read before is read by all of them. */
  #named(stage, words) {
    const all = stage === "prefill" && this.parts.every(([name]) => name !== "draft");
    return STAGES[stage] ?? (all ? words.full : words[stage]);
  }

  note(text) {
    this.legend.textContent = text;
  }

  /** Something begins now, `ms` after the question; what went on before ends. */
  enter(stage, ms) {
    const last = this.parts.at(-1);
    if (last?.[0] === stage) return;
    if (last) last[2] = ms;
    this.parts.push([stage, ms, ms]);
    this.expected = 0;
  }

  /** `share` of the stage has been done at `ms`: as fast as until now, it ends when? */
  expect(ms, share) {
    const from = this.parts.at(-1)[1];
    this.expected = share ? from + (ms - from) / share : 0;
  }

  /** The stage that goes on has come so far; `share` of it is done. */
  moveTo(ms, share) {
    const last = this.parts.at(-1);
    if (!last) return;
    last[2] = Math.max(last[1], ms);
    this.element.dataset.stage = last[0];
    this.note(`${this.#named(last[0], server.words)}${share === undefined ? "" : `, ${Math.round(100 * share)} %`} · ${seconds(ms)}`);
    this.timeline.draw();
  }

  /** The report's own times. */
  finish(report, first) {
    const { timings: times } = report;
    const { draft_ms: draft, select_ms: select, prefill_ms: prefill, decode_ms: decode } = times;
    const spent = { queue: waitOf(report, first), draft, select, prefill, decode };
    let at = 0;
    this.parts = Object.entries(spent).filter(([, ms]) => ms > 0).map(([stage, ms]) => [stage, at, (at += ms)]);
    delete this.element.dataset.stage;
    this.expected = 0;
    const shown = Object.entries(spent).filter(([stage, ms]) => ms > 0 && (stage !== "queue" || ms > 0.02 * at));
    this.legend.replaceChildren(...shown.map(([stage, ms]) => element("span", { className: stage },
      element("i", { className: `swatch ${stage}` }), `${this.#named(stage, wordsOf(report))} ${seconds(ms)}`)));
    this.timeline.draw();
  }

  draw(longest) {
    this.element.classList.toggle("predicted", this.predicted);
    this.bar.replaceChildren(...this.parts.map(([stage, from, to]) => {
      const part = element("span", { className: stage });
      part.style.insetInlineStart = `${(100 * from) / longest}%`;
      part.style.inlineSize = `${(100 * (to - from)) / longest}%`;
      return part;
    }));
  }
}
