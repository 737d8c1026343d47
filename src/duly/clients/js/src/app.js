/**
 * duly for browsers: send a command to a device, and know how it ended; and chat. One file, no dependencies.
 *
 * The laws. A command keeps its id: it is sent again every three seconds, three times, and at once after a
 * reconnect, and the hub makes that harmless. It ends, one way or another: what was sent and never answered
 * is `unknown`, what never left us is `expired`. What we call `unknown` is asked for at every connection: what
 * the hub has taken is sent again; of what it never confirmed we ask the `outcome`, which runs nothing, since a
 * repeat might run it long after its time. Ids
 * never go backwards, in no tab and after no reload. What devices tell arrives once and in order, also what
 * was missed while away; where that is gone, `gap` says so.
 *
 *     import { App } from "http://127.0.0.1:7800/duly.js";
 *     const app = new App("http://127.0.0.1:7800", token);
 *     const { state, code, data } = await app.send("lock-1", "lock_control", { open: true });
 */

import { Client, GENERATION, forgotten } from "./client.js";
import { Refused } from "./errors.js";
import { byCounter } from "./ids.js";
import { Kept } from "./kept.js";
import { RESEND } from "./link.js";
import { download } from "./media.js";

export { Closed, Refused } from "./errors.js";
export { MediaError } from "./media.js";

const RESENDS = 3;
const PATIENCE = 60_000;
const DAY = 86_400_000;
const FRAME_LIMIT = 256 * 1024;
const UNSETTLED = 100;
const TIMER_LIMIT = 2 ** 31 - 1;
const COMMAND = new Set(["type", "seq_id", "to", "from", "data", "exp", "queue", "order", "timeout"]);

/** How a command ended.
 * @typedef {object} Ack
 * @property {"done"|"failed"|"expired"|"superseded"|"cancelled"|"unknown"} state
 * @property {number} code 0 done, or what went wrong
 * @property {any} [data]
 * @property {string} [detail] a sentence
 * @property {Record<string, any>} [fields] what the device's ack carried beside that
 */

/** @typedef {object} SendOptions
 * @property {string} [id] send under this id again, instead of a new one
 * @property {number} [expires] seconds after which it must not take effect
 * @property {boolean} [queue] keep it for a device that is away
 * @property {string} [order] the lane in which a sender's commands keep their order
 * @property {boolean} [latest] in that lane only the newest counts
 * @property {number} [timeout] seconds that the device may take, instead of the hub's patience
 * @property {(progress: any) => void} [progress] hears how far a device is that says so
 * @property {Record<string, any>} [fields] stand beside `data`, for devices that look for their own there
 */

/** Something a device told. `cursor` numbers a device's pushes.
 * @typedef {{device: string, type: string, data: any, cursor: number, time?: number,
 *   fields?: Record<string, any>}} Push
 */

/** Pushes after `after` and before `first` are gone: we were away too long.
 * @typedef {{device: string, after: number, first: number}} Gap
 */

/** A command has ended, also one resumed after a reload, also one that was `unknown` and is settled late.
 * @typedef {{id: string, device: string, type: string, ack?: Ack, refused?: Refused}} End
 */

/** @typedef {{push: Push, gap: Gap, end: End, up: string, down: string, denied: Refused}} Events */

/** A command under way. */
class Command {
  /** @param {any} frame @param {number} made when, by the hub's clock @param {boolean} sent */
  constructor(frame, made, sent) {
    this.frame = frame;
    this.made = made;
    this.sent = sent;
    this.again = false;
    this.taken = false;
    /** A hub that was restored from a backup since may have taken it. */
    this.inDoubt = false;
    /** @type {((progress: any) => void)|undefined} */
    this.progress = undefined;
    this.resends = 0;
    this.nextTry = Infinity;
    this.giveUp = performance.now() + PATIENCE + (frame.timeout ?? 0);
    /** @type {any} */
    this.timer = undefined;
    /** Resolves when the hub has stored it. @type {Promise<void>} */
    this.accepted = new Promise((resolve, reject) => {
      this.accept = resolve;
      this.deny = reject;
    });
    /** Resolves when it has ended. @type {Promise<Ack>} */
    this.ended = new Promise((resolve, reject) => {
      this.resolve = resolve;
      this.reject = reject;
    });
    this.accepted.catch(() => {}); // a caller may await them, and need not: no warning follows
    this.ended.catch(() => {});
  }

