// What full reading thinks of a selective answer, which the server finds out in idle time.

import { ApiError, json } from "./api.js";
import { element } from "./format.js";

const PATH = "/v1/specprefill/verdicts";
const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 15_000;
const PATIENCE_MS = 600_000;
const WORDS = 24; // tokens of what full reading would have gone on with
const MARK = "\uE000"; // a character that no text has

/** The verdict on the answer to a request; null: the server gives none; undefined: not known yet. Asks while `wanted`. */
export async function verdictOn(id, wanted) {
  const end = Date.now() + PATIENCE_MS;
  for (let pause = FIRST_PAUSE_MS; Date.now() < end && wanted(); pause = Math.min(LONGEST_PAUSE_MS, 1.5 * pause)) {
    await new Promise((resolve) => setTimeout(resolve, pause));
    if (document.hidden) continue;
    try {
      const verdict = (await json(PATH)).data.find((one) => one.request_id === id);
      if (verdict?.verdict !== "pending") return verdict ?? null;
    } catch (error) {
      if (!(error instanceof ApiError) || error.status) return undefined;
    }
  }
  return undefined;
}

/** Full reading's own words behind the beginning of an answer, up to a sentence. */
export async function nextWords(messages, begun) {
  const body = { messages: [...messages, ...goingOn(begun)], ...GOES_ON, specprefill: false, temperature: 0, max_tokens: WORDS };
  const { choices } = await json("/v1/chat/completions", { method: "POST", body });
  const { content } = choices[0].message;
  return /^.+?[.!?](?=\s|$)/s.exec(content)?.[0] ?? content;
}

/** Fields and messages of a request whose answer goes on from `begun`. */
export const GOES_ON = { continue_final_message: true };
export const goingOn = (begun) => (begun ? [{ role: "assistant", content: begun }] : []);

/** The answer up to where full reading would have chosen otherwise; null where that is no place in the text. */
export function agreed({ text, thought }, { first }) {
  if (!first || thought) return null;
  const letters = [...text]; // the server counts characters, JavaScript halves of some
  return first.text_offset < letters.length ? letters.slice(0, first.text_offset).join("") : null;
}

/** The verdict in words. `goOn`: what its button does. */
export function verdictLine(record, verdict, goOn) {
  const line = (...parts) => element("p", { className: "verdict" }, ...parts);
  if (verdict.verdict === "unknown") return line(`Not compared with full reading: ${verdict.reason}.`);
  if (verdict.verdict === "same") {
    return line(verdict.sampled ? "Read in full afterwards: this answer is as likely as before." : "Read in full afterwards: the answer is the same.");
  }
  if (agreed(record, verdict) === null) return line("Read in full afterwards: the answer differs.");
  const button = element("button", { type: "button", className: "quiet", textContent: "Go on from there" });
  button.addEventListener("click", goOn);
  const words = verdict.words ? [" Full reading goes on: ", element("q", { textContent: verdict.words.trim() })] : [];
  return line("Read in full afterwards: from ", sign(), " on, the answer differs.", ...words, " ", button);
}

const sign = () => element("mark", { className: "differs", textContent: "▸" });

/** Renders an answer with a sign where full reading would have gone on otherwise. */
export function withSign(text, begun, render) {
  const made = element("div", {}, ...render(begun + MARK + text.slice(begun.length)));
  const walker = document.createTreeWalker(made, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const at = walker.currentNode.data.indexOf(MARK);
    if (at < 0) continue;
    const behind = walker.currentNode.splitText(at);
    behind.data = behind.data.slice(MARK.length);
    behind.before(sign());
    return [...made.childNodes];
  }
  return render(text); // it stood in what is not shown
}

/** The known verdicts on the last selective answers, newest first: "same" or "differs". */
export async function lastVerdicts(signal) {
  return (await json(PATH, { signal })).data.map(({ verdict }) => verdict).filter((word) => word === "same" || word === "differs");
}
