// One answer while it comes, and afterwards: its text, its reasoning, what was read for it.

import { events } from "./api.js";
import { count, element, newId, percent, seconds } from "./format.js";
import { render } from "./markdown.js";
import { isPartial, missOf, wordsOf } from "./words.js";

export const TITLES = { auto: "Selective reading", sparse: "Selective reading", full: "Full reading" };
const STREAM = { stream: true, stream_options: { include_usage: true }, return_progress: true };

const LITTLE = 0.1; // of a prompt: as good as nothing
const ENDS = { running: "Being answered in another tab…", stopped: "Stopped.", broken: "Broken off." }; // without a report

export class BrokenOff extends Error {}

/**
 * A new record; `mode` is what was asked for, the report says what was done, `parts` where the time went until then.
 * `salt`: of the cache in which it finds what was read before.
 */
export const newArm = (mode, salt) => ({ id: newId(), mode, salt, text: "", thought: "", first: null, known: 0, report: null,
  tokens: 0, parts: [], state: "waiting" });

/** Whether it is still to come. */
export const isOpen = ({ state }) => state === "waiting" || state === "running";

/** Why an answer has no end; empty where it has one. */
function cutOf({ cut, report, tokens, most }) {
  if (!cut) return "";
  if (report.ended) return `, cut off there: ${report.ended}`;
  return `, cut off there: ${tokens < most ? "the model's window is full" : "the longest that was asked for"}`;
}

/** How much of the prompt was read, and by what. */
function readOf(report, tokens) {
  const { kept_tokens: kept, prompt_tokens: all } = report;
  if (report.reached || (!kept && !tokens)) return `Given up before all ${count(all)} tokens were read`;
  if (report.mode === "reuse") return `The model read ${count(report.read_tokens)} of ${count(all)} tokens; ${count(report.reused_tokens)} behind an edit stay as they were read before${kept < all ? `, and ${count(all - kept)} unread` : ""}`;
  if (report.mode !== "sparse") return `The model read all ${count(all)} tokens`;
  return `${wordsOf(report).reader} read ${count(kept)} of ${count(all)} tokens (${percent(kept / all)})`;
}

export class Arm {
  /** `changed`: called with the first word, and when the report is there. */
  constructor(record, timeline, changed) {
    this.record = record;
    this.changed = changed;
    this.lane = timeline.lane(TITLES[record.mode], record.parts);
    this.title = element("h3", { textContent: TITLES[record.mode] });
    this.thought = element("div", { className: "thought faint" });
    this.thinking = element("details", { className: "thinking", hidden: true },
      element("summary", { textContent: "Reasoning" }), this.thought);
    this.answer = element("div", { className: "answer" });
    this.answer.dir = "auto";
    this.why = element("p", { className: "why apparatus", hidden: true });
    this.miss = element("p", { className: "miss", hidden: true });
    this.facts = element("p", { className: "facts faint" });
    this.element = element("article", { className: "arm" }, this.title, this.thinking, this.answer, this.why, this.miss, this.facts);
    this.element.setAttribute("aria-live", "polite"); // read out when it is no longer busy
    this.show();
    if (record.report) this.#report();
    else this.#unfinished();
  }

