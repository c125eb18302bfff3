// A file as text, or a reason why it is none.

import { pdfText } from "./pdf.js";

const LARGEST = 16 * 1024 * 1024; // bytes; the server takes 32 MB in all
const LARGEST_PDF = 128 * 1024 * 1024; // most of which are pictures
const MARKUP = /\.x?html?$/i;
const UNSEEN = "script, style, noscript, template, svg, nav, head";
const BLOCKS = "p, div, section, article, li, tr, h1, h2, h3, h4, h5, h6, pre, blockquote, br, dt, dd";

const CONTROLS = /[\0-\x08\x0e-\x1f]/; // a text has tabs and new lines at most

export class UnreadableError extends Error {}

/** The text of a dropped or chosen file. */
export async function textOf(file) {
  const pdf = (await file.slice(0, 5).text()) === "%PDF-"; // whatever its name is
  const most = pdf ? LARGEST_PDF : LARGEST;
  if (file.size > most) throw new UnreadableError(`${file.name} is larger than ${most >> 20} MB.`);
  const bytes = new Uint8Array(await file.arrayBuffer());
  if (pdf) return textOfPdf(file.name, bytes);
  const text = decoded(bytes);
  if (text === null) throw new UnreadableError(`${file.name} is not a text file.`);
  const plain = MARKUP.test(file.name) || file.type === "text/html" ? withoutMarkup(text) : text;
  if (!plain.trim()) throw new UnreadableError(`${file.name} has no text in it.`);
  return plain.replaceAll("\r\n", "\n").trimEnd();
}

async function textOfPdf(name, bytes) {
  let text;
  try {
    text = await pdfText(bytes);
  } catch (error) {
    const why = error.name === "PasswordException" ? "is locked with a password" : `can't be read: ${error.message}`;
    throw new UnreadableError(`The PDF ${name} ${why}`.replace(/\.?$/, "."));
  }
  if (!text) throw new UnreadableError(`The PDF ${name} has no text in it, only pictures of pages. Recognise its text with another program first.`);
  return text;
}

/** The text of UTF-8, UTF-16 or else Windows-1252, which has Latin-1 in it; null where no text has such characters. */
function decoded(bytes) {
  try {
    const text = new TextDecoder(wideOf(bytes) ?? "utf-8", { fatal: true }).decode(bytes);
    return text.includes("\0") ? null : text;
  } catch {
    const text = new TextDecoder("windows-1252").decode(bytes);
    return CONTROLS.test(text) ? null : text;
  }
}

/** UTF-16's name, from the file's mark, or because letters of Europe have a zero in every second byte there. */
function wideOf(bytes) {
  const marked = { "255 254": "utf-16le", "254 255": "utf-16be" }[`${bytes[0]} ${bytes[1]}`];
  const head = bytes.subarray(0, 1000);
  const zeros = (place) => head.filter((byte, index) => !byte && index % 2 === place).length > head.length / 4;
  return marked ?? (zeros(1) ? "utf-16le" : zeros(0) ? "utf-16be" : undefined);
}

/** What a page says. It is parsed into a document that runs no script and loads nothing. */
function withoutMarkup(text) {
  const parsed = new DOMParser().parseFromString(text, "text/html");
  for (const part of parsed.querySelectorAll(UNSEEN)) part.remove();
  for (const block of parsed.querySelectorAll(BLOCKS)) block.before("\n");
  return parsed.body.textContent.replace(/[ \t]+/g, " ").replace(/ ?\n\s*\n\s*/g, "\n\n").trim();
}
