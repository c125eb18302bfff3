// An answer as elements. Text only ever goes in as text.

import { element } from "./format.js";

export function render(text) {
  return [element("p", { textContent: text })];
}
