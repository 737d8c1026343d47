/** Chat: a person's side of the wire. */

import { Client, forgotten } from "./client.js";
import { Refused } from "./errors.js";
import { byCounter } from "./ids.js";
import { Kept } from "./kept.js";
import { RESEND, post } from "./link.js";

export { Closed, Refused } from "./errors.js";

const ACK_PAUSE = 50;
const ACK_LINES = 200;

/** Something in a conversation: `one_chat`, `group_chat`, `edit`, `delete`, `group_join` …
 * @typedef {{conv: string, n: number, type: string, sender: string, data: any, time: number, id: string,
 *   edited: boolean}} Line */

/** @typedef {{conv: string, n: number, data?: any}} Sent */

/** @typedef {{line: Line, receipt: {conv: string, n: number, reader: string, state: string},
 *   typing: {conv: string, sender: string}, presence: {sender: string, data: any}, up: string,
 *   down: string, denied: Refused}} ChatEvents */

/**
 * A person's side of the wire.
 *
 * The laws. What is said is kept before it is sent, and sent again with the same id until the hub has taken or
 * refused it, also after a reload. What is said to one person or group goes out one line after the other, so
 * it arrives in the order it was said. What others say arrives once and in order, also what was missed; a line
 * is acknowledged when its listeners have had it. It tells of every "line", "receipt", "typing" and "presence".
 *
 *     const token = await Chat.logIn("http://127.0.0.1:7800", "ann", password);
 *     const chat = new Chat("http://127.0.0.1:7800", token);
 *     chat.on("line", ({ sender, data }) => show(sender, data.text));
 *     const { conv, n } = await chat.send("bob", "hello");
 * @extends {Client<ChatEvents>}
 */
export class Chat extends Client {
  #kept;
  /** What is under way, by id. @type {Map<string, any>} */
  #sending = new Map();
  /** The end of the queue to each recipient. @type {Map<string, Promise<any>>} */
  #turns = new Map();
  /** @type {Map<string, any>} */
  #asked = new Map();
  #questions = 0;
  /** The last line of each conversation that we have. @type {Record<string, number>} */
  #at = {};
  /** @type {Record<string, number>} */
  #unacknowledged = {};
  /** @type {any} */
  #acking = undefined;
  #unsaid = 0;

  /** Create an account, at a hub with open registration.
   * @param {string} url @param {string} name @param {string} password */
  static async register(url, name, password) {
    await post(url, "people", { name, password });
  }

  /** A token of your own for this device.
   * @param {string} url @param {string} name @param {string} password @param {string} [device]
   * @returns {Promise<string>} */
  static async logIn(url, name, password, device = "") {
    return (await post(url, "login", { name, password, device })).token;
  }

