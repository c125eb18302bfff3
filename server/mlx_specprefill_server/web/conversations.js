// The conversations that this browser keeps: open, rename, export, delete.

import { element, find } from "./format.js";
import * as store from "./store.js";

const UNNAMED = "New conversation";

export class Conversations {
  constructor(chat) {
    this.chat = chat;
    find("new").addEventListener("click", () => chat.begin());
    find("shelf-toggle").addEventListener("click", () => this.#toggle());
    find("search").addEventListener("input", () => this.#filter());
    find("export-markdown").addEventListener("click", () => this.#export("md", markdownOf));
    find("export-json").addEventListener("click", () => this.#export("json", (one) => JSON.stringify(one, null, 2)));
    find("rename").addEventListener("click", () => this.#rename());
    find("delete").addEventListener("click", () => find("delete-dialog").showModal());
    find("delete-dialog").addEventListener("close", () => this.#delete());
    find("rename-dialog").addEventListener("close", () => this.#renamed());
  }

  #toggle() {
    const open = find("shelf").dataset.open !== "yes";
    find("shelf").dataset.open = open ? "yes" : "no";
    find("shelf-toggle").setAttribute("aria-expanded", String(open));
  }

  async show() {
    const all = await store.listed();
    const { id } = this.chat.conversation;
    find("conversations").replaceChildren(...all.map((one) => {
      const button = element("button", { type: "button", className: "quiet", textContent: one.title || UNNAMED });
      if (one.id === id) button.setAttribute("aria-current", "true");
      button.addEventListener("click", async () => {
        await this.chat.open(one.id);
        await this.show();
        find("conversations").querySelector("[aria-current]")?.focus();
      });
      return element("li", {}, button);
    }));
    this.#filter();
    const kept = all.some((one) => one.id === id);
    for (const name of ["rename", "delete", "export-markdown", "export-json"]) find(name).disabled = !kept;
  }

  /** Those whose name has the words that are searched. */
  #filter() {
    const wanted = find("search").value.trim().toLowerCase();
    for (const line of find("conversations").children) line.hidden = !line.textContent.toLowerCase().includes(wanted);
  }

  #rename() {
    find("title").value = this.chat.conversation.title;
    find("rename-dialog").returnValue = "";
    find("rename-dialog").showModal();
    find("title").select();
  }

  async #renamed() {
    const title = find("title").value.trim();
    if (find("rename-dialog").returnValue !== "use" || !title) return;
    this.chat.conversation.title = title;
    await store.save(this.chat.conversation);
    await this.show();
  }

  async #delete() {
    const dialog = find("delete-dialog");
    const agreed = dialog.returnValue === "use";
    dialog.returnValue = "";
    if (agreed) await this.chat.forget();
  }

  #export(kind, write) {
    const { conversation } = this.chat;
    const name = (conversation.title || UNNAMED).replace(/[^\p{L}\p{N}_-]+/gu, " ").trim().slice(0, 60);
    const link = element("a", { download: `${name || UNNAMED}.${kind}`,
      href: URL.createObjectURL(new Blob([write(conversation)], { type: kind === "md" ? "text/markdown" : "application/json" })) });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  }
}

/** A conversation for people; documents are named, not repeated. */
export function markdownOf({ title, turns }) {
  const parts = [`# ${title || UNNAMED}`];
  for (const { question, documents, arms } of turns) {
    const named = documents.map(({ name, tokens }) => `- ${name} (${tokens} tokens)`).join("\n");
    parts.push(`## ${question}`, ...(named ? [named] : []), arms[0].text);
  }
  return `${parts.join("\n\n")}\n`;
}
