// An answer's Markdown as elements. marked only takes it apart: no HTML is ever made of it, text goes in as text.

import { element } from "./format.js";
import { marked } from "./vendor/marked.js";

const OPTIONS = { gfm: true, breaks: true };
const SAFE = ["http:", "https:", "mailto:"];

/** The elements of an answer, also of one that is still coming. */
export const render = (text) => blocks(marked.lexer(text, OPTIONS));

const blocks = (tokens) => tokens.map(block).filter(Boolean);

function block(token) {
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "heading":
      return element(`h${Math.min(6, token.depth + 3)}`, {}, ...inline(token.tokens)); // below the page's own headings
    case "code":
      return code(token);
    case "blockquote":
      return element("blockquote", {}, ...blocks(token.tokens));
    case "hr":
      return element("hr");
    case "list":
      return list(token);
    case "table":
      return table(token);
    case "paragraph":
      return element("p", {}, ...inline(token.tokens));
    default: // text of a list item, and HTML, which is shown as it was written
      return element("p", {}, ...(token.tokens ? inline(token.tokens) : [token.raw.trimEnd()]));
  }
}

function code({ text, lang }) {
  const copy = element("button", { type: "button", className: "quiet", textContent: "Copy" });
  copy.addEventListener("click", () => copyText(text, copy));
  const head = element("div", { className: "code-head" }, element("span", { textContent: (lang ?? "").split(/\s/)[0] }), copy);
  const body = element("pre", { tabIndex: 0 }, element("code", { textContent: text }));
  body.dir = "ltr";
  return element("div", { className: "code" }, head, body);
}

function list({ ordered, start, items }) {
  const rows = items.map((item) => {
    const parts = item.tokens.flatMap((token) =>
      (token.type === "text" ? inline(token.tokens ?? []) : token.type === "checkbox" ? [] : blocks([token])));
    return element("li", {}, ...(item.task ? [item.checked ? "☑ " : "☐ "] : []), ...parts);
  });
  const made = element(ordered ? "ol" : "ul", {}, ...rows);
  if (ordered && start > 1) made.start = start;
  return made;
}

function table({ header, rows }) {
  const row = (tag, cells) => element("tr", {}, ...cells.map(({ tokens, align }) => {
    const cell = element(tag, {}, ...inline(tokens));
    if (align) cell.style.textAlign = align;
    return cell;
  }));
  return element("div", { className: "scroll", tabIndex: 0 }, element("table", {},
    element("thead", {}, row("th", header)), element("tbody", {}, ...rows.map((cells) => row("td", cells)))));
}

function inline(tokens) {
  return tokens.map((token) => {
    switch (token.type) {
      case "strong":
      case "em":
      case "del":
        return element(token.type, {}, ...inline(token.tokens));
      case "codespan":
        return element("code", { textContent: token.text });
      case "br":
        return element("br");
      case "link":
        return link(token);
      case "image":
        return link({ ...token, tokens: [{ type: "text", raw: token.text || token.href, text: token.text || token.href }] });
      case "escape":
        return token.text;
      default:
        return token.type === "text" && token.tokens ? element("span", {}, ...inline(token.tokens)) : token.text ?? token.raw;
    }
  });
}

/** What leads elsewhere opens apart; other kinds of addresses stay text. Pictures are links: nothing is loaded. */
function link({ href, raw, tokens }) {
  const address = URL.canParse(href) ? new URL(href) : null;
  if (!address || !SAFE.includes(address.protocol)) return element("span", { textContent: raw });
  return element("a", { href: address.href, target: "_blank", rel: "noopener noreferrer" }, ...inline(tokens));
}

/** To the clipboard, which pages that came over plain HTTP from elsewhere don't get. */
export async function copyText(text, button) {
  const said = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "The browser refuses to copy";
  }
  setTimeout(() => { button.textContent = said; }, 2000);
}
