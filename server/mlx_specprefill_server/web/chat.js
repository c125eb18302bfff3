// The conversation that is open: asking, answering, stopping, and keeping all of it in the browser.

import { ApiError, json } from "./api.js";
import { BrokenOff, newArm } from "./arm.js";
import { Documents, tokensOf } from "./documents.js";
import { find } from "./format.js";
import { isSample, SAMPLE, sampleText } from "./sample.js";
import { Settings } from "./settings.js";
import * as store from "./store.js";
import { messagesOf, Turn } from "./turn.js";

const SAVE_MS = 500; // after the last change
const OPEN = "conversation"; // the one that this tab shows

const fresh = () => ({ id: crypto.randomUUID?.() ?? String(Math.random()).slice(2), title: "", updated: Date.now(), turns: [],
  settings: {}, draft: { question: "", documents: [] } });

export class Chat {
  /** `shelved`: called when the list of conversations may have changed. */
  constructor(map, shelved) {
    this.map = map;
    this.shelved = shelved;
    this.running = null;
    this.conversation = fresh();
    this.turns = [];
    this.settings = new Settings(() => this.#changed());
    this.documents = new Documents(() => this.#changed(), (text) => this.tell(text));
    find("form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.#may()) this.#run((signal) => this.#ask(signal));
    });
    find("score").addEventListener("click", () => this.#may() && this.#run((signal) => this.#score(signal)));
    find("stop").addEventListener("click", () => this.running?.abort());
    find("question").addEventListener("input", () => this.#changed());
    find("question").addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.running?.abort();
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      find("form").requestSubmit();
    });
    find("sample").addEventListener("click", () => this.offer());
    addEventListener("pagehide", () => this.#save());
  }

  tell(text) {
    find("notice").textContent = text;
  }

  /** The conversation that this tab showed last, or an empty one; whether there was one. */
  async restore() {
    const id = sessionStorage.getItem(OPEN) ?? (await store.listed())[0]?.id;
    const found = id && await store.load(id);
    this.show(found || fresh());
    return Boolean(found);
  }

  /** The sample, ready to be asked, with both ways of reading it. */
  async offer() {
    try {
      const text = await sampleText();
      const tokens = await tokensOf(text);
      if (tokens + SAMPLE.room > this.documents.window) {
        this.tell("The sample is longer than this model's window. Add a document of your own.");
        return;
      }
      this.documents.set([{ name: SAMPLE.name, text, tokens }]);
    } catch (error) {
      this.tell(describe(error));
      return;
    }
    find("question").value = SAMPLE.question;
    this.settings.set({ ...this.settings.get(), compare: true });
    this.documents.measure();
    find("send").focus({ preventScroll: true });
  }

  /** Whether there is nothing but what the page itself has put there. */
  #untouched() {
    const { turns, draft: { question, documents } } = this.conversation;
    return !turns.length && (isSample({ question, documents }) || (!question && !documents.length));
  }

  async open(id) {
    await this.#leave();
    await this.#save();
    const found = await store.load(id);
    if (found) this.show(found);
  }

  async begin() {
    await this.#leave();
    await this.#save();
    this.show(fresh());
    find("question").focus();
  }

  /** What is being answered is stopped, and all that follows from it is done. */
  async #leave() {
    this.running?.abort();
    await this.work;
  }

  /** Deletes the conversation that is open. */
  async forget() {
    await this.#leave();
    clearTimeout(this.timer);
    const { id } = this.conversation;
    this.conversation = fresh();
    await store.remove(id);
    this.show(this.conversation);
    find("question").focus();
  }

  show(conversation) {
    this.conversation = conversation;
    sessionStorage.setItem(OPEN, conversation.id);
    for (const turn of conversation.turns) {
      for (const arm of turn.arms) if (arm.state === "running") arm.state = "broken"; // the page was left meanwhile
    }
    this.turns = conversation.turns.map((record) => this.#turn(record));
    find("turns").replaceChildren(...this.turns.map((turn) => turn.element));
    this.settings.set(conversation.settings);
    find("question").value = conversation.draft.question;
    this.documents.set(conversation.draft.documents);
    this.#count();
    this.documents.measure();
    this.tell("");
    const read = this.turns.findLast((turn) => turn.record.explanation);
    if (read) this.showMap(read);
    else this.map.clear();
    this.shelved();
  }

  #turn(record) {
    return new Turn(record, { map: (turn) => this.showMap(turn), again: (turn) => this.#again(turn) });
  }

  showMap(turn) {
    for (const other of this.turns) other.map.setAttribute("aria-pressed", String(other === turn));
    const { explanation, arms, question } = turn.record;
    if (explanation?.chunks) this.map.show(explanation, arms[0].account, question);
    else this.map.clear(explanation?.message ?? "Nothing is known of what was read for this answer.");
  }

  /** What is in the composer. */
  #draft() {
    return { question: find("question").value.trim(), documents: this.documents.list };
  }

  #changed() {
    const { conversation } = this;
    Object.assign(conversation, { settings: this.settings.get(), draft: this.#draft() });
    const busy = Boolean(this.running);
    find("send").disabled = find("score").disabled = busy || Boolean(this.documents.excess);
    find("stop").hidden = !busy;
    find("send").hidden = busy;
    find("chat").dataset.empty = conversation.turns.length ? "no" : "yes";
    find("chat").dataset.kept = "no";
    const sampled = conversation.draft.documents[0]?.name === SAMPLE.name;
    find("sample-ready").hidden = !sampled;
    find("sample").hidden = sampled;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.#save(), SAVE_MS);
  }

  async #save() {
    clearTimeout(this.timer);
    const { conversation } = this;
    if (this.#untouched()) return;
    conversation.title ||= conversation.turns[0]?.question.slice(0, 60) ?? "";
    try {
      await store.save(conversation);
      find("chat").dataset.kept = "yes";
    } catch (error) {
      this.tell(`This conversation can't be kept in the browser: ${error.message}`);
    }
    this.shelved();
  }

  /** Tokens of the conversation so far, as the server counted them last. */
  #count() {
    const last = this.conversation.turns.at(-1)?.arms[0];
    this.documents.before = last?.account ? last.account.prompt_tokens + last.tokens : 0;
    this.documents.show();
    this.#changed();
  }

  #may() {
    if (this.running || this.documents.excess) return false;
    return find("form").reportValidity();
  }

