// The words of the server view in the field's terms, shown on hover, focus and touch.

import { element, find } from "./format.js";

const WORDS = {
  Answering: "Requests that the large model writes tokens for (decoding).",
  Reading: "Requests whose prompt is being read (prefill). Of an answer: whether all of its prompt was read, or the parts that matter (sparse prefill).",
  Waiting: "Requests in the queue: others are served first.",
  "Found in cache": "Prompts whose beginning was in the prefix cache, of all prompts.",
  "Since last step": "Time since the engine's last step. It steps when idle, too: a long time means that it hangs.",
  "In work": "Requests on one time axis: waiting, reading, choosing, answering.",
  "Tokens per second": "Tokens that all answers together got in the last second.",
  "Requests that wait": "Requests in the queue.",
  "Memory in use": "Memory of all arrays that MLX holds.",
  "Large model": "The target: the weights of the model that answers.",
  "Small model": "The draft: the weights of the model that scores prompts.",
  "Requests in work": "Requests that are read or answered now, and the KV caches they hold.",
  "Texts read before": "The prefix cache: KV caches of earlier prompts and answers, which later requests begin from.",
  "Texts read before, on disk": "The part of the prefix cache that is kept on disk.",
  "Held free for requests": "Memory that the prefix cache leaves to requests in work.",
  "All arrays": "Memory of all arrays that MLX holds.",
  Limit: "The most memory the server takes. Requests that need more wait or are refused.",
  "Kept for later requests": "The entries of the prefix cache. A request that begins like one of them does not read that part again.",
  Kind: "Whose KV cache it is. The one in parts comes from a sparse prefill.",
  Hits: "Requests that began from this entry.",
  Disk: "Whether the entry is on disk, too.",
  Prompt: "Tokens of the prompt.",
  Read: "Tokens of the prompt that the large model read for this answer, those from the cache included (kept tokens).",
  Cached: "Read tokens that an earlier request had left in the cache.",
  "First word": "Time to first token (TTFT), the queue included.",
  Answer: "Tokens of the answer.",
  Finish: "Why the answer ended: stop (by itself), length (the limit), cancelled (the client went away).",
  Why: "Why the prompt was read selectively or in full.",
};

/** A word that can be asked for its meaning, or the plain text where there is nothing to explain. */
export function word(text) {
  if (!WORDS[text]) return text;
  const made = element("span", { className: "word", tabIndex: 0, textContent: text });
  made.setAttribute("aria-describedby", "tip");
  for (const name of ["pointerenter", "focus"]) made.addEventListener(name, () => show(made));
  for (const name of ["pointerleave", "blur"]) made.addEventListener(name, hide);
  made.addEventListener("keydown", ({ key }) => key === "Escape" && hide());
  return made;
}

/** Makes a heading's text a word that can be asked for. */
export const explain = (heading) => WORDS[heading.textContent] && heading.replaceChildren(word(heading.textContent));

const hide = () => find("tip").hidePopover();

/** Below the word, or above it where there is no room, and within the window. */
function show(made) {
  const tip = find("tip");
  tip.textContent = WORDS[made.textContent];
  hide();
  tip.showPopover();
  const { left, top, bottom } = made.getBoundingClientRect();
  const below = bottom + 6 + tip.offsetHeight < innerHeight;
  tip.style.left = `${Math.max(8, Math.min(left, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${below ? bottom + 6 : top - 6 - tip.offsetHeight}px`;
}