  /** @param {string} url the hub; several with commas between @param {string} token
   * @param {{storage?: import("./kept.js").SyncStorage|null, socket?: any}} [options] as for `App` */
  constructor(url, token, { storage, socket = globalThis.WebSocket } = {}) {
    super(url, token, socket, ["line", "receipt", "typing", "presence", "up", "down", "denied"]);
    this.#kept = new Kept(token, storage);
    for (const conv of this.#kept.keys("at:")) this.#at[conv] = Number(this.#kept.get(`at:${conv}`));
  }

  // ── saying ─────────────────────────────────────────────────────────────────────────────────────

  /** Say something to a person or a group ("#…"). Text goes as `{text}`, anything else as it is.
   * @param {string} to @param {any} what @param {{expires?: number}} [options] seconds
   * @returns {Promise<Sent>} its conversation and number, once it is stored; rejects with `Refused` */
  send(to, what, { expires } = {}) {
    const data = typeof what === "string" ? { text: what } : what;
    return this.#say(to.startsWith("#") ? "group_chat" : "one_chat", to, data, expires);
  }

  /** @param {string} conv @param {number} n @param {any} what */
  edit(conv, n, what) {
    return this.#say("edit", undefined, { conv, n, data: typeof what === "string" ? { text: what } : what });
  }

  /** @param {string} conv @param {number} n */
  delete(conv, n) {
    return this.#say("delete", undefined, { conv, n });
  }

  /** @param {string} name @param {string[]} members
   * @param {{history?: "all"|"joined", open?: boolean}} [options] @returns {Promise<string>} its id */
  async createGroup(name, members = [], { history = "all", open = false } = {}) {
    return (await this.#say("group_create", undefined, { name, members, history, open })).data.group;
  }

  /** @param {string} group @param {string} user */
  invite(group, user) { return this.#say("group_invite", undefined, { group, user }); }
  /** @param {string} group */
  join(group) { return this.#say("group_join", undefined, { group }); }
  /** @param {string} group */
  leave(group) { return this.#say("group_leave", undefined, { group }); }
  /** @param {string} group @param {string} user */
  remove(group, user) { return this.#say("group_remove", undefined, { group, user }); }
  /** @param {string} group @param {string} user @param {string} role */
  setRole(group, user, role) { return this.#say("group_role", undefined, { group, user, role }); }
  /** @param {string} user */
  askFriend(user) { return this.#say("friend_ask", undefined, { user }); }
  /** @param {string} user */
  acceptFriend(user) { return this.#say("friend_accept", undefined, { user }); }
  /** @param {string} user */
  removeFriend(user) { return this.#say("friend_remove", undefined, { user }); }
  /** @param {string} user */
  block(user) { return this.#say("block", undefined, { user }); }
  /** @param {string} user */
  unblock(user) { return this.#say("unblock", undefined, { user }); }

  /** @param {string} type @param {string|undefined} to @param {any} data @param {number} [expires] seconds
   * @returns {Promise<Sent>} */
  #say(type, to, data, expires) {
    const asked = performance.now();
    return this.#inTurn(to ?? "", async () => {
      await this._timed();
      if (this._closed) throw this._closed;
      const exp = expires === undefined ? undefined : this._expiry(asked, expires);
      const frame = { type, seq_id: await this.#kept.mint(this._now()), to, data, exp };
      this.#kept.set(`line:${frame.seq_id}`, JSON.stringify(frame));
      return this.#deliver(frame);
    });
  }

  /** One after the other to each recipient. @param {string} to @param {() => Promise<any>} work */
  #inTurn(to, work) {
    const turn = (this.#turns.get(to) ?? Promise.resolve()).then(work, work);
    this.#turns.set(to, turn);
    turn.catch(() => {});
    return turn;
  }

  /** @param {any} frame */
  #deliver(frame) {
    return new Promise((resolve, reject) => {
      const line = { frame, resolve, reject, tries: 0, timer: undefined };
      this.#sending.set(frame.seq_id, line);
      this.#transmit(line);
    });
  }

  /** @param {any} line */
  #transmit(line) {
    clearTimeout(line.timer);
    if (!this.connected) return; // the next connection sends it
    this._send(line.frame);
    const wait = Math.min(RESEND * 2 ** line.tries, 10 * RESEND);
    line.tries += 1;
    line.timer = setTimeout(() => {
      if (!this._dead()) this.#transmit(line);
    }, wait);
  }

  /** Say that everything up to `n` was read. @param {string} conv @param {number} n */
  read(conv, n) { this._send({ type: "read", conv, n }, false); }
  /** @param {string} conv */
  typing(conv) { this._send({ type: "typing", conv }, false); }

  // ── asking ─────────────────────────────────────────────────────────────────────────────────────

  /** Lines before a number (or the newest), oldest first.
   * @param {string} conv @param {{before?: number, limit?: number}} [options] @returns {Promise<Line[]>} */
  async history(conv, { before, limit = 50 } = {}) {
    return (await this.#ask("history", { conv, before, limit })).lines.map(lineOf);
  }

  /** How far a line has come: delivered to k of n, read by m of n. @param {string} conv @param {number} n */
  receipts(conv, n) { return this.#ask("receipts", { conv, n }); }
  async conversations() {
    const found = [];
    for (let wanted = /** @type {{ after?: string } | null} */ ({}); wanted; ) {
      const page = await this.#ask("conversations", wanted);
      found.push(...page.conversations);
      wanted = page.next ? { after: page.next } : null;
    }
    return found;
  }
  /** @param {string} group */
  group(group) { return this.#ask("group_info", { group }); }
  friends() { return this.#ask("friends", {}); }

  /** @param {string} type @param {any} data */
  #ask(type, data) {
    if (this._closed) return Promise.reject(this._closed);
    return new Promise((resolve, reject) => {
      this.#questions += 1;
      const frame = { type, seq_id: `q${this.#questions}`, data };
      this.#asked.set(frame.seq_id, { frame, resolve, reject });
      this._send(frame);
    });
  }

  // ── hearing ────────────────────────────────────────────────────────────────────────────────────

  _positions() {
    return this.#at;
  }

  /** @param {any} frame */
  _catchUp(frame) {
    for (const conv of forgotten(this.#at, frame.cursors)) {
      delete this.#at[conv];
      this.#kept.forget(`at:${conv}`);
    }
    // A lower number than ours: the hub was restored from a backup, and gives later numbers out again.
    for (const [conv, n] of Object.entries(frame.cursors ?? {})) this.#have(conv, n);
    for (const conv of Object.keys(this.#unacknowledged)) {
      this.#unacknowledged[conv] = Math.min(this.#unacknowledged[conv], this.#at[conv] ?? 0);
    }
  }

  _sendAgain() {
    for (const line of this.#sending.values()) {
      line.tries = 0;
      this.#transmit(line);
    }
    for (const { frame } of this.#asked.values()) this._send(frame);
  }

  /** What a page before this one had not got through goes before anything new. */
  _resume() {
    for (const id of this.#kept.keys("line:").sort(byCounter)) {
      const kept = this.#kept.get(`line:${id}`);
      if (kept === null) continue; // another tab has just ended it
      const frame = JSON.parse(kept);
      this.#inTurn(frame.to ?? "", () => this.#deliver(frame));
    }
  }

  /** @param {any} frame */
  _hear(frame) {
    const { type, from, conv, n, data } = frame;
    if (type === "server_ack") this.#serverAck(frame);
    else if (type === "receipt") this._emit("receipt", { conv, n, reader: from, state: data?.state });
    else if (type === "typing") this._emit("typing", { conv, sender: from });
    else if (type === "presence") this._emit("presence", { sender: from, data });
    else if (typeof conv === "string" && Number.isInteger(n)) this.#told(conv, n, frame);
  }

  /** @param {string} conv @param {number} n @param {any} frame */
  #told(conv, n, frame) {
    const at = this.#at[conv] ?? n - 1;
    if (n === at + 1) {
      this._emit("line", lineOf(frame));
      this.#have(conv, n);
    }
    if (n <= at + 1) this.#acknowledge(conv);
  }

  /** @param {string} conv @param {number} n */
  #have(conv, n) {
    this.#at[conv] = n;
    this.#kept.set(`at:${conv}`, String(n));
  }

  /** The first at once, what follows it together. @param {string} conv */
  #acknowledge(conv) {
    this.#unacknowledged[conv] = this.#at[conv];
    this.#unsaid += 1;
    if (this.#acking !== undefined && this.#unsaid < ACK_LINES) return;
    const say = () => {
      clearTimeout(this.#acking);
      this.#acking = undefined;
      this.#unsaid = 0;
      const due = Object.entries(this.#unacknowledged);
      this.#unacknowledged = {};
      for (const [conv, n] of due) this._send({ type: "ack", conv, n }, false);
      if (due.length) this.#acking = setTimeout(say, ACK_PAUSE);
    };
    say();
  }

  /** @param {any} frame */
  #serverAck({ seq_id, code, conv, n, data, error, detail }) {
    const asked = this.#asked.get(seq_id);
    if (asked) {
      this.#asked.delete(seq_id);
      if (code === 0) asked.resolve(data);
      else asked.reject(new Refused(code, error ?? "", detail ?? ""));
      return;
    }
    const line = this.#sending.get(seq_id);
    if (!line || code === 4) return; // 4: try again, which the resend does
    clearTimeout(line.timer);
    this.#sending.delete(seq_id);
    this.#kept.forget(`line:${seq_id}`);
    if (code === 0 || code === 5) {
      // What we said ourselves is not told to us again, if it comes next. In a conversation that we have not
      // heard of, that is the first line alone: others may be on their way to us.
      if (conv !== undefined && (this.#at[conv] ?? 0) === n - 1) this.#have(conv, n);
      line.resolve({ conv, n, data });
    } else {
      line.reject(new Refused(code, error ?? "", detail ?? ""));
    }
  }

  /** What is under way is sent by the next page. @param {Error} problem */
  _abandon(problem) {
    clearTimeout(this.#acking);
    for (const { timer, reject } of this.#sending.values()) {
      clearTimeout(timer);
      reject(problem);
    }
    for (const { reject } of this.#asked.values()) reject(problem);
  }
}

/** @returns {Line} @param {any} frame */
function lineOf({ conv, n, type, from, data, time, seq_id, edited }) {
  return { conv, n, type, sender: from, data, time, id: seq_id, edited: Boolean(edited) };
}
