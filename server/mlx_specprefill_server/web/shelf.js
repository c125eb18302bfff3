// The conversations that this browser keeps: open, rename, export, delete.

import { element, find } from "./format.js";
import * as store from "./store.js";
import { answerOf } from "./turn.js";

const UNNAMED = "New conversation";

export class Conversations {
  constructor(chat) {
    this.chat = chat;
    find("new").addEventListener("click", () => chat.begin());
    find("search").addEventListener("input", () => this.#filter());
    find("export-markdown").addEventListener("click", () => this.#export("md", markdownOf));
    find("export-json").addEventListener("click", () => this.#export("json", (one) => JSON.stringify(one, null, 2)));
    find("rename").addEventListener("click", () => this.#rename());
    find("delete").addEventListener("click", () => find("delete-dialog").showModal());
    find("delete-dialog").addEventListener("close", () => this.#delete());
    find("rename-dialog").addEventListener("close", () => this.#renamed());
  }

  async show() {
    const all = await store.listed();
    const { id } = this.chat.conversation;
    find("conversations").replaceChildren(...all.map((one) => {
      const button = element("button", { type: "button", className: "quiet", textContent: one.title || UNNAMED });
      if (one.id === id) button.setAttribute("aria-current", "true");
      button.addEventListener("click", async () => {
        await this.chat.open(one.id);
        find("shelf").hidePopover();
        await this.show();
        find("conversations").querySelector("[aria-current]")?.focus();
      });
      const line = element("li", {}, button);
      line.dataset.words = `${one.title} ${one.questions}`.toLowerCase();
      return line;
    }));
    this.#filter();
    const kept = all.some((one) => one.id === id);
    for (const name of ["rename", "delete", "export-markdown", "export-json"]) find(name).disabled = !kept;
  }

  /** Shows the conversations whose name or questions have the words that are searched. */
  #filter() {
    const wanted = find("search").value.trim().toLowerCase();
    const lines = [...find("conversations").children];
    for (const line of lines) line.hidden = !line.dataset.words.includes(wanted);
    find("none-found").textContent = lines.some((line) => !line.hidden) ? "" : wanted ? "No conversation has these words." : "None yet.";
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
    parts.push(`## ${question}`, ...(named ? [named] : []), answerOf({ arms }).text);
  }
  return `${parts.join("\n\n")}\n`;
}
