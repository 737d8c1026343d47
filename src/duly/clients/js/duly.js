/**
 * duly for browsers: send a command to a device, and know how it ended; and chat. One file, no dependencies.
 *
 * The laws. A command keeps its id: it is sent again every three seconds, three times, and at once after a
 * reconnect, and the hub makes that harmless. It ends, one way or another: what was sent and never answered
 * is `unknown`, what never left us is `expired`. What the hub has taken and we call `unknown` is asked for
 * again at every connection; what it never confirmed is not, since that might run it long after its time. Ids
 * never go backwards, in no tab and after no reload. What devices tell arrives once and in order, also what
 * was missed while away; where that is gone, `gap` says so.
 *
 *     import { App } from "http://127.0.0.1:7800/duly.js";
 *     const app = new App("http://127.0.0.1:7800", token);
 *     const { state, code, data } = await app.send("lock-1", "lock_control", { open: true });
 */

const RESEND = 3_000;
const RESENDS = 3;
const PATIENCE = 60_000;
const DAY = 86_400_000;
const INTRODUCTION = 10_000;
const FRAME_LIMIT = 256 * 1024;
const UNSETTLED = 100;
const TIMER_LIMIT = 2 ** 31 - 1;
const COMMAND = new Set(["type", "seq_id", "to", "from", "data", "exp", "queue", "order", "timeout"]);
const ACK_PAUSE = 50;
const ACK_LINES = 200;

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

/** The hub did not take the command: nothing was done. `code` and `error` (a word) say why. */
export class Refused extends Error {
  /** @param {number} code @param {string} error @param {string} detail */
  constructor(code, error, detail) {
    super(`${detail || error} (code ${code})`);
    this.name = "Refused";
    this.code = code;
    this.error = error;
    this.detail = detail;
  }
}

/** The app was closed before the command ended. */
export class Closed extends Error {
  constructor() {
    super("the app was closed before the command ended");
    this.name = "Closed";
  }
}

/**
 * The connection of a client to its hub, made again with back-off whenever it breaks. It carries frames while
 * it can and loses them while it cannot; the client repeats what was lost. Several hubs may be named, with
 * commas between: when one no longer answers, the next is tried. Which is the first is told by the token, so
 * that they share their clients.
 */
