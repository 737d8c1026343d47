/** The connection to the hub, and what goes beside it over HTTP. */

import { Refused } from "./errors.js";
import { hash } from "./ids.js";

export const RESEND = 3_000;
const INTRODUCTION = 10_000;

/**
 * The connection of a client to its hub, made again with back-off whenever it breaks. It carries frames while
 * it can and loses them while it cannot; the client repeats what was lost. Several hubs may be named, with
 * commas between: when one no longer answers, the next is tried. Which is the first is told by the token, so
 * that they share their clients.
 */
export class Link {
  #urls;
  #hub = 0;
  #token;
  #sockets;
  #client;
  /** @type {WebSocket|null} the connection, once the hub has welcomed us on it */
  #socket = null;
  /** @type {(reason: string) => void} what to do when it is over */
  #lost = () => {};
  #closed = false;
  #attempt = 0;
  /** @type {any} */
  #retry = undefined;
  /** @type {number|null} since when we wait for any sign of life */
  #asked = null;
  #wake = () => this.#connectNow();

  /** @param {string} url @param {string} token @param {any} sockets
   * @param {{cursors: () => any, welcome: (frame: any) => void, unwelcome: (frame: any) => void,
   *   hear: (frame: any) => void, down: (reason: string) => void}} client */
  constructor(url, token, sockets, client) {
    if (!sockets) throw new TypeError("there is no WebSocket here; pass one as the option `socket`");
    this.#urls = hubs(url).map((hub) => hub.replace(/^http/, "ws") + "/v1/ws");
    this.#hub = Number.parseInt(hash(token), 36) % this.#urls.length;
    this.#token = token;
    this.#sockets = sockets;
    this.#client = client;
    globalThis.addEventListener?.("online", this.#wake);
    this.#connect();
  }

  get up() {
    return this.#socket !== null;
  }

  /** @param {any} frame @param {boolean} [answered] something comes back for it */
  send(frame, answered = true) {
    if (!this.#socket) return;
    this.#socket.send(JSON.stringify(frame));
    if (answered) this.#asked ??= performance.now();
  }

  /** Whether the connection was given up: asked twice and not heard a thing. A browser would take minutes to
   * notice. */
  dead() {
    if (this.#asked === null || performance.now() - this.#asked < 2 * RESEND) return false;
    this.#lost("the hub was silent");
    return true;
  }

  /** Connect anew at once, to be told the hub's time. @param {string} reason */
  renew(reason) {
    if (!this.#socket) return;
    this.#lost(reason);
    this.#connectNow();
  }

  close() {
    this.#closed = true;
    clearTimeout(this.#retry);
    globalThis.removeEventListener?.("online", this.#wake);
    const socket = this.#socket;
    this.#socket = null;
    socket?.close();
  }

  #connect() {
    const socket = new this.#sockets(this.#urls[this.#hub]);
    let over = false;
    const end = (/** @type {string} */ reason) => {
      clearTimeout(late);
      if (over) return;
      over = true;
      socket.close();
      if (this.#socket === socket) {
        this.#socket = null;
        this.#asked = null;
        this.#client.down(reason);
      }
      if (!this.#closed) this.#connectLater();
    };
    const late = setTimeout(() => end("the hub does not answer"), INTRODUCTION);
    socket.onopen = () =>
      socket.send(JSON.stringify({ type: "auth", token: this.#token, cursors: this.#client.cursors() }));
    socket.onclose = (/** @type {CloseEvent} */ event) => end(event.reason || "the connection broke");
    socket.onerror = () => {}; // a close follows
    socket.onmessage = (/** @type {MessageEvent} */ { data }) => {
      if (over || this.#closed) return;
      this.#asked = null;
      const frame = frameOf(data);
      if (!frame) return;
      if (this.#socket === socket) {
        this.#client.hear(frame);
      } else if (frame.type === "welcome") {
        clearTimeout(late);
        this.#lost = end;
        this.#socket = socket;
        this.#attempt = 0;
        this.#client.welcome(frame);
      } else {
        this.#client.unwelcome(frame);
        end("the hub does not want us");
      }
    };
  }

  #connectLater() {
    // Where there are others to try, all of them are tried before we wait any longer.
    const round = Math.floor(this.#attempt / this.#urls.length);
    const pause = Math.min(200 * 2 ** round, 10_000) * (1 - 0.2 * Math.random());
    this.#attempt += 1;
    this.#hub = (this.#hub + 1) % this.#urls.length;
    this.#retry = setTimeout(() => this.#connectAgain(), pause);
  }

  #connectNow() {
    if (this.#retry !== undefined) this.#connectAgain();
  }

  #connectAgain() {
    clearTimeout(this.#retry);
    this.#retry = undefined;
    this.#connect();
  }
}

/** A frame; null for what is none, which is passed over. @param {any} text */
function frameOf(text) {
  try {
    const frame = JSON.parse(text);
    return typeof frame?.type === "string" ? frame : null;
  } catch {
    return null;
  }
}

/** @param {string} url @param {string} path @param {any} body */
export async function post(url, path, body) {
  const [hub, ...others] = hubs(url);
  let answer;
  try {
    answer = await fetch(`${hub}/v1/${path}`, { method: "POST", body: JSON.stringify(body) });
  } catch (problem) {
    if (!others.length) throw problem;
    return post(others.join(), path, body);
  }
  const said = await answer.json();
  if (!answer.ok) throw new Refused(answer.status, said.error ?? "", said.detail ?? "");
  return said;
}

/** The hubs that are named, with commas between. @param {string} urls */
export function hubs(urls) {
  return urls.split(",").map((url) => url.trim().replace(/\/+$/, ""));
}
