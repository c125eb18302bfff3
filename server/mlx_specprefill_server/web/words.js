// Who reads: a small and a large model, or the first layers of one model and then those behind them.

import { count } from "./format.js";

export const TWO_MODELS = {
  reader: "The large model",
  intro: "A small model reads all of it and marks what matters for your question. The large model reads only that, and answers sooner.",
  scoring: "The small model reads everything and scores each part by how much it looks at it when the question comes.",
  reading: "The large model reads only these, each at its original place in the text.",
  draft: "small model reads",
  prefill: "large model reads",
  full: "large model reads",
};
export const ONE_MODEL = {
  reader: "The model",
  intro: "The model's first layers read all of it and mark what matters for your question. Then all layers read only that, and it answers sooner.",
  scoring: "The model's first layers read everything and score each part by how much they look at it when the question comes.",
  reading: "All layers read only these, each at its original place in the text.",
  draft: "first layers read",
  prefill: "model reads",
  full: "model reads",
};

export const server = { words: TWO_MODELS }; // those of the server that is asked

/** Whether some of the prompt was not read for this answer, behind an edit too. */
export const isPartial = (report) => report?.mode === "sparse" || report?.mode === "reuse";

/** Those of an answer that is there. */
export const wordsOf = (report) => (report.scorer ? (report.scorer === "self" ? ONE_MODEL : TWO_MODELS) : server.words);

const PLACES = {
  system: "the system message", tools: "the list of tools", user: "a question", assistant: "an answer", tool: "a tool's result",
};

/** Why a prompt that resembles an earlier one was read again; empty where it was not. */
export function missOf({ cached_tokens: cached, prompt_tokens: all, reused_tokens: reused, cache }) {
  if (!cache) return "";
  const { kind, role, was, now, read_tokens: again } = cache.miss;
  const place = PLACES[role] ?? "the text around the messages";
  const what = kind === "tool_order" ? "then the tools come in another order" : `then ${place} differs`;
  const before = was === null ? "words that may be another person's" : was || "nothing";
  return `${count(cached)} of ${count(all)} tokens were cached; ${what}: ${before} → ${now || "nothing"}. ${reused ? `${count(reused)} tokens behind it were known and kept.` : `Because of it, ${count(again)} known tokens were read again.`}`;
}