class Link {
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
    const end = (reason) => {
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
    socket.onclose = (event) => end(event.reason || "the connection broke");
    socket.onerror = () => {}; // a close follows
    socket.onmessage = ({ data }) => {
      if (over || this.#closed) return;
      this.#asked = null;
      const frame = JSON.parse(data);
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

/** What survives a reload, of one account: another account's is not ours. */
class Kept {
  #store;
  #space;
  #alone;

  /** @param {string} token @param {Storage|null|undefined} storage */
  constructor(token, storage) {
    this.#store = (storage === undefined ? localStore() : storage) ?? memoryStore();
    this.#space = `duly:${hash(token)}:`;
    this.#alone = storage !== undefined || !globalThis.indexedDB;
  }

  /** A new id. @param {number} now @returns {Promise<string>} */
  async mint(now) {
    if (!this.#alone) return mintAmongTabs(this.#space, (last) => nextId(last, now));
    const id = nextId(this.get("last"), now);
    this.set("last", id);
    return id;
  }

  get(key) {
    return this.#store.getItem(this.#space + key);
  }

  set(key, value) {
    this.#store.setItem(this.#space + key, value);
  }

  forget(key) {
    this.#store.removeItem(this.#space + key);
  }

  /** What is kept under a prefix. */
  keys(prefix) {
    const all = Array.from({ length: this.#store.length }, (_, i) => this.#store.key(i));
    const start = this.#space + prefix;
    return all.filter((key) => key.startsWith(start)).map((key) => key.slice(start.length));
  }
}

/** A command under way. */
class Command {
  /** @param {any} frame @param {number} made when, by the hub's clock @param {boolean} sent */
  constructor(frame, made, sent) {
    this.frame = frame;
    this.made = made;
    this.sent = sent;
    this.again = false;
    this.taken = false;
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
 * What `App` and `Chat` share: the link to the hub, what is told to listeners, how it begins and how it ends.
 * What has an underscore is between this class and those two.
 * @template {Record<string, any>} Told
 */
class Client {
  #link;
  #resumed = false;
  /** @type {Map<string, Set<(what: any) => void>>} */
  #listeners;
  /** @type {() => void} */
  #isReady = () => {};
  /** @type {(problem: Error) => void} */
  #isRefused = () => {};
  /** @type {Error|null} why nothing is sent any more */
  _closed = null;
  /** How far the hub's clock is ahead of ours, in ms: that of a wall tablet may be anywhere. */
  _ahead = 0;

  /** @param {string} url @param {string} token @param {any} socket @param {string[]} events */
  constructor(url, token, socket, events) {
    this.#listeners = new Map(events.map((event) => [event, new Set()]));
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
      down: (reason) => this._emit("down", reason),
    });
  }

  get connected() {
    return this.#link.up;
  }

  /**
   * Call `listener` for every event of this kind, and when the connection is "up" (our name) or "down" (why),
   * or "denied": the hub no longer knows our token (it is tried again, ever more slowly).
   * @template {keyof Told} E
   * @param {E & string} event
   * @param {(what: Told[E]) => void} listener
   * @returns {() => void} stops it
   */
  on(event, listener) {
    const listeners = this.#listeners.get(event);
    if (!listeners) throw new TypeError(`there is no event ${event}`);
    listeners.add(listener);
    return () => void listeners.delete(listener);
  }

  /** End. What is under way rejects with `Closed`; what was kept is resumed by the next page. */
  close() {
    this.#close(new Closed());
  }

  #close(problem) {
    if (this._closed) return;
    this._closed = problem;
    this.#isRefused(problem);
    this._abandon(problem);
    this.#link.close();
  }

  #welcome(frame) {
    this._ahead = frame.time - Date.now();
    this.name = frame.you;
    this._catchUp(frame);
    if (!this.#resumed) {
      this.#resumed = true;
      this._resume();
    }
    this._sendAgain();
    this.#isReady();
    this._emit("up", this.name);
  }

  #unwelcome(frame) {
    const refused = new Refused(frame.code ?? 3, frame.error ?? "not_authenticated", frame.detail ?? "");
    if (this.name) this._emit("denied", refused); // it knew us before: it is tried again
    else this.#close(refused);
  }

  _emit(event, what) {
    emit(this.#listeners.get(event) ?? [], what);
  }

  /** @param {any} frame @param {boolean} [answered] something comes back for it */
  _send(frame, answered) {
    this.#link.send(frame, answered);
  }

  /** Whether the connection was given up, since the hub was silent. */
  _dead() {
    return this.#link.dead();
  }

  /** The hub's time in ms. */
  _now() {
    return Date.now() + this._ahead;
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

  /**
   * @param {string} url the hub, such as "http://127.0.0.1:7800"; several with commas between
   * @param {string} token
   * @param {object} [options]
   * @param {boolean} [options.keep] commands under way survive a reload of the page, and are resumed
   * @param {Storage|null} [options.storage] where ids, cursors and commands are kept, if not in the browser's
   *   own stores; null: nowhere
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
    if (taken.length) throw new TypeError(`${taken}: the protocol's own; give your field another name`);
    /** @type {any} */
    const frame = { ...fields, type, seq_id: id, to: device, data };
    if (queue) frame.queue = true;
    if (timeout !== undefined) frame.timeout = Math.round(timeout * 1000);
    if (order !== undefined || latest) frame.order = { key: order ?? "", mode: latest ? "latest" : "replay" };
    const size = new TextEncoder().encode(JSON.stringify(frame)).length + 100;
    if (size > FRAME_LIMIT) throw new Refused(2, "too_large", `${size} bytes; the limit is ${FRAME_LIMIT}`);
    // Ids and expiries are in the hub's time, so the first welcome must come before the first id.
    const asked = Date.now();
    const waits = Math.min(PATIENCE, expires === undefined ? PATIENCE : expires * 1000);
    if (!(await within(waits, this.ready))) {
      frame.seq_id ??= "";
      const command = new Command(frame, asked, false);
      this.#end(command, never());
      return command;
    }
    frame.seq_id ??= await this.#kept.mint(this._now());
    if (this._closed) throw this._closed;
    const known = this.#commands.get(frame.seq_id);
    if (known) return known;
    const command = new Command(frame, this._now(), false);
    command.progress = progress;
    if (expires !== undefined) frame.exp = Math.round(asked + this._ahead + expires * 1000);
    this.#write(command);
    this.#commands.set(command.id, command);
    this.#transmit(command);
    return command;
  }

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

  #setTimer(command) {
    clearTimeout(command.timer);
    const next = Math.min(command.resends < RESENDS ? command.nextTry : Infinity, command.giveUp);
    const wait = Math.min(Math.max(next - performance.now(), 0), TIMER_LIMIT);
    command.timer = setTimeout(() => this.#checkTimers(command), wait);
  }

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
    this.#kept.forget(`command:${command.id}`);
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
  }

  #write(command) {
    if (!this.#keep) return;
    const { frame, made, sent } = command;
    this.#kept.set(`command:${command.id}`, JSON.stringify({ frame, made, sent }));
  }

  /** What a page before this one had under way. What was never answered in its time is not sent again. */
  _resume() {
    if (!this.#keep) return;
    const number = (id) => Number(id.split("_")[1]);
    for (const id of this.#kept.keys("command:").sort((a, b) => number(a) - number(b))) {
      if (this.#commands.has(id)) continue;
      const { frame, made, sent } = JSON.parse(this.#kept.get(`command:${id}`));
      const command = new Command(frame, made, sent);
      const until = frame.queue ? (frame.exp ?? made + DAY) : made;
      if (this._now() > until + PATIENCE) this.#end(command, sent ? silent() : never());
      else this.#commands.set(id, command);
    }
  }

  /** Commands under way reject with `Closed`; kept ones are resumed by the next page. */
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

  _catchUp(frame) {
    this.online = new Set(frame.online ?? []);
    for (const [device, head] of Object.entries(frame.cursors ?? {})) {
      const seen = this.#cursors[device];
      if (seen === undefined) this.#see(device, head);
      else if (seen > head) {
        // The hub counts anew: it has lost what it had.
        this._emit("gap", { device, after: seen, first: head + 1 });
        this.#see(device, head);
      }
    }
  }

  _sendAgain() {
    for (const command of [...this.#commands.values()]) this.#transmit(command);
    for (const { taken, frame } of this.#unsettled.values()) if (taken) this._send(frame);
  }

  _hear(frame) {
    if (frame.type === "server_ack") this.#serverAck(frame);
    else if (frame.type === "ack") this.#ack(frame);
    else if (frame.type === "gap") this.#gap(frame);
    else if (frame.from !== undefined && frame.cursor !== undefined) this.#push(frame);
  }

  #serverAck({ seq_id, code, error, detail }) {
    const command = this.#commands.get(seq_id);
    if (!command) return;
    if (code === 0 || code === 5) {
      this.#accepted(command);
    } else if (error === "stale" && command.again) {
      // Too old *now*: an earlier transmission may have been taken, done and forgotten.
      this.#end(command, { state: "unknown", code: 2, detail });
    } else if (code !== 4) {
      this.#end(command, undefined, new Refused(code, error ?? "", detail ?? ""));
    } // 4: try again, which the resend does
  }

  #ack({ type, from, seq_id, code, state, data, detail, progress, ...fields }) {
    const ack = { state, code, data, detail, fields };
    const command = this.#commands.get(seq_id);
    if (state === "delivered" && code === undefined) {
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

  #push({ from: device, type, data, cursor, time, ...fields }) {
    if (cursor <= (this.#cursors[device] ?? 0)) return;
    this.#cursors[device] = cursor;
    if (type === "device_status") this.online[data?.online ? "add" : "delete"](device);
    this._emit("push", { device, type, data, cursor, time, fields });
    this.#see(device, cursor);
  }

  #gap({ from: device, after, first }) {
    this._emit("gap", { device, after, first });
    this.#see(device, first - 1);
  }

  #see(device, cursor) {
    this.#cursors[device] = cursor;
    this.#kept.set(`seen:${device}`, String(cursor));
  }
}

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
   * @param {{storage?: Storage|null, socket?: any}} [options] as for `App` */
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
    const exp = expires === undefined ? undefined : Math.round(this._now() + expires * 1000);
    return this.#say(to.startsWith("#") ? "group_chat" : "one_chat", to, data, exp);
  }

  edit(conv, n, what) {
    return this.#say("edit", undefined, { conv, n, data: typeof what === "string" ? { text: what } : what });
  }

  delete(conv, n) {
    return this.#say("delete", undefined, { conv, n });
  }

  /** @param {string} name @param {string[]} members
   * @param {{history?: "all"|"joined", open?: boolean}} [options] @returns {Promise<string>} its id */
  async createGroup(name, members = [], { history = "all", open = false } = {}) {
    return (await this.#say("group_create", undefined, { name, members, history, open })).data.group;
  }

  invite(group, user) { return this.#say("group_invite", undefined, { group, user }); }
  join(group) { return this.#say("group_join", undefined, { group }); }
  leave(group) { return this.#say("group_leave", undefined, { group }); }
  remove(group, user) { return this.#say("group_remove", undefined, { group, user }); }
  setRole(group, user, role) { return this.#say("group_role", undefined, { group, user, role }); }
  askFriend(user) { return this.#say("friend_ask", undefined, { user }); }
  acceptFriend(user) { return this.#say("friend_accept", undefined, { user }); }
  removeFriend(user) { return this.#say("friend_remove", undefined, { user }); }
  block(user) { return this.#say("block", undefined, { user }); }
  unblock(user) { return this.#say("unblock", undefined, { user }); }

  /** @returns {Promise<Sent>} */
  #say(type, to, data, exp) {
    return this.#inTurn(to ?? "", async () => {
      await this.ready;
      if (this._closed) throw this._closed;
      const frame = { type, seq_id: await this.#kept.mint(this._now()), to, data, exp };
      this.#kept.set(`line:${frame.seq_id}`, JSON.stringify(frame));
      return this.#deliver(frame);
    });
  }

  /** One after the other to each recipient. */
  #inTurn(to, work) {
    const turn = (this.#turns.get(to) ?? Promise.resolve()).then(work, work);
    this.#turns.set(to, turn);
    turn.catch(() => {});
    return turn;
  }

  #deliver(frame) {
    return new Promise((resolve, reject) => {
      const line = { frame, resolve, reject, tries: 0, timer: undefined };
      this.#sending.set(frame.seq_id, line);
      this.#transmit(line);
    });
  }

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

  /** Say that everything up to `n` was read. */
  read(conv, n) { this._send({ type: "read", conv, n }, false); }
  typing(conv) { this._send({ type: "typing", conv }, false); }

  // ── asking ─────────────────────────────────────────────────────────────────────────────────────

  /** Lines before a number (or the newest), oldest first.
   * @param {string} conv @param {{before?: number, limit?: number}} [options] @returns {Promise<Line[]>} */
  async history(conv, { before, limit = 50 } = {}) {
    return (await this.#ask("history", { conv, before, limit })).lines.map(lineOf);
  }

  /** How far a line has come: delivered to k of n, read by m of n. */
  receipts(conv, n) { return this.#ask("receipts", { conv, n }); }
  async conversations() { return (await this.#ask("conversations", {})).conversations; }
  group(group) { return this.#ask("group_info", { group }); }
  friends() { return this.#ask("friends", {}); }

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

  _catchUp(frame) {
    for (const [conv, n] of Object.entries(frame.cursors ?? {})) {
      if (n > (this.#at[conv] ?? -1)) this.#have(conv, n);
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
    const number = (id) => Number(id.split("_")[1]);
    for (const id of this.#kept.keys("line:").sort((a, b) => number(a) - number(b))) {
      const frame = JSON.parse(this.#kept.get(`line:${id}`));
      this.#inTurn(frame.to ?? "", () => this.#deliver(frame));
    }
  }

  _hear(frame) {
    const { type, from, conv, n, data } = frame;
    if (type === "server_ack") this.#serverAck(frame);
    else if (type === "receipt") this._emit("receipt", { conv, n, reader: from, state: data.state });
    else if (type === "typing") this._emit("typing", { conv, sender: from });
    else if (type === "presence") this._emit("presence", { sender: from, data });
    else if (conv !== undefined && n !== undefined) this.#told(conv, n, frame);
  }

  #told(conv, n, frame) {
    const at = this.#at[conv] ?? n - 1;
    if (n === at + 1) {
      this._emit("line", lineOf(frame));
      this.#have(conv, n);
    }
    if (n <= at + 1) this.#acknowledge(conv);
  }

  #have(conv, n) {
    this.#at[conv] = n;
    this.#kept.set(`at:${conv}`, String(n));
  }

  /** The first at once, what follows it together. */
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
      // What we said ourselves is not told to us again, if it comes next.
      if (conv !== undefined && (this.#at[conv] ?? n - 1) === n - 1) this.#have(conv, n);
      line.resolve({ conv, n, data });
    } else {
      line.reject(new Refused(code, error ?? "", detail ?? ""));
    }
  }

  /** What is under way is sent by the next page. */
  _abandon(problem) {
    clearTimeout(this.#acking);
    for (const { timer, reject } of this.#sending.values()) {
      clearTimeout(timer);
      reject(problem);
    }
    for (const { reject } of this.#asked.values()) reject(problem);
  }
}

/** @returns {Line} */
function lineOf({ conv, n, type, from, data, time, seq_id, edited }) {
  return { conv, n, type, sender: from, data, time, id: seq_id, edited: Boolean(edited) };
}

/** @param {string} url @param {string} path @param {any} body */
async function post(url, path, body) {
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
function hubs(urls) {
  return urls.split(",").map((url) => url.trim().replace(/\/+$/, ""));
}

/** @param {Iterable<(what: any) => void>} listeners @param {any} what */
function emit(listeners, what) {
  for (const listener of listeners) {
    try {
      listener(what);
    } catch (problem) {
      setTimeout(() => { throw problem; }); // the page's own mistake must not stop us, nor be hidden
    }
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

/** Whether the promise resolves in time; rejects as it does. */
async function within(ms, promise) {
  let timer;
  const late = new Promise((resolve) => { timer = setTimeout(() => resolve(false), ms); });
  try {
    return await Promise.race([promise.then(() => true), late]);
  } finally {
    clearTimeout(timer);
  }
}

/** Ids rise in both parts, whatever the clock does.
 * @param {string|null|undefined} last @param {number} now */
function nextId(last, now) {
  const [ms, n] = (last ?? "0_-1").split("_").map(Number);
  return `${Math.max(ms, now)}_${n + 1}`;
}

/** @type {Promise<IDBDatabase>|null} */
let database = null;

/** The next id of an account, whichever tab asks. Not in localStorage: tabs see each other's writes there too
 * late, even under a lock. A transaction is one, for all of them.
 * @param {string} space @param {(last: string|undefined) => string} next @returns {Promise<string>} */
async function mintAmongTabs(space, next) {
  database ??= new Promise((resolve, reject) => {
    const opening = indexedDB.open("duly", 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore("ids");
    opening.onsuccess = () => resolve(opening.result);
    opening.onerror = () => reject(opening.error);
  });
  try {
    const transaction = (await database).transaction("ids", "readwrite", { durability: "strict" });
    const ids = transaction.objectStore("ids");
    return await new Promise((resolve, reject) => {
      let id = "";
      const reading = ids.get(space);
      reading.onsuccess = () => {
        id = next(reading.result);
        ids.put(id, space);
      };
      transaction.oncomplete = () => resolve(id);
      transaction.onabort = () => reject(transaction.error);
    });
  } catch (problem) {
    database = null; // closed under us, as when the user clears the site's data
    throw problem;
  }
}

/** 53 bits of a token: enough to tell accounts apart, too little to be one. */
function hash(text) {
  let a = 0xdeadbeef;
  let b = 0x41c6ce57;
  for (let i = 0; i < text.length; i++) {
    a = Math.imul(a ^ text.charCodeAt(i), 2654435761);
    b = Math.imul(b ^ text.charCodeAt(i), 1597334677);
  }
  a = Math.imul(a ^ (a >>> 16), 2246822507) ^ Math.imul(b ^ (b >>> 13), 3266489909);
  b = Math.imul(b ^ (b >>> 16), 2246822507) ^ Math.imul(a ^ (a >>> 13), 3266489909);
  return (4294967296 * (2097151 & b) + (a >>> 0)).toString(36);
}

/** The browser's own store, unless it is forbidden or there is none. */
function localStore() {
  try {
    return globalThis.localStorage ?? null;
  } catch {
    return null;
  }
}

/** A store that is forgotten with the page. */
function memoryStore() {
  const items = new Map();
  return {
    get length() { return items.size; },
    key: (i) => [...items.keys()][i] ?? null,
    getItem: (key) => items.get(key) ?? null,
    setItem: (key, value) => { items.set(key, value); },
    removeItem: (key) => { items.delete(key); },
  };
}
