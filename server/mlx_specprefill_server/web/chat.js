// The conversation that is open: asking, answering, stopping, and keeping all of it in the browser.

import { ApiError, json } from "./api.js";
import { BrokenOff, isOpen, newArm } from "./arm.js";
import { Documents, shown, sizeOf } from "./documents.js";
import { element, find, newId } from "./format.js";
import { isSample, SAMPLE, sampleText } from "./sample.js";
import { Settings } from "./settings.js";
import * as store from "./store.js";
import { answerOf, endAs, isAnsweredElsewhere, isRunning, messagesOf, newTurn, Turn } from "./turn.js";
import { verdictOn } from "./verdict.js";
import { isPartial } from "./words.js";

const SAVE_MS = 500; // after the last change
const BEAT_MS = 2000; // between two writings of an answer that is coming
const OPEN = "conversation"; // the one that this tab shows
const LEFT = "left"; // the answer that was coming when a tab was left, which may have been closed
const PLACE = "place"; // how far it was scrolled down then

/** `gone`: ids of turns that were taken away, which no other tab brings back. */
const fresh = () => ({ id: newId(), title: "", updated: Date.now(), turns: [], gone: [],
  settings: {}, draft: { question: "", documents: [] } });

export class Chat {
  /** `shelved`: called when the list of conversations may have changed. */
  constructor(map, shelved) {
    this.map = map;
    this.shelved = shelved;
    this.running = null;
    this.answering = null; // the record of the turn whose answer is coming
    this.touched = new Set(); // records that have changed since they were kept
    this.conversation = fresh();
    this.turns = [];
    this.offered = SAMPLE.more;
    this.settings = new Settings(() => this.#changed());
    this.documents = new Documents(() => this.#changed(), (text) => this.tell(text), () => this.#leaveSample());
    find("form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.#may()) this.#run((signal) => this.#ask(signal));
    });
    find("score").addEventListener("click", () => this.#may() && this.#run((signal) => this.#score(signal)));
    find("stop").addEventListener("click", () => this.running?.abort());
    find("question").addEventListener("input", () => this.#changed());
    find("question").addEventListener("keydown", ({ key }) => key === "Escape" && this.running?.abort());
    onEnter(find("question"), () => find("form").requestSubmit());
    find("sample-question").textContent = SAMPLE.question;
    find("sample").addEventListener("click", () => !this.running && this.#run((signal) => this.#askSample(signal)));
    find("edit-dialog").addEventListener("close", () => this.#edited());
    onEnter(find("edited"), () => find("edit-dialog").querySelector("[value=use]").click());
    addEventListener("focusin", ({ target }) => this.#closePopovers(target));
    this.#followAnswer();
    addEventListener("pagehide", () => this.#leftBehind());
    store.onWritten(async (id) => {
      this.shelved();
      if (id === this.conversation.id && !this.running) this.#absorb(await store.load(id));
    });
  }

  /** Keeps what the page shows. Only what is written at once is sure to be: the words of the answer that is coming. */
  #leftBehind() {
    const { answering, conversation: { id } } = this;
    if (answering) localStorage.setItem(LEFT, JSON.stringify({ id, turn: answering.id, arms: answering.arms }));
    sessionStorage.setItem(PLACE, scrollY);
    this.#save();
  }

  /** Gives the answer that was coming when the page was left the words that it had. */
  #pickUp(conversation) {
    const { id, turn, arms } = JSON.parse(localStorage.getItem(LEFT) ?? "{}");
    localStorage.removeItem(LEFT);
    const record = conversation.id === id && conversation.turns.find((one) => one.id === turn);
    if (!record) return;
    record.arms = arms;
    endAs("broken", record);
    this.touched.add(record);
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
    const conversation = (id && await store.load(id)) || fresh();
    this.#pickUp(conversation);
    this.sample = await sampleText();
    this.show(conversation);
    const place = sessionStorage.getItem(PLACE);
    if (place !== null) scrollTo(0, place);
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
    conversation.gone ??= [];
    conversation.turns.forEach((record, index) => { // one of an earlier version has none of these
      Object.assign(record, { id: String(index), version: 0, asked: index, alive: 0, ...record });
    });
    this.turns = [];
    this.#lay();
    this.settings.set(conversation.settings);
    find("question").value = conversation.draft.question;
    this.documents.set(conversation.draft.documents);
    this.#showLastMap();
    this.#count();
    this.documents.measure();
    this.tell("");
    this.shelved();
    this.following = true;
    this.#follow();
  }

  /** Shows the turns of the conversation; what is shown already stays as it is. */
  #lay() {
    clearTimeout(this.watch);
    const before = new Map(this.turns.map((turn) => [turn.record, turn]));
    const { turns } = this.conversation;
    for (const record of turns) if (record !== this.answering && !isAnsweredElsewhere(record)) endAs("broken", record);
    if (turns.some((record) => record !== this.answering && isAnsweredElsewhere(record))) {
      this.watch = setTimeout(() => this.#absorb(this.conversation, true), BEAT_MS);
    }
    this.turns = turns.map((record) => before.get(record) ?? this.#turn(record));
    find("turns").replaceChildren(...this.turns.map((turn) => turn.element));
    for (const turn of this.turns) if (!before.has(turn.record)) this.#verify(turn);
  }

  /** Takes up what another tab has written of this conversation; nothing while an answer is coming. */
  #absorb(both, again = false) {
    if (this.running || both?.id !== this.conversation.id) return;
    const { conversation } = this;
    const { turns, gone } = store.merged(both, conversation);
    const same = turns.length === conversation.turns.length && turns.every((record, index) => record === conversation.turns[index]);
    Object.assign(conversation, { gone, title: conversation.title || both.title, turns });
    if (same && !again) return;
    if (again) this.turns = this.turns.filter(({ record }) => !isRunning(record));
    this.#lay();
    this.#recount();
    this.#refresh();
    this.#follow();
  }

  #turn(record) {
    const bare = ![...this.conversation.turns, record].some(({ documents }) => documents.length);
    return new Turn(record, { map: (turn) => this.showMap(turn), again: (turn) => this.#again(turn),
      edit: (turn) => this.#edit(turn), full: (turn) => this.#full(turn) }, bare);
  }

  /** The text of the newest answer of which it is known what was read. */
  #showLastMap() {
    const read = this.turns.findLast((turn) => turn.record.explanation);
    if (read) this.showMap(read);
    else this.map.clear();
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
    this.#refresh();
    find("chat").dataset.kept = "no";
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.#save(), SAVE_MS);
  }

  #refresh() {
    const { conversation } = this;
    Object.assign(conversation, { settings: this.settings.get(), draft: this.#draft() });
    const busy = Boolean(this.running);
    find("send").disabled = find("score").disabled = busy || Boolean(this.documents.excess);
    find("stop").hidden = !busy;
    find("send").hidden = busy;
    const bare = !conversation.draft.documents.length && this.turns.every((turn) => turn.plain) && find("map-body").hidden;
    find("chat").dataset.empty = bare && !this.turns.length ? "yes" : "no";
    find("chat").dataset.bare = bare && this.turns.length ? "yes" : "no";
    this.#preview();
    this.#offer();
    find("question").style.height = "auto";
    find("question").style.height = `${find("question").scrollHeight + 2}px`; // with its border
  }

  /** Beside an empty conversation: the document that will be asked about, or the sample. */
  #preview() {
    const [one] = this.conversation.draft.documents;
    find("chat").dataset.preview = !this.turns.length && find("map-body").hidden ? "yes" : "no";
    find("sample-title").textContent = one?.name ?? SAMPLE.name;
    find("sample-hint").textContent = `Ask${one ? "" : " the sample"}, and the parts that were read light up here.`;
    const text = shown(one?.text ?? this.sample);
    if (find("sample-text").textContent !== text) find("sample-text").textContent = text;
  }

  /** Beside the sample: further questions that its text answers. */
  #offer() {
    const asked = this.turns.map((turn) => turn.record.question);
    const open = this.turns.some((turn) => isSample(turn.record)) ? this.offered.filter((one) => !asked.includes(one)) : [];
    find("more").hidden = Boolean(this.running) || !open.length;
    if (find("more").textContent === open.join("")) return;
    find("more").replaceChildren(...open.map((question) => {
      const button = element("button", { type: "button", textContent: question });
      button.addEventListener("click", () => !this.running && this.#run((signal) => this.#askOne({ question, documents: [] }, signal)));
      return button;
    }));
  }

  async #save() {
    clearTimeout(this.timer);
    const { conversation } = this;
    if (this.#untouched()) return;
    conversation.title ||= conversation.turns[0]?.question.slice(0, 60) ?? "";
    for (const record of this.touched) record.version += 1;
    this.touched.clear();
    this.timer = null;
    try {
      this.#absorb(await store.save(conversation));
      if (this.timer === null) find("chat").dataset.kept = "yes"; // nothing has changed meanwhile
    } catch (error) {
      this.tell(`This conversation can't be kept in the browser: ${error.message}`);
    }
    if (!this.running) this.shelved();
  }

  #count() {
    this.#recount();
    this.#changed();
  }

  /** Tokens of the conversation so far, as the server counted them last. */
  #recount() {
    const last = this.conversation.turns.findLast(({ arms }) => arms[0].report)?.arms[0];
    this.documents.before = last ? last.report.prompt_tokens + last.tokens : 0;
    this.documents.show();
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
      this.tell(error.name === "AbortError" && this.#saysStopped() ? "" : describe(error));
    } finally {
      const focused = document.activeElement;
      this.running = null;
      this.#count();
      this.#follow();
      if (focused === find("stop") || focused === document.body) find("question").focus({ preventScroll: true });
    }
  }

  /** Whether the last answer itself says that it was stopped. */
  #saysStopped() {
    return this.conversation.turns.at(-1)?.arms.some(({ state, report }) => state === "stopped" && !report);
  }

  /** The sample is there to show selective reading, also where it would save little. */
  #newArms(asked, turns) {
    // Apart from the rest of the cache: neither arm may find what the other one has read.
    const both = (mode) => [newArm(mode), newArm("full", `compare ${this.conversation.id}`)];
    if (isSample(asked)) return both("sparse");
    const { mode, compare } = this.settings.get();
    return compare && mode !== "full" ? both(mode) : [newArm(mode, turns.length ? answerOf(turns.at(-1)).salt : undefined)];
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
    const record = newTurn(asked, this.#newArms(asked, conversation.turns));
    const turn = this.#turn(record);
    conversation.turns.push(record);
    this.touched.add(record);
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
    const { question, documents, id } = turn.record;
    this.conversation.gone.push(id);
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

  async #again(turn, question = turn.record.question) {
    if (this.running) {
      this.tell("Stop the answer that is coming first.");
      return;
    }
    const index = this.turns.indexOf(turn);
    for (const later of this.turns.splice(index + 1)) later.element.remove();
    this.conversation.gone.push(...this.conversation.turns.splice(index + 1).map(({ id }) => id));
    turn.reset(question, this.#newArms({ ...turn.record, question }, this.conversation.turns.slice(0, index)));
    await this.#run((signal) => this.#answer(turn, signal));
  }

  /** Lets full reading answer, too: the server has read everything meanwhile. */
  async #full(turn) {
    if (this.running) {
      this.tell("Stop the answer that is coming first.");
      return;
    }
    turn.add(newArm("full"));
    await this.#run((signal) => this.#answer(turn, signal));
  }

  async #answer(turn, signal) {
    const { record } = turn;
    const messages = this.#messages(record);
    const [one, other] = turn.arms;
    const most = isSample(record) ? SAMPLE.length : Infinity;
    const { mode } = record.arms[0];
    this.answering = record;
    const beat = setInterval(() => this.#keepAlive(record), BEAT_MS);
    try {
      if (isOpen(one.record)) {
        other?.lane.note("waits for the end of the first answer");
        if (!turn.plain) one.progressed = (text) => this.map.clear(`On its way: ${text}`);
        await one.run(messages, this.settings.answering(mode, most), signal);
        if (!turn.plain) await this.#explain(turn, messages, signal);
      }
      await other?.run(messages, this.settings.answering("full", most), signal);
    } finally {
      if (!turn.plain && !record.explanation) this.#showLastMap();
      endAs("stopped", record);
      clearInterval(beat);
      this.answering = null;
      this.touched.add(record);
      turn.finish();
      this.#verify(turn);
    }
  }

  /** Writes an answer that is coming, so that other tabs show it. */
  #keepAlive(record) {
    record.alive = Date.now();
    this.touched.add(record);
    this.#save();
  }

  /** The messages up to and with a turn's question. */
  #messages(record) {
    const { turns } = this.conversation;
    return messagesOf(turns.slice(0, turns.indexOf(record) + 1), this.settings.get().system);
  }

  /** Shows what full reading thinks of a selective answer, when the server knows it. */
  async #verify(turn) {
    const [one] = turn.record.arms;
    if (!isPartial(one.report) || one.state !== "done" || one.verdict !== undefined) return;
    const shown = () => this.turns.includes(turn) && turn.record.arms[0] === one;
    const verdict = await verdictOn(one.id, shown);
    if (!shown()) return;
    one.verdict = verdict;
    if (!verdict) return;
    turn.tellVerdict();
    this.#follow();
    this.touched.add(turn.record);
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
      const { chunks, forced, asking } = await json("/v1/specprefill/explain", { method: "POST", body, signal });
      return { chunks, forced, asking };
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

/** Enter acts; with Shift, or in the middle of a composed word, it does what it does in a text. */
function onEnter(field, act) {
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    act();
  });
}

function describe(error) {
  if (error.name === "AbortError") return "Stopped.";
  if (error.code === "context_length_exceeded") {
    return `This is longer than the model's window. Remove a document, or begin a new conversation. (${error.message})`;
  }
  if (error instanceof ApiError) return error.message;
  return `The answer broke off: ${error instanceof BrokenOff ? error.message : `${error.message}.`}`;
}
