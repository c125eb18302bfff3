// How to ask: what the form's switches say, and what the request's fields are then.

import { find } from "./format.js";

export const DEFAULTS = {
  mode: "auto", keep: "server", share: 20, compare: false, system: "", temperature: "", length: "",
};
const CHECKED = ["compare"];

export class Settings {
  constructor(changed) {
    for (const name of Object.keys(DEFAULTS)) {
      find(name).addEventListener("input", () => {
        this.#show();
        changed();
      });
    }
    this.set(DEFAULTS);
  }

  get() {
    return Object.fromEntries(Object.keys(DEFAULTS).map((name) => {
      const field = find(name);
      if (CHECKED.includes(name)) return [name, field.checked];
      return [name, name === "share" ? Number(field.value) : field.value];
    }));
  }

  set(values) {
    for (const [name, value] of Object.entries({ ...DEFAULTS, ...values })) {
      if (CHECKED.includes(name)) find(name).checked = value;
      else find(name).value = value;
    }
    this.#show();
  }

  #show() {
    find("share-value").textContent = `${find("share").value} %`;
    find("share-field").hidden = find("keep").value !== "share";
  }

  /** Fields that say how much is read. */
  reading(mode = this.get().mode) {
    const { keep, share } = this.get();
    const fields = mode === "auto" ? {} : { specprefill: mode === "sparse" };
    if (keep === "share") fields.specprefill_keep_pct = share / 100;
    return fields;
  }

  /** Fields of an answer of `most` tokens, or fewer. */
  answering(mode, most) {
    const { temperature, length } = this.get();
    const longest = Number(length || find("length").placeholder); // what it says where nobody has chosen
    const fields = { ...this.reading(mode), max_tokens: Math.min(longest, most), specprefill_return_spans: true };
    if (temperature !== "") fields.temperature = Number(temperature);
    return fields;
  }
}