  get id() {
    return this.frame.seq_id;
  }
}

/**
 * An app's side of the wire. It tells of every "push", "gap" and "end".
 * @extends {Client<Events>}
 */
export class App extends Client {
  #kept;
  #keep;
  /** @type {Map<string, Command>} */
  #commands = new Map();
  /** Ended as unknown here, so far. @type {Map<string, Command>} */
  #unsettled = new Map();
  /** @type {Record<string, number>} */
  #cursors = {};
  /** The hub was restored from a backup before the last welcome. */
  #restored = false;

  /**
   * @param {string} url the hub, such as "http://127.0.0.1:7800"; several with commas between
   * @param {string} token
   * @param {object} [options]
   * @param {boolean} [options.keep] commands under way survive a reload of the page, and are resumed
   * @param {import("./kept.js").SyncStorage|null} [options.storage] where ids, cursors and commands are kept, if not
   *   in the browser's own stores; null: nowhere
   * @param {new (url: string) => WebSocket} [options.socket] a WebSocket, where there is none, as in Node 20
   */
  constructor(url, token, { keep = false, storage, socket = globalThis.WebSocket } = {}) {
    super(url, token, socket, ["push", "gap", "end", "up", "down", "denied"]);
    this.#kept = new Kept(token, storage);
    this.#keep = keep;
    /** Our devices that are online, as far as the hub has told. @type {Set<string>} */
    this.online = new Set();
    for (const key of this.#kept.keys("seen:")) this.#cursors[key] = Number(this.#kept.get(`seen:${key}`));
  }

  // ── commands ───────────────────────────────────────────────────────────────────────────────────

  /** Send a command and wait for its end. Rejects with `Refused` if the hub does not take it.
   * @param {string} device @param {string} type @param {any} [data] @param {SendOptions} [options]
   * @returns {Promise<Ack>} */
  async send(device, type, data, options) {
    return (await this.post(device, type, data, options)).ended;
  }

  /** Send a command without waiting for its end.
   * @param {string} device @param {string} type @param {any} [data] @param {SendOptions} [options]
   * @returns {Promise<{id: string, accepted: Promise<void>, ended: Promise<Ack>}>} */
  async post(device, type, data, { id, expires, queue, order, latest, timeout, progress, fields } = {}) {
    if (this._closed) throw this._closed;
    const taken = Object.keys(fields ?? {}).filter((name) => COMMAND.has(name));
    if (taken.length) throw new TypeError(`${taken}: a field of the protocol; give your own field another name`);
    /** @type {any} */
    const frame = { ...fields, type, seq_id: id, to: device, data };
    if (queue) frame.queue = true;
    if (timeout !== undefined) frame.timeout = Math.round(timeout * 1000);
    if (order !== undefined || latest) frame.order = { key: order ?? "", mode: latest ? "latest" : "replay" };
    const size = new TextEncoder().encode(JSON.stringify(frame)).length + 100;
    if (size > FRAME_LIMIT) throw new Refused(2, "too_large", `${size} bytes; the limit is ${FRAME_LIMIT}`);
    // Ids and expiries are in the hub's time, so a welcome must have told it before the first id.
    const asked = performance.now();
    const waits = Math.min(PATIENCE, expires === undefined ? PATIENCE : expires * 1000);
    if (!(await within(waits, this._timed()))) {
      frame.seq_id ??= "";
      const command = new Command(frame, this._now(), false);
      this.#end(command, never());
      return command;
    }
    frame.seq_id ??= await this.#kept.mint(this._now());
    if (this._closed) throw this._closed;
    const known = this.#commands.get(frame.seq_id);
    if (known) return known;
    const command = new Command(frame, this._now(), false);
    command.progress = progress;
    if (expires !== undefined) frame.exp = this._expiry(asked, expires);
    this.#write(command);
    this.#commands.set(command.id, command);
    this.#transmit(command);
    return command;
  }

  /** Fetch a file from a device, checked by its hash.
   * @param {string} device @param {string} name @param {import("./media.js").DownloadOptions} [options]
   * @returns {Promise<Uint8Array>} */
  download(device, name, options) {
    return download(this, device, name, options);
  }

  /** @param {Command} command */
  #transmit(command) {
    command.nextTry = Infinity; // without a connection, the next one sends it
    if (this.connected) {
      command.again = command.sent;
      if (!command.sent) {
        command.sent = true;
        command.giveUp = performance.now() + PATIENCE + (command.frame.timeout ?? 0);
        this.#write(command); // first: after a reload it must not pass for one that never left us
      }
      this._send(command.frame);
      command.nextTry = performance.now() + RESEND;
    }
    this.#setTimer(command);
  }

