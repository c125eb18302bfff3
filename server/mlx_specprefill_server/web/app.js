// Which view is shown, the theme, the key, and who answers.

import { asked, enterKey, json } from "./api.js";
import { Chat } from "./chat.js";
import { Conversations } from "./shelf.js";
import { count, find } from "./format.js";
import { LivePanel } from "./live.js";
import { TextMap } from "./map.js";
import { Models } from "./models.js";
import { SAMPLE } from "./sample.js";
import { ONE_MODEL, server, TWO_MODELS } from "./words.js";

const THEMES = ["auto", "light", "dark"];
const DEMO = "This one is tiny: it finds facts in a text, and can do nothing else.";
const DEMO_LENGTH = 64; // tokens of an answer: it comes to no end
const USUAL_LENGTH = 2048;

let elsewhere = 0; // how far the view that is not shown is scrolled down

const map = new TextMap();
const live = new LivePanel();
const chat = new Chat(map, () => shelf.show());
const shelf = new Conversations(chat);
const models = new Models(() => {
  live.hide();
  showView();
  return showModel();
});

function showView() {
  const watched = location.hash === "#server";
  const changes = find("server").hidden === watched;
  const here = scrollY;
  find("ask").hidden = watched;
  find("server").hidden = !watched;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === (watched ? "#server" : "#ask")) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (watched) live.show();
  else live.hide();
  if (!changes) return;
  scrollTo(0, elsewhere);
  elsewhere = here;
}

function showTheme() {
  const { theme } = document.documentElement.dataset;
  find("theme").textContent = `Theme: ${theme}`;
  map.redraw();
}

async function showModels() {
  try {
    await models.refresh();
  } catch (error) {
    chat.tell(error.message);
    return;
  }
  await showModel();
}

/** Who is asked; one that is not in memory is not brought there before it is asked something. */
async function showModel() {
  if (!asked.there) {
    const { id, error } = models.current;
    find("models").textContent = error ? `${id} can't be loaded: ${error}` : `${id} is loaded with the first question`;
    chat.documents.window = Infinity;
    chat.documents.show();
    return;
  }
  try {
    const { model, draft, scores_itself: alone, context_length: room } = await json("/v1/specprefill/stats");
    const who = alone ? `Model ${model}, its first layers choose what all layers read` : `Large model ${model}, ${draft ? `small model ${draft}` : "no small model"}`;
    find("models").textContent = `${who}, window of ${count(room)} tokens`;
    server.words = alone ? ONE_MODEL : TWO_MODELS;
    const demo = /^demo(-|$)/.test(model);
    find("intro").textContent = demo ? `${server.words.intro} ${DEMO}` : server.words.intro;
    chat.offered = demo ? SAMPLE.moreOfDemo : SAMPLE.more;
    find("length").placeholder = demo ? DEMO_LENGTH : USUAL_LENGTH;
    chat.documents.window = room;
    chat.documents.show();
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
const header = document.querySelector("header");
new ResizeObserver(() => document.documentElement.style.setProperty("--header", `${header.offsetHeight}px`)).observe(header);
showTheme();
showView();

await chat.restore();
await showModels();
document.documentElement.dataset.ready = "yes";