  #run(work) {
    this.work = this.#guarded(work);
    return this.work;
  }

  async #guarded(work) {
    this.running = new AbortController();
    this.#changed();
    this.tell("");
    try {
      await work(this.running.signal);
    } catch (error) {
      this.tell(describe(error));
    } finally {
      const focused = document.activeElement;
      this.running = null;
      this.#count();
      if (focused === find("stop") || focused === document.body) find("question").focus({ preventScroll: true });
    }
  }

  /** The sample is there to show selective reading, also where it would save little. */
  #newArms(asked) {
    const { mode: wanted, compare } = this.settings.get();
    const mode = wanted === "auto" && isSample(asked) ? "sparse" : wanted;
    return [newArm(mode), ...(compare && mode !== "full" ? [newArm("full")] : [])];
  }

  async #ask(signal) {
    const { conversation } = this;
    const asked = this.#draft();
    const record = { ...asked, arms: this.#newArms(asked), explanation: null };
    const turn = this.#turn(record);
    conversation.turns.push(record);
    conversation.updated = Date.now();
    this.turns.push(turn);
    find("turns").append(turn.element);
    find("question").value = "";
    this.documents.question = 0;
    this.documents.set([]);
    this.#changed();
    turn.element.scrollIntoView({ block: "start" });
    try {
      await this.#answer(turn, signal);
    } catch (error) {
      if (!record.arms[0].text && !record.arms[0].thought) this.#takeBack(turn);
      throw error;
    }
  }

  /** Nothing has come of it: the question and its documents go back into the composer. */
  #takeBack(turn) {
    const { question, documents } = turn.record;
    this.conversation.turns = this.conversation.turns.filter((other) => other !== turn.record);
    this.turns = this.turns.filter((other) => other !== turn);
    turn.element.remove();
    find("question").value = question;
    this.documents.set([...documents, ...this.documents.list]);
    this.documents.measure();
  }

  async #again(turn) {
    if (this.running) {
      this.tell("Stop the answer that is coming first.");
      return;
    }
    const index = this.turns.indexOf(turn);
    for (const later of this.turns.splice(index + 1)) later.element.remove();
    this.conversation.turns.splice(index + 1);
    turn.reset(this.#newArms(turn.record));
    await this.#run((signal) => this.#answer(turn, signal));
  }

  async #answer(turn, signal) {
    const { record } = turn;
    const { turns, id } = this.conversation;
    const messages = messagesOf(turns.slice(0, turns.indexOf(record) + 1), this.settings.get().system);
    const [one, other] = turn.arms;
    const most = isSample(record) ? SAMPLE.length : Infinity;
    try {
      await one.run(messages, this.settings.answering(record.arms[0].mode, most), signal);
      await this.#explain(turn, messages, signal);
      // Apart from the rest of the cache: neither arm may find what the other one has read.
      if (other) await other.run(messages, { ...this.settings.answering("full", most), cache_salt: `compare ${id}` }, signal);
    } finally {
      for (const arm of record.arms) if (arm.state === "running") arm.state = "stopped";
      turn.finish();
    }
  }

  async #explain(turn, messages, signal) {
    turn.record.explanation = await this.#explanation(messages, turn.record.arms[0].mode, signal);
    if (this.turns.includes(turn)) this.showMap(turn);
  }

  /** The server's, or the reason why there is none. */
  async #explanation(messages, mode, signal) {
    try {
      const body = { messages, ...this.settings.reading(mode) };
      const { chunks, forced, predicted } =
        await json("/v1/specprefill/explain", { method: "POST", body, signal });
      return { chunks, forced, predicted };
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      return { message: error.message };
    }
  }

  async #score(signal) {
    const { mode, system } = this.settings.get();
    const messages = messagesOf([...this.conversation.turns, this.#draft()], system);
    const explanation = await this.#explanation(messages, mode, signal);
    for (const turn of this.turns) turn.map.setAttribute("aria-pressed", "false");
    if (explanation.chunks) this.map.show(explanation, null, this.#draft().question);
    else this.tell(explanation.message);
  }
}

function describe(error) {
  if (error.name === "AbortError") return "Stopped.";
  if (error.code === "context_length_exceeded") {
    return `This is longer than the model's window. Remove a document, or begin a new conversation. (${error.message})`;
  }
  if (error instanceof ApiError) return error.message;
  return `The answer broke off: ${error instanceof BrokenOff ? error.message : `${error.message}.`}`;
}
