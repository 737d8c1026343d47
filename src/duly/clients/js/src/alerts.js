/** One signal, and what becomes of it. */

/** How a signal ended: `done` (the tower has it), `cancelled`, `held` (held back, for `reason`), `superseded`,
 * `expired`, `failed` or `unknown`.
 * @typedef {{state: string, reason: string, event: string}} SentEvent */

/** What can be added to an event later.
 * @typedef {{severity?: import("./policy.js").Severity, meta?: any, location?: any}} Newer */

/** What an alert needs of its sentinel.
 * @typedef {{cancel: (device: string, event?: string) => void,
 *   update: (event: string, newer: Newer) => void}} AlertOwner */

/** A signal that was reported. */
export class Alert {
  #owner;
  #ruled = false;
  #calledOff = false;
  /** @type {(ruling: string) => void} */
  #settle = () => {};
  /** @type {(end: SentEvent) => void} */
  #end = () => {};
  /** @type {((problem: Error) => void)[]} */
  #fails = [];

  /** @param {AlertOwner} owner @param {string} device @param {string} reason */
  constructor(owner, device, reason) {
    this.#owner = owner;
    this.device = device;
    this.reason = reason;
    /** The event's id, once it is stored; of a repeat, the id of the event it repeats. */
    this.id = "";
    /** Resolves when the signal is judged and stored, with `pass` or why it was held back.
     * @type {Promise<string>} */
    this.stored = new Promise((resolve, reject) => {
      this.#settle = resolve;
      this.#fails.push(reject);
    });
    /** Resolves with how it ended. @type {Promise<SentEvent>} */
    this.sent = new Promise((resolve, reject) => {
      this.#end = resolve;
      this.#fails.push(reject);
    });
    for (const promise of [this.stored, this.sent]) promise.catch(() => {}); // it need not be awaited
  }

  /** Call it off. If it has gone out already, a correction follows. */
  cancel() {
    if (!this.#ruled) this.#calledOff = true;
    else if (this.id) this.#owner.cancel(this.device, this.id);
  }

  /** Add something newer: it goes out with the event, or after it. Await `stored` first.
   * @param {Newer} newer */
  update(newer) {
    this.#owner.update(this.id, newer);
  }

  /** For the sentinel: the signal is judged. @param {string} event @param {string} ruling */
  _rule(event, ruling) {
    this.#ruled = true;
    this.id = event;
    this.#settle(ruling);
    if (this.#calledOff) this.cancel();
  }

  /** For the sentinel: it has ended. @param {SentEvent} end */
  _end(end) {
    this.#end(end);
  }

  /** For the sentinel: its end will not be heard. @param {Error} problem */
  _abandon(problem) {
    for (const fail of this.#fails) fail(problem);
  }
}
