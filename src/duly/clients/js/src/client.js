/** What `App` and `Chat` share. */

import { Closed, Refused } from "./errors.js";
import { Listeners } from "./listeners.js";
import { Link } from "./link.js";

const CLOCK_STEP = 2_000;

/** The cursor that is no stream's: the hub's ledger, which a restore from a backup begins anew. It is kept and sent
 * back like the others. */
export const GENERATION = "";

/** The streams that a hub which was restored from a backup does not name any more.
 * @param {Record<string, number>} own @param {Record<string, number>} [told] the cursors of its welcome */
export function forgotten(own, told = {}) {
  if ((told[GENERATION] ?? 0) === (own[GENERATION] ?? 0)) return [];
  return Object.keys(own).filter((stream) => stream !== GENERATION && told[stream] === undefined);
}

/**
 * What `App` and `Chat` share: the link to the hub, what is told to listeners, how it begins and how it ends.
 * What has an underscore is between this class and those two.
 * Every client tells when the connection is "up" (our name) or "down" (why), or "denied": the hub no longer
 * knows our token (it is tried again, ever more slowly).
 * @template {Record<string, any>} Told
 * @extends {Listeners<Told>}
 */
export class Client extends Listeners {
  #link;
  #resumed = false;
  /** @type {() => void} */
  #isReady = () => {};
  /** @type {(problem: Error) => void} */
  #isRefused = () => {};
  /** @type {Error|null} why nothing is sent any more */
  _closed = null;
  /** How far the hub's clock is ahead of ours, in ms: that of a wall tablet may be anywhere. */
  #ahead = 0;
  /** How far our clock was ahead of the steady one when that was measured: it changes if our clock is set, or if
   * we sleep. */
  #drift = 0;
  /** Those that wait for the next welcome. @type {{resolve: () => void, reject: (problem: Error) => void}[]} */
  #waiting = [];

  /** @param {string} url @param {string} token @param {any} socket @param {string[]} events */
  constructor(url, token, socket, events) {
    super(events);
    /** Our account's name, once the hub has told it. */
    this.name = "";
    /** Resolves at the first welcome, rejects with `Refused` if the hub does not know the token.
     * @type {Promise<void>} */
    this.ready = new Promise((resolve, reject) => {
      this.#isReady = resolve;
      this.#isRefused = reject;
    });
    this.ready.catch(() => {});
    this.#link = new Link(url, token, socket, {
      cursors: () => this._positions(),
      welcome: (frame) => this.#welcome(frame),
      unwelcome: (frame) => this.#unwelcome(frame),
      hear: (frame) => this._hear(frame),
      down: (reason) => this._emit("down", /** @type {any} */ (reason)),
    });
  }

  get connected() {
    return this.#link.up;
  }

  /** End. What is under way rejects with `Closed`; what was kept is resumed by the next page. */
  close() {
    this.#close(new Closed());
  }

  /** @param {Error} problem */
  #close(problem) {
    if (this._closed) return;
    this._closed = problem;
    this.#isRefused(problem);
    for (const { reject } of this.#waiting.splice(0)) reject(problem);
    this._abandon(problem);
    this.#link.close();
  }

  /** @param {any} frame */
  #welcome(frame) {
    if (Number.isFinite(frame.time)) this.#ahead = frame.time - Date.now();
    this.#drift = Date.now() - performance.now();
    this.name = frame.you;
    this._catchUp(frame);
    if (!this.#resumed) {
      this.#resumed = true;
      this._resume();
    }
    this._sendAgain();
    this.#isReady();
    for (const { resolve } of this.#waiting.splice(0)) resolve();
    this._emit("up", /** @type {any} */ (this.name));
  }

  /** @param {any} frame */
  #unwelcome(frame) {
    const refused = new Refused(frame.code ?? 3, frame.error ?? "not_authenticated", frame.detail ?? "");
    if (this.name) this._emit("denied", /** @type {any} */ (refused)); // it knew us before: it is tried again
    else this.#close(refused);
  }

  /** @param {any} frame @param {boolean} [answered] something comes back for it */
  _send(frame, answered) {
    this.#link.send(frame, answered);
  }

  /** Whether the connection was given up, since the hub was silent. */
  _dead() {
    return this.#link.dead();
  }

  /** The hub's time in ms, by what the last welcome said. */
  _now() {
    return Date.now() + this.#ahead;
  }

  /** Resolves when the hub's time is known: after the first welcome, and if our clock was set or we have slept
   * since the last one, after another, for which we connect anew. An id with a wrong time would be refused, and
   * so would all after it, since ids never go back. @returns {Promise<void>} */
  async _timed() {
    await this.ready;
    if (this._closed || Math.abs(Date.now() - performance.now() - this.#drift) < CLOCK_STEP) return;
    const welcome = new Promise((resolve, reject) => {
      this.#waiting.push({ resolve: () => resolve(undefined), reject });
    });
    this.#link.renew("the clock was set");
    await welcome;
  }

  /** When something expires that was asked for at this time of the steady clock, by the hub's time.
   * @param {number} asked @param {number} seconds */
  _expiry(asked, seconds) {
    return Math.round(this._now() - (performance.now() - asked) + seconds * 1_000);
  }

  /** How far we have come in each stream, as the hub is told when we connect. @returns {any} */
  _positions() {}

  /** Take what the welcome says of those streams. @param {any} _frame */
  _catchUp(_frame) {}

  /** Go on with what an earlier page has left, once. */
  _resume() {}

  /** Send again what is under way, at every connection. */
  _sendAgain() {}

  /** @param {any} _frame */
  _hear(_frame) {}

  /** Fail what is under way: it is over. @param {Error} _problem */
  _abandon(_problem) {}
}
