// Numbers and elements as the page writes them. Text only ever goes in as text.

const group = new Intl.NumberFormat("en");

export const count = (value) => group.format(value);

export function seconds(ms) {
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  return `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`;
}

/** A predicted time, as exact as predictions are. */
export function about(ms) {
  const [value, unit] = ms < 90_000 ? [ms / 1000, "s"] : ms < 5_400_000 ? [ms / 60_000, "min"] : [ms / 3_600_000, "h"];
  const digit = 10 ** Math.floor(Math.log10(value));
  const step = value < 2 * digit ? digit / 2 : digit;
  return `about ${Number((Math.round(value / step) * step).toPrecision(2))} ${unit}`;
}

export function bytes(value) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  const power = value < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log2(value) / 10));
  const scaled = value / 1024 ** power;
  return `${scaled.toFixed(power && scaled < 100 ? 1 : 0)} ${units[power]}`;
}

export const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;

export function ago(epoch, now = Date.now() / 1000) {
  if (!epoch) return "never";
  const passed = Math.max(0, now - epoch);
  if (passed < 60) return `${Math.round(passed)} s ago`;
  if (passed < 3600) return `${Math.round(passed / 60)} min ago`;
  return `${(passed / 3600).toFixed(1)} h ago`;
}

/** A name for what is made here. Pages over plain HTTP from elsewhere have no randomUUID. */
export const newId = () => crypto.randomUUID?.() ?? String(Math.random()).slice(2);

export const find = (id) => document.getElementById(id);

export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}
