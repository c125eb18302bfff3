// Which view is shown, the theme, the key, and who answers.

import { enterKey, json } from "./api.js";
import { Chat } from "./chat.js";
import { Conversations } from "./conversations.js";
import { count, find } from "./format.js";
import { LivePanel } from "./live.js";
import { TextMap } from "./map.js";

const THEMES = ["auto", "light", "dark"];

const map = new TextMap();
const live = new LivePanel();
const chat = new Chat(map, () => shelf.show());
const shelf = new Conversations(chat);

function showView() {
  const server = location.hash === "#server";
  find("ask").hidden = server;
  find("server").hidden = !server;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === (server ? "#server" : "#ask")) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (server) live.show();
  else live.hide();
}

function showTheme() {
  const { theme } = document.documentElement.dataset;
  find("theme").textContent = `Theme: ${theme}`;
  map.redraw();
}

/** And a sample for somebody who has nothing here yet. */
async function showModels() {
  try {
    const { model, draft, context_length: room } = await json("/v1/specprefill/stats");
    const small = draft ? `small model ${draft}` : "no small model";
    find("models").textContent = `Large model ${model}, ${small}, window of ${count(room)} tokens`;
    chat.documents.window = room;
    chat.documents.show();
    if (!known) await chat.offer();
  } catch (error) {
    chat.tell(error.message);
  }
}

find("theme").addEventListener("click", () => {
  const { dataset } = document.documentElement;
  dataset.theme = THEMES[(THEMES.indexOf(dataset.theme) + 1) % THEMES.length];
  localStorage.setItem("theme", dataset.theme);
  showTheme();
});
find("key-button").addEventListener("click", async () => {
  if (!await enterKey()) return;
  chat.tell("");
  live.hide();
  showView();
  await showModels();
});
addEventListener("hashchange", showView);
showTheme();
showView();

const known = await chat.restore();
await showModels();
document.documentElement.dataset.ready = "yes";
