// The server's endpoints: the key, JSON, and event streams.

import { find } from "./format.js";

const KEY = "api-key";

/** Which of several models is asked, and whether it is in memory; null: the server has one. */
export const asked = { model: null, there: true };

export class ApiError extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

let asking = null; // one dialog for all requests that were refused meanwhile

/** Whether a key was entered; `refused`: the one that the server has just turned down. */
function askForKey(refused) {
  asking ??= new Promise((resolve) => {
    const dialog = find("key-dialog");
    const field = find("key");
    find("key-refused").hidden = !refused;
    field.value = dialog.returnValue = "";
    dialog.addEventListener("close", () => {
      const entered = dialog.returnValue === "use";
      if (entered) sessionStorage.setItem(KEY, field.value.trim());
      field.value = "";
      asking = null;
      resolve(entered);
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

/** On the person's own wish, whenever it is. */
export const enterKey = () => askForKey(null);

/** A response that succeeded; asks for a key as often as one is needed, until the dialog is closed without one. */
export async function request(path, { method = "GET", body, signal, id } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = body === undefined ? {} : { "content-type": "application/json" };
    if (id) headers["x-request-id"] = id;
    if (key) headers.authorization = `Bearer ${key}`;
    const [where, what] = toModel(path, body);
    const response = await fetch(where, { method, headers, signal, body: what && JSON.stringify(what) }).catch((error) => {
      throw error.name === "AbortError" ? error : new ApiError(0, "Can't reach the server. Does it still run?");
    });
    if (response.status === 401) {
      find("key-button").hidden = false;
      if (await askForKey(key)) continue;
    }
    if (!response.ok) throw await failure(response);
    return response;
  }
}

/** The same request, of the model that is asked. */
function toModel(path, body) {
  if (!asked.model || path.startsWith("/v1/models")) return [path, body];
  if (body !== undefined) return [path, { model: asked.model, ...body }];
  return [path.startsWith("/v1/") ? `${path}?model=${encodeURIComponent(asked.model)}` : path, body];
}

async function failure(response) {
  try {
    const { message, code } = (await response.json()).error;
    return new ApiError(response.status, message, code);
  } catch {
    return new ApiError(response.status, `The server answered ${response.status}.`);
  }
}

export async function json(path, options) {
  return (await request(path, options)).json();
}

/** The data of each server-sent event, parsed, until the stream ends or says [DONE]. */
export async function* events(path, options) {
  const response = await request(path, options);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (block === "data: [DONE]") return;
      if (block.startsWith("data: ")) yield JSON.parse(block.slice(6));
      else if (block.startsWith(": loading ")) yield { loading: JSON.parse(block.slice(10)) };
    }
  }
}
