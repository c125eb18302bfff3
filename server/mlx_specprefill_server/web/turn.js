// One question of a conversation: what was asked, the headline, where the time went, and the answers.

import { Arm, isOpen } from "./arm.js";
import { chip } from "./documents.js";
import { about, count, element, newId, percent, seconds } from "./format.js";
import { copyText } from "./markdown.js";
import { Timeline, waitOf } from "./timeline.js";
import { verdictLine } from "./verdict.js";
import { isPartial } from "./words.js";

/** What one turn says to the model. Documents beside others, and those of later turns, carry their names. */
export function contentOf({ question, documents }, first) {
  const named = documents.length > 1 || !first;
  const texts = documents.map(({ name, text }) => (named ? `${name}\n\n${text.trimEnd()}` : text.trimEnd()));
  return [...texts, question].filter(Boolean).join("\n\n");
}

/** The answer from which the conversation goes on: of two, that of full reading. */
export const answerOf = ({ arms }) => arms.findLast(({ state }) => state === "done") ?? arms[0];

/** The messages up to and with the last turn. */
export function messagesOf(turns, system) {
  const messages = system ? [{ role: "system", content: system }] : [];
  turns.forEach((turn, index) => {
    messages.push({ role: "user", content: contentOf(turn, index === 0) });
    const text = index < turns.length - 1 && answerOf(turn).text;
    if (text) messages.push({ role: "assistant", content: text });
  });
  return messages;
}

const WORTH_SAYING = 0.1; // of a whole: the template's first words are always known already
const NOTICED_MS = 100;

const ALIVE_MS = 6000; // without a sign of life, an answer that was coming in another tab has broken off

/** A new record of a question. `version` grows with each change that is kept; `alive`: when its answer last grew. */
export const newTurn = (asked, arms) =>
  ({ ...asked, id: newId(), version: 0, asked: Date.now(), alive: Date.now(), arms, explanation: null });

/** Whether some of its answers are still to come. */
export const isRunning = ({ arms }) => arms.some(isOpen);

/** Whether it is being answered in another tab; given that it is not in this one. */
export const isAnsweredElsewhere = (record) => isRunning(record) && Date.now() - record.alive < ALIVE_MS;

/** Ends what is not answered any more. */
export function endAs(state, { arms }) {
  for (const arm of arms) if (isOpen(arm)) arm.state = state;
}

export class Turn {
  /** `actions`: what the buttons do: map, again, edit, full, each with the turn; `bare`: the conversation has no document. */
  constructor(record, actions, bare) {
    this.record = record;
    this.bare = bare;
    this.actions = actions;
    const { question, documents } = record;
    this.asked = element("p", { className: "question", textContent: question });
    this.asked.dir = "auto";
    this.headline = element("p", { className: "headline", hidden: true });
    this.timelines = element("div", { className: "apparatus" });
    this.answers = element("div", { className: "arms" });
    this.verdict = element("div", {});
    this.verdict.setAttribute("aria-live", "polite");
    this.copy = button("Copy", () => copyText(answerOf(this.record).text, this.copy));
    this.map = button("What was read", () => actions.map(this));
    this.again = button("Ask again", () => actions.again(this));
    this.edit = button("Edit…", () => actions.edit(this));
    this.map.setAttribute("aria-pressed", "false");
    this.map.classList.add("apparatus");
    this.foot = element("div", { className: "turn-actions", hidden: true }, this.map, this.copy, this.again, this.edit);
    this.element = element("li", { className: "turn" },
      element("div", {}, this.asked,
        ...(documents.length ? [element("ul", { className: "chips" }, ...documents.map((one) => chip(one)))] : [])),
      this.headline, this.timelines, this.answers, this.verdict, this.foot);
    this.#arms();
    if (!isRunning(record)) this.finish();
  }

