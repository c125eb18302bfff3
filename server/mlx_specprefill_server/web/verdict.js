// What full reading thinks of a selective answer, which the server finds out in idle time.

import { ApiError, json } from "./api.js";
import { element } from "./format.js";

const PATH = "/v1/specprefill/verdicts";
const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 15_000;
const PATIENCE_MS = 600_000;
const WORDS = {
  same: "Read in full afterwards: the answer is the same.",
  differs: "Read in full afterwards: the answer differs.",
  unknown: "Not compared with full reading.",
};

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

/** The verdict in words. */
export const verdictLine = ({ verdict }) => element("p", { className: "verdict", textContent: WORDS[verdict] });
