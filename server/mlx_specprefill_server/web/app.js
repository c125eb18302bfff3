// Which view is shown, the theme, and who answers.

import { json } from "./api.js";
import { Conversation } from "./ask.js";
import { count, find } from "./format.js";
import { LivePanel } from "./live.js";
import { HeatMap } from "./map.js";

const THEMES = ["auto", "light", "dark"];

const map = new HeatMap();
const live = new LivePanel();
new Conversation(map);

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

find("theme").addEventListener("click", () => {
  const { dataset } = document.documentElement;
  dataset.theme = THEMES[(THEMES.indexOf(dataset.theme) + 1) % THEMES.length];
  localStorage.setItem("theme", dataset.theme);
  showTheme();
});
addEventListener("hashchange", showView);
showTheme();
showView();

try {
  const { model, draft, context_length: room } = await json("/v1/specprefill/stats");
  find("models").textContent = `${model}, draft ${draft ?? "none"}, ${count(room)} tokens of context`;
} catch (error) {
  find("notice").textContent = error.message;
}