  /** @param {Command} command */
  #setTimer(command) {
    clearTimeout(command.timer);
    const next = Math.min(command.resends < RESENDS ? command.nextTry : Infinity, command.giveUp);
    const wait = Math.min(Math.max(next - performance.now(), 0), TIMER_LIMIT);
    command.timer = setTimeout(() => this.#checkTimers(command), wait);
  }

  /** @param {Command} command */
  #checkTimers(command) {
    const now = performance.now();
    if (now >= command.giveUp) {
      this.#end(command, command.sent ? silent() : never());
    } else if (now >= command.nextTry && command.resends < RESENDS) {
      command.resends += 1;
      if (!this._dead()) this.#transmit(command);
    } else {
      this.#setTimer(command);
    }
  }

  /** @param {Command} command */
  #accepted(command) {
    const { exp, queue, timeout } = command.frame;
    const waits = queue ? Math.max(0, (exp ?? command.made + DAY) - this._now()) : 0;
    command.giveUp = performance.now() + waits + PATIENCE + (timeout ?? 0);
    command.taken = true;
    command.accept();
    this.#setTimer(command);
  }

  /** @param {Command} command @param {Ack|undefined} ack @param {Refused} [refused] */
  #end(command, ack, refused) {
    clearTimeout(command.timer);
    this.#commands.delete(command.id);
    this.#unsettled.delete(command.id);
    const { to: device, type } = command.frame;
    if (ack) {
      command.accept();
      command.resolve(ack);
    } else {
      command.deny(refused);
      command.reject(refused);
    }
    if (ack?.state === "unknown") {
      this.#unsettled.set(command.id, command);
      const [oldest] = this.#unsettled.keys();
      if (this.#unsettled.size > UNSETTLED) this.#unsettled.delete(oldest);
    }
    this._emit("end", { id: command.id, device, type, ack, refused });
    this.#kept.forget(`command:${command.id}`); // last: a crash before this tells of the end once more
  }

  /** @param {Command} command */
  #write(command) {
    if (!this.#keep) return;
    const { frame, made, sent } = command;
    this.#kept.set(`command:${command.id}`, JSON.stringify({ frame, made, sent }));
  }

  /** What a page before this one had under way. What was never answered in its time is not sent again. */
  _resume() {
    if (!this.#keep) return;
    for (const id of this.#kept.keys("command:").sort(byCounter)) {
      if (this.#commands.has(id)) continue;
      const kept = this.#kept.get(`command:${id}`);
      if (kept === null) continue; // another tab has just ended it
      const { frame, made, sent } = JSON.parse(kept);
      const command = new Command(frame, made, sent);
      const until = frame.queue ? (frame.exp ?? made + DAY) : made;
      if (this._now() > until + PATIENCE) this.#end(command, sent ? silent() : never());
      else this.#commands.set(id, command);
    }
  }

  /** Commands under way reject with `Closed`; kept ones are resumed by the next page. @param {Error} problem */
  _abandon(problem) {
    for (const command of this.#commands.values()) {
      clearTimeout(command.timer);
      command.deny(problem);
      command.reject(problem);
    }
    this.#commands.clear();
  }

  // ── the wire ───────────────────────────────────────────────────────────────────────────────────

  _positions() {
    return this.#cursors;
  }

  /** @param {any} frame */
  _catchUp(frame) {
    this.online = new Set(frame.online ?? []);
    this.#restored = (frame.cursors?.[GENERATION] ?? 0) !== (this.#cursors[GENERATION] ?? 0);
    for (const device of forgotten(this.#cursors, frame.cursors)) {
      delete this.#cursors[device];
      this.#kept.forget(`seen:${device}`);
    }
    for (const [device, head] of Object.entries(frame.cursors ?? {})) {
      if (!Number.isInteger(head)) continue;
      const seen = this.#cursors[device];
      if (seen === undefined || device === GENERATION) this.#see(device, head);
      else if (seen > head) {
        // The hub was restored from a backup, and gives later numbers out again.
        this._emit("gap", { device, after: seen, first: head + 1 });
        this.#see(device, head);
      }
    }
  }

  _sendAgain() {
    for (const command of [...this.#commands.values()]) {
      if (this.#restored) command.inDoubt = command.sent;
      this.#transmit(command);
    }
    for (const { id, taken, frame } of this.#unsettled.values()) {
      this._send(taken ? frame : { type: "outcome", seq_id: id });
    }
  }

  /** @param {any} frame */
  _hear(frame) {
    if (frame.type === "server_ack") this.#serverAck(frame);
    else if (frame.type === "ack") this.#ack(frame);
    else if (typeof frame.from !== "string") return;
    else if (frame.type === "gap" && Number.isInteger(frame.first)) this.#gap(frame);
    else if (Number.isInteger(frame.cursor)) this.#push(frame);
  }

  /** @param {any} frame */
  #serverAck({ seq_id, code, error, detail }) {
    const command = this.#commands.get(seq_id);
    if (!command) return;
    if (code === 0 || code === 5) {
      this.#accepted(command);
    } else if ((error === "stale" && command.again) || (command.inDoubt && code !== 4)) {
      // Too old *now*, or unknown now: an earlier transmission may have been taken, done and forgotten.
      this.#end(command, { state: "unknown", code: 2, detail });
    } else if (code !== 4) {
      this.#end(command, undefined, new Refused(code, error ?? "", detail ?? ""));
    } // 4: try again, which the resend does
  }

  /** @param {any} frame */
  #ack({ type, from, seq_id, code, state, data, detail, progress, ...fields }) {
    const ack = { state, code, data, detail, fields };
    const command = this.#commands.get(seq_id);
    if (state === "delivered") {
      // The device is at work, and has its time anew.
      if (command) {
        this.#accepted(command);
        command.progress?.(progress);
      }
      return;
    }
    const unsettled = this.#unsettled.get(seq_id);
    if (command) {
      command.taken = true;
      this.#end(command, ack);
    } else if (unsettled && state !== "unknown") {
      this.#end(unsettled, ack);
    }
  }

  /** @param {any} frame */
  #push({ from: device, type, data, cursor, time, ...fields }) {
    const known = this.#cursors[device] ?? 0;
    // A status that only this app is sent, since it was granted the device or lost it, has no number.
    if (cursor < known || (cursor === known && type !== "device_status")) return;
    this.#cursors[device] = cursor;
    if (type === "device_status") this.online[data?.online ? "add" : "delete"](device);
    this._emit("push", { device, type, data, cursor, time, fields });
    this.#see(device, cursor);
  }

  /** @param {any} frame */
  #gap({ from: device, after, first }) {
    this._emit("gap", { device, after, first });
    this.#see(device, first - 1);
  }

  /** @param {string} device @param {number} cursor */
  #see(device, cursor) {
    this.#cursors[device] = cursor;
    this.#kept.set(`seen:${device}`, String(cursor));
  }
}

/** @returns {Ack} */
function silent() {
  return { state: "unknown", code: 4, detail: "no answer came; whether it took effect is not known" };
}

/** @returns {Ack} */
function never() {
  return { state: "expired", code: 4, detail: "the hub could not be reached; it was never sent" };
}

/** Whether the promise resolves in time; rejects as it does.
 * @param {number} ms @param {Promise<any>} promise */
async function within(ms, promise) {
  let timer;
  const late = new Promise((resolve) => { timer = setTimeout(() => resolve(false), ms); });
  try {
    return await Promise.race([promise.then(() => true), late]);
  } finally {
    clearTimeout(timer);
  }
}
