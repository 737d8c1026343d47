/** A sentinel's way to its tower over plain HTTP, for networks that let no WebSocket through. */

import { hash } from "./ids.js";
import { hubs } from "./link.js";

const HTTP_BATCH = 100;
const HTTP_DEADLINE = 60_000;

/**
 * Carries frames in batches by POST, with the same calls as `Link`. One request is under way at a time, so frames
 * arrive in order. HTTP has no connection: the link is up while requests are answered; after one that is not, an
 * empty batch asks, with back-off, whether the tower answers again.
 */
export class HttpLink {
  #urls;
  #hub = 0;
  #token;
  #client;
  /** @type {any[]} */
  #queue = [];
  #up = false;
  #busy = false;
  #closed = false;
  #attempt = 0;
  /** @type {any} */
  #retry = undefined;
  #request = new AbortController();

  /** @param {string} url @param {string} token
   * @param {{welcome: (frame: any) => void, unwelcome: (frame: any) => void, hear: (frame: any) => void,
   *   down: (reason: string) => void}} client */
  constructor(url, token, client) {
    this.#urls = hubs(url).map((hub) => `${hub}/v1/messages`);
    this.#hub = Number.parseInt(hash(token), 36) % this.#urls.length;
    this.#token = token;
    this.#client = client;
    this.#knock();
  }

  get up() {
    return this.#up;
  }

  /** @param {any} frame */
  send(frame) {
    if (!this.#up) return;
    this.#queue.push(frame);
    this.#carry();
  }

  /** Whether the connection was given up: never, since each request has a deadline. */
  dead() {
    return false;
  }

  close() {
    this.#closed = true;
    this.#up = false;
    clearTimeout(this.#retry);
    this.#request.abort();
  }

  async #knock() {
    try {
      const { date } = await this.#post([]);
      if (this.#closed) return;
      this.#up = true;
      this.#attempt = 0;
      // The header has no fractions of a second: half a second more is right on average.
      this.#client.welcome({ type: "welcome", time: date ? Date.parse(date) + 500 : Date.now() });
      this.#carry();
    } catch {
      this.#lose("the tower does not answer");
    }
  }

  async #carry() {
    if (this.#busy) return;
    this.#busy = true;
    try {
      while (this.#up && this.#queue.length) {
        const { answers } = await this.#post(this.#queue.splice(0, HTTP_BATCH));
        if (this.#closed) return;
        for (const answer of answers) this.#client.hear(answer);
      }
    } catch {
      this.#lose("the tower no longer answers");
    } finally {
      this.#busy = false;
    }
  }

  /** @param {any[]} frames */
  async #post(frames) {
    const late = setTimeout(() => this.#request.abort(), HTTP_DEADLINE);
    try {
      const answer = await fetch(this.#urls[this.#hub], {
        method: "POST",
        body: JSON.stringify(frames),
        headers: { Authorization: `Bearer ${this.#token}`, "Content-Type": "application/json" },
        signal: this.#request.signal,
      });
      const said = await answer.json();
      if ([401, 403, 429].includes(answer.status)) this.#client.unwelcome(said);
      if (!answer.ok) throw new Error(said.detail ?? answer.statusText);
      return { answers: Array.isArray(said) ? said : [], date: answer.headers.get("Date") };
    } finally {
      clearTimeout(late);
    }
  }

  /** @param {string} reason */
  #lose(reason) {
    if (this.#closed) return;
    const was = this.#up;
    this.#up = false;
    this.#queue.length = 0; // the sentinel sends it again
    this.#request = new AbortController();
    if (was) this.#client.down(reason);
    const round = Math.floor(this.#attempt / this.#urls.length);
    const pause = Math.min(200 * 2 ** round, 10_000) * (1 - 0.2 * Math.random());
    this.#attempt += 1;
    this.#hub = (this.#hub + 1) % this.#urls.length;
    this.#retry = setTimeout(() => this.#knock(), pause);
  }
}
