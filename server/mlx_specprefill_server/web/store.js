// Conversations, kept in this browser: their list, and each one with its documents. Nothing of it goes to the server.

const NAME = "mlx-specprefill";
const LIST = "list"; // {id, title, updated, questions}
const WHOLE = "whole"; // {id, …}

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

export function save(conversation) {
  const { id, title, updated, turns } = conversation;
  const questions = turns.map(({ question }) => question).join("\n");
  return transaction("readwrite", (list, whole) => {
    list.put({ id, title, updated, questions });
    whole.put(conversation);
  });
}

export function remove(id) {
  return transaction("readwrite", (list, whole) => {
    list.delete(id);
    whole.delete(id);
  });
}
