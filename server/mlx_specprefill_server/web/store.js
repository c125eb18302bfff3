// Conversations, kept in this browser: their list, and each one with its documents. Nothing of it goes to the server.

const NAME = "mlx-specprefill";
const LIST = "list"; // {id, title, updated, questions}
const WHOLE = "whole"; // {id, …}

const others = new BroadcastChannel(NAME); // tabs

let opened = null;

function database() {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => {
      for (const store of [LIST, WHOLE]) request.result.createObjectStore(store, { keyPath: "id" });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opened;
}

/** What `work` asks of the stores, when all of it has been done. */
async function transaction(mode, work) {
  const running = (await database()).transaction([LIST, WHOLE], mode);
  const request = work(running.objectStore(LIST), running.objectStore(WHOLE));
  return new Promise((resolve, reject) => {
    running.oncomplete = () => resolve(request?.result);
    running.onabort = running.onerror = () => reject(running.error);
  });
}

/** Newest first; none where the browser keeps nothing, as in some private windows. */
export async function listed() {
  const all = await transaction("readonly", (list) => list.getAll()).catch(() => []);
  return all.sort((one, other) => other.updated - one.updated);
}

/** undefined: there is none. */
export const load = (id) => transaction("readonly", (_, whole) => whole.get(id)).catch(() => undefined);

/** Writes a conversation beside what another tab has written of it; returns both together. */
export async function save(conversation) {
  let both;
  await transaction("readwrite", (list, whole) => {
    whole.get(conversation.id).onsuccess = ({ target }) => {
      both = merged(target.result, conversation);
      const { id, title, updated, turns } = both;
      list.put({ id, title, updated, questions: turns.map(({ question }) => question).join("\n") });
      whole.put(both);
    };
  });
  others.postMessage(conversation.id);
  return both;
}

/** The turns of both, each in its newer version, in the order in which they were asked. */
export function merged(kept, own) {
  if (!kept) return own;
  const gone = [...new Set([...kept.gone ?? [], ...own.gone])];
  const turns = new Map(own.turns.map((turn) => [turn.id, turn]));
  for (const turn of kept.turns) {
    if (turn.id && !(turns.get(turn.id)?.version >= turn.version)) turns.set(turn.id, turn);
  }
  const sorted = [...turns.values()].filter(({ id }) => !gone.includes(id)).sort((one, other) => one.asked - other.asked);
  return { ...own, gone, turns: sorted, updated: Math.max(own.updated, kept.updated) };
}

/** Calls back with the id of a conversation that another tab has written. */
export const onWritten = (act) => others.addEventListener("message", ({ data }) => act(data));

export function remove(id) {
  return transaction("readwrite", (list, whole) => {
    list.delete(id);
    whole.delete(id);
  });
}