  #arms() {
    this.timeline = new Timeline();
    this.arms = this.record.arms.map((arm) => new Arm(arm, this.timeline, () => this.#tell()));
    this.timelines.replaceChildren(this.timeline.element);
    this.answers.replaceChildren(...this.arms.map((arm) => arm.element));
    this.answers.dataset.count = this.arms.length;
    this.tellVerdict();
    this.#tell();
  }

  /** What full reading thinks of the answer, once that is known. */
  tellVerdict() {
    const [one, other] = this.record.arms;
    const words = one.verdict?.verdict === "differs" && !other ? [button("Show what full reading answers", () => this.actions.full(this))] : [];
    this.verdict.replaceChildren(...(one.verdict ? [verdictLine(one.verdict), ...words] : []));
  }

  /** To be answered by full reading, too. */
  add(arm) {
    this.record.arms.push(arm);
    this.foot.hidden = true;
    this.#arms();
  }

  /** To be answered once more. */
  reset(question, arms) {
    Object.assign(this.record, { question, arms, explanation: null });
    this.asked.textContent = question;
    this.foot.hidden = true;
    this.#arms();
  }

  /** Without a document, and not read selectively: there is nothing to explain. */
  get plain() {
    const [one, other] = this.record.arms;
    return this.bare && !other && one.mode === "auto" && !isPartial(one.report);
  }

  /** The answers are there, or will not come. */
  finish() {
    const [one, other] = this.record.arms;
    this.foot.hidden = false;
    if (isPartial(one.report) && !other && one.report.predicted && this.timeline.lanes.length === 1) {
      this.timeline.predict("Full reading", one.report.predicted.full_ms);
    }
    this.timeline.draw();
    this.#tell();
  }

  /** As much of the result as is known. */
  #tell() {
    const [one, other] = this.record.arms;
    const parts = this.plain ? [] : headlineOf(one, other, this.record.documents.length > 0);
    this.element.classList.toggle("plain", this.plain);
    this.headline.hidden = !parts.length;
    this.headline.replaceChildren(...parts);
  }
}

function button(text, act) {
  const made = element("button", { type: "button", className: "quiet", textContent: text });
  made.addEventListener("click", act);
  return made;
}

/** The result in a sentence or three. */
function headlineOf({ report, first, known, text, state }, other, documents) {
  if (!report || first === null) return [];
  const what = documents ? "document" : "text";
  const strong = (ms) => element("strong", { className: "figure", textContent: seconds(ms) });
  const parts = ["First word after ", strong(first)];
  const { reused_tokens: reused = 0, prompt_tokens: all, kept_tokens: kept } = report;
  const sparse = isPartial(report), unread = reused + all - kept;
  if (hasWaited(report, first)) parts.push(", ", strong(waitOf(report, first)), " of it waiting");
  else if (other?.first && fairly(known, other.known) && !hasWaited(other.report, other.first)) parts.push(first < other.first ? " instead of " : "; full reading: ", strong(other.first));
  parts.push(". ");
  if (!other && sparse && !hasWaited(report, first) && report.predicted?.full_ms > first) parts.push(`Full reading: ${about(report.predicted.full_ms)}, predicted. `);
  if (sparse && unread) parts.push(`${percent(unread / all)} of the ${what} was not read${reused ? (kept < all ? ", or not again" : " again") : ""}${report.estimated_tokens ? ", but estimated" : ""}. `);
  else if (!other) parts.push(`All of the ${what} was read. `);
  if (known >= WORTH_SAYING) parts.push(`Already read: ${count(report.cached_tokens)} of ${count(report.kept_tokens)} tokens. `);
  if (other?.state === "done" && state === "done") parts.push(comparison(text.trim(), other.text.trim()));
  return parts;
}

/** Whether much of the time to the first word was spent in the queue, as far as that is known. */
const hasWaited = (report, first) => report?.timings.queue_ms > Math.max(NOTICED_MS, WORTH_SAYING * first);

/** Whether times can be compared: the cache held about the same share for both. */
const fairly = (one, other) => Math.abs(one - other) < WORTH_SAYING;

/** Small models go on and on; what matters is often in the first sentence. */
function comparison(one, other) {
  const first = (text) => /^.+?[.!?](?=\s|$)/s.exec(text)?.[0] ?? text;
  if (one === other) return "Same answer.";
  return first(one) === first(other) ? "Both answers begin with the same sentence." : "The answers differ.";
}
