// The conversation that is open: asking, answering, stopping, and keeping all of it in the browser.

import { ApiError, json } from "./api.js";
import { BrokenOff, newArm } from "./arm.js";
import { Documents, sizeOf } from "./documents.js";
import { find, newId } from "./format.js";
import { isSample, SAMPLE, sampleText } from "./sample.js";
import { Settings } from "./settings.js";
import * as store from "./store.js";
import { messagesOf, Turn } from "./turn.js";
import { agreed, GOES_ON, goingOn, nextWords, verdictOn } from "./verdict.js";

const SAVE_MS = 500; // after the last change
const OPEN = "conversation"; // the one that this tab shows

const fresh = () => ({ id: newId(), title: "", updated: Date.now(), turns: [],
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
    this.documents = new Documents(() => this.#changed(), (text) => this.tell(text), () => this.#leaveSample());
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
    find("sample-question").textContent = SAMPLE.question;
    find("sample").addEventListener("click", () => !this.running && this.#run((signal) => this.#askSample(signal)));
    find("edit-dialog").addEventListener("close", () => this.#edited());
    addEventListener("focusin", ({ target }) => this.#closePopovers(target));
    this.#followAnswer();
    addEventListener("pagehide", () => this.#save());
  }

  /** Closes what the focus has left, unless it went to the button that opens it. */
  #closePopovers(target) {
    if (target.popoverTargetElement) return;
    for (const name of ["settings", "shelf"]) if (!find(name).contains(target)) find(name).hidePopover();
  }

  tell(text) {
    find("notice").textContent = text;
  }

  /** The end of the conversation stays in view while it grows, until somebody scrolls up. */
  #followAnswer() {
    let before = scrollY;
    addEventListener("scroll", () => {
      if (scrollY < before) this.following = false;
      if (this.#below() <= 1) this.following = true;
      before = scrollY;
    }, { passive: true });
    new ResizeObserver(() => this.running && this.#follow()).observe(find("chat"));
  }

  /** Pixels of the conversation, with its composer, that lie below the window. */
  #below() {
    return find("chat").getBoundingClientRect().bottom - innerHeight;
  }

  #follow() {
    if (this.following && this.#below() > 0) scrollBy(0, this.#below());
  }

  /** Show the conversation that this tab showed last, or an empty one. */
  async restore() {
    const id = sessionStorage.getItem(OPEN) ?? (await store.listed())[0]?.id;
    this.show((id && await store.load(id)) || fresh());
  }

  /** The sample, read in both ways. What is in the composer stays there. */
  async #askSample(signal) {
    const text = await sampleText();
    const tokens = await sizeOf(text);
    if (tokens + SAMPLE.room > this.documents.window) {
      this.tell("The sample is longer than this model's window. Add a document of your own.");
      return;
    }
    await this.#askOne({ question: SAMPLE.question, documents: [{ name: SAMPLE.name, text, tokens }] }, signal);
  }

  /** A document of one's own is asked in a conversation of its own. */
  async #leaveSample() {
    if (!this.conversation.turns.some(isSample)) return;
    const typed = find("question").value;
    find("question").value = "";
    this.#changed();
    await this.begin();
    find("question").value = typed;
  }

  /** Whether there is nothing in it yet. */
  #untouched() {
    const { turns, draft: { question, documents } } = this.conversation;
    return !turns.length && !question && !documents.length;
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
    for (const turn of this.turns) this.#verify(turn);
    this.settings.set(conversation.settings);
    find("question").value = conversation.draft.question;
    this.documents.set(conversation.draft.documents);
    const read = this.turns.findLast((turn) => turn.record.explanation);
    if (read) this.showMap(read);
    else this.map.clear();
    this.#count();
    this.documents.measure();
    this.tell("");
    this.shelved();
  }

  #turn(record) {
    const bare = ![...this.conversation.turns, record].some(({ documents }) => documents.length);
    return new Turn(record, { map: (turn) => this.showMap(turn), again: (turn) => this.#again(turn),
      edit: (turn) => this.#edit(turn), goOn: (turn) => this.#goOn(turn) }, bare);
  }

  showMap(turn) {
    for (const other of this.turns) other.map.setAttribute("aria-pressed", String(other === turn));
    const { explanation, arms, question } = turn.record;
    if (explanation?.chunks) this.map.show(explanation, arms[0].report, question);
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
    const bare = !conversation.draft.documents.length && this.turns.every((turn) => turn.plain) && find("map-body").hidden;
    find("chat").dataset.empty = bare && !this.turns.length ? "yes" : "no";
    find("chat").dataset.bare = bare && this.turns.length ? "yes" : "no";
    find("chat").dataset.kept = "no";
    find("question").style.height = "auto";
    find("question").style.height = `${find("question").scrollHeight + 2}px`; // with its border
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
    this.documents.before = last?.report ? last.report.prompt_tokens + last.tokens : 0;
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
    this.following = true;
    find("settings").hidePopover();
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
      this.#follow();
      if (focused === find("stop") || focused === document.body) find("question").focus({ preventScroll: true });
    }
  }

  /** The sample is there to show selective reading, also where it would save little. */
  #newArms(asked) {
    if (isSample(asked)) return [newArm("sparse"), newArm("full")];
    const { mode, compare } = this.settings.get();
    return [newArm(mode), ...(compare && mode !== "full" ? [newArm("full")] : [])];
  }

  async #ask(signal) {
    const asked = this.#draft();
    find("question").value = "";
    this.documents.question = 0;
    this.documents.set([]);
    await this.#askOne(asked, signal);
  }

  async #askOne(asked, signal) {
    const { conversation } = this;
    const record = { ...asked, arms: this.#newArms(asked), explanation: null };
    const turn = this.#turn(record);
    conversation.turns.push(record);
    conversation.updated = Date.now();
    this.turns.push(turn);
    find("turns").append(turn.element);
    this.#changed();
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
    if (isSample(turn.record)) return;
    find("question").value = question;
    this.documents.set([...documents, ...this.documents.list]);
    this.documents.measure();
  }

  #edit(turn) {
    this.editing = turn;
    find("edited").value = turn.record.question;
    find("edit-dialog").returnValue = "";
    find("edit-dialog").showModal();
  }

  async #edited() {
    const question = find("edited").value.trim();
    if (find("edit-dialog").returnValue === "use" && question) await this.#again(this.editing, question);
  }

  /** The answer up to where full reading would have gone on otherwise, then full reading's. */
  async #goOn(turn) {
    const [one] = turn.record.arms;
    await this.#again(turn, turn.record.question, [{ ...newArm("full"), text: agreed(one, one.verdict) }]);
  }

  async #again(turn, question = turn.record.question, arms = this.#newArms({ ...turn.record, question })) {
    if (this.running) {
      this.tell("Stop the answer that is coming first.");
      return;
    }
    const index = this.turns.indexOf(turn);
    for (const later of this.turns.splice(index + 1)) later.element.remove();
    this.conversation.turns.splice(index + 1);
    turn.reset(question, arms);
    await this.#run((signal) => this.#answer(turn, signal));
  }

  async #answer(turn, signal) {
    const { record } = turn;
    const { id } = this.conversation;
    const messages = this.#messages(record);
    const [one, other] = turn.arms;
    const most = isSample(record) ? SAMPLE.length : Infinity;
    const { mode, text: begun } = record.arms[0];
    try {
      other?.lane.note("waits for the end of the first answer");
      if (!turn.plain) one.progressed = (text) => this.map.clear(`On its way: ${text}`);
      const options = { ...this.settings.answering(mode, most), ...(begun && GOES_ON) };
      await one.run([...messages, ...goingOn(begun)], options, signal);
      if (!turn.plain) await this.#explain(turn, messages, signal);
      // Apart from the rest of the cache: neither arm may find what the other one has read.
      if (other) await other.run(messages, { ...this.settings.answering("full", most), cache_salt: `compare ${id}` }, signal);
    } finally {
      if (!turn.plain && !record.explanation) this.map.clear();
      for (const arm of record.arms) if (arm.state === "running") arm.state = "stopped";
      turn.finish();
      this.#verify(turn);
    }
  }

  /** The messages up to and with a turn's question. */
  #messages(record) {
    const { turns } = this.conversation;
    return messagesOf(turns.slice(0, turns.indexOf(record) + 1), this.settings.get().system);
  }

  /** Shows what full reading thinks of a selective answer, when the server knows it. */
  async #verify(turn) {
    const [one] = turn.record.arms;
    if (one.report?.mode !== "sparse" || one.state !== "done" || one.verdict !== undefined) return;
    const shown = () => this.turns.includes(turn) && turn.record.arms[0] === one;
    const verdict = await verdictOn(one.id, shown);
    if (!shown()) return;
    one.verdict = verdict;
    if (!verdict) return;
    const begun = agreed(one, verdict);
    if (begun !== null && !this.running) verdict.words = await nextWords(this.#messages(turn.record), begun).catch(() => "");
    if (!shown()) return;
    turn.tellVerdict();
    this.#changed();
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