  /** As much as came before it was stopped, or broken off. */
  #unfinished() {
    this.facts.textContent = ENDS[this.record.state] ?? "";
    this.lane.moveTo(this.lane.end);
  }

  async run(messages, options, signal) {
    const begun = performance.now();
    const { record } = this;
    Object.assign(record, { state: "running", most: options.max_tokens });
    this.element.setAttribute("aria-busy", "true");
    this.facts.textContent = "";
    this.lane.enter("queue", 0);
    this.progress = undefined;
    const tick = setInterval(() => record.report ?? this.lane.moveTo(performance.now() - begun, this.progress), 100);
    try {
      const body = { messages, ...STREAM, ...options, cache_salt: record.salt };
      for await (const chunk of events("/v1/chat/completions", { method: "POST", body, signal, id: record.id })) {
        this.#take(chunk, performance.now() - begun);
      }
      if (!record.report) throw new BrokenOff("the server closed the connection.");
      record.state = "done";
    } catch (error) {
      record.state = error.name === "AbortError" ? "stopped" : "broken";
      throw error;
    } finally {
      clearInterval(tick);
      if (!record.report) this.facts.textContent = ENDS[record.state];
      this.element.removeAttribute("aria-busy");
      this.#draw();
    }
  }

  #take(chunk, ms) {
    const { record } = this;
    if (chunk.loading) this.#loads(chunk.loading);
    if (chunk.error) throw new BrokenOff(chunk.error.message);
    if (chunk.prompt_progress) this.#read(chunk.prompt_progress, ms);
    const choice = chunk.choices?.[0];
    const { content, reasoning_content: thought } = choice?.delta ?? {};
    if (content || thought) this.#add(content ?? "", thought ?? "", ms);
    record.cut ||= choice?.finish_reason === "length";
    if (chunk.specprefill) {
      record.report = chunk.specprefill;
      record.tokens = chunk.usage?.completion_tokens ?? record.tokens;
      this.#report();
      this.changed();
    }
    if (chunk.engine_error) throw new BrokenOff(chunk.engine_error.message);
  }

  /** The model is on its way into memory. */
  #loads({ model, step, done, total }) {
    this.facts.textContent = `${model} is being loaded: ${step}${total ? `, ${count(done)} of ${count(total)}` : ""}…`;
  }

  #read({ stage, total, processed, cache }, ms) {
    this.facts.textContent = "";
    this.record.known = total ? cache / total : 0; // the share that was in the cache
    this.lane.enter(stage, ms);
    this.progress = total ? processed / total : undefined;
    this.lane.expect(ms, this.progress);
    this.lane.moveTo(ms, this.progress);
    this.progressed?.(this.lane.legend.textContent);
  }

  #add(content, thought, ms) {
    const { record } = this;
    if (record.first === null) {
      record.first = ms;
      this.changed();
    }
    record.text += content;
    record.thought += thought;
    record.tokens += 1;
    this.lane.enter("decode", ms);
    this.progress = undefined;
    this.#later();
  }

  /** At most once a frame, however fast tokens come. */
  #later() {
    this.frame ??= requestAnimationFrame(() => {
      this.#draw();
    });
  }

  #draw() {
    cancelAnimationFrame(this.frame);
    this.frame = null;
    this.show();
  }

  show() {
    this.answer.replaceChildren(...render(this.record.text));
    this.thought.textContent = this.record.thought;
    this.thinking.hidden = !this.record.thought;
  }

  #report() {
    const { report, mode, tokens, first } = this.record;
    const sparse = isPartial(report);
    this.record.known = report.cached_tokens / Math.max(1, report.kept_tokens);
    this.title.textContent = this.lane.name.textContent = sparse ? "Selective reading" : "Full reading";
    this.lane.finish(report, first ?? report.timings.queue_ms + (report.timings.ttft_ms ?? 0));
    const known = report.cached_tokens
      ? `, ${count(report.cached_tokens)} of them earlier` : "";
    const answered = ` ${count(tokens)} ${tokens === 1 ? "token" : "tokens"} answered${cutOf(this.record)}`;
    const rate = report.timings.decode_ms > 0 && tokens > 1
      ? `, ${seconds(report.timings.decode_ms / (tokens - 1))} each` : "";
    this.facts.textContent = `${readOf(report, tokens)}${known}.${answered}${rate}.`;
    this.miss.textContent = missOf(report);
    this.miss.hidden = !report.cache;
    const fresh = report.prompt_tokens - report.cached_tokens;
    const little = fresh <= LITTLE * report.prompt_tokens;
    this.why.hidden = sparse || mode === "full";
    this.why.classList.toggle("faint", little);
    this.why.textContent = sparse ? "" : !little ? `Why everything was read: ${report.reason}.`
      : fresh > 1 ? `Only ${count(fresh)} tokens were new.` : "Nothing new to read."; // the last token is always read
  }
}
