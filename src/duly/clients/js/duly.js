// duly for browsers: App, Chat, Sentinel. Made by tools/js from the modules in src/; edit those.
class Refused extends Error {
  constructor(code, error, detail) {
    super(`${detail || error} (code ${code})`);
    this.name = "Refused";
    this.code = code;
    this.error = error;
    this.detail = detail;
  }
}
class Closed extends Error {
  constructor(message = "the app was closed before the command ended") {
    super(message);
    this.name = "Closed";
  }
}
class Listeners {
  #listeners;
  constructor(events) {
    this.#listeners = new Map(events.map((event) => [event, new Set()]));
  }
  on(event, listener) {
    const listeners = this.#listeners.get(event);
    if (!listeners) throw new TypeError(`there is no event ${event}`);
    listeners.add(listener);
    return () => void listeners.delete(listener);
  }
  _emit(event, what) {
    for (const listener of this.#listeners.get(event) ?? []) {
      try {
        listener(what);
      } catch (problem) {
        setTimeout(() => { throw problem; }); // the page's own mistake must not stop us, nor be hidden
      }
    }
  }
}
function nextId(last, now) {
  const [ms, n] = (last ?? "0_-1").split("_").map(Number);
  return `${Math.max(ms, now)}_${n + 1}`;
}
function byCounter(a, b) {
  return Number(a.split("_")[1]) - Number(b.split("_")[1]);
}
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
const RESEND = 3_000;
const INTRODUCTION = 10_000;
class Link {
  #urls;
  #hub = 0;
  #token;
  #sockets;
  #client;
  #socket = null;
  #lost = () => {};
  #closed = false;
  #attempt = 0;
  #retry = undefined;
  #asked = null;
  #wake = () => this.#connectNow();
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
  send(frame, answered = true) {
    if (!this.#socket) return;
    this.#socket.send(JSON.stringify(frame));
    if (answered) this.#asked ??= performance.now();
  }
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
function hubs(urls) {
  return urls.split(",").map((url) => url.trim().replace(/\/+$/, ""));
}
class Client extends Listeners {
  #link;
  #resumed = false;
  #isReady = () => {};
  #isRefused = () => {};
  _closed = null;
  _ahead = 0;
  constructor(url, token, socket, events) {
    super(events);
    this.name = "";
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
    this._emit("up", /** @type {any} */ (this.name));
  }
  #unwelcome(frame) {
    const refused = new Refused(frame.code ?? 3, frame.error ?? "not_authenticated", frame.detail ?? "");
    if (this.name) this._emit("denied", /** @type {any} */ (refused)); // it knew us before: it is tried again
    else this.#close(refused);
  }
  _send(frame, answered) {
    this.#link.send(frame, answered);
  }
  _dead() {
    return this.#link.dead();
  }
  _now() {
    return Date.now() + this._ahead;
  }
  _positions() {}
  _catchUp(_frame) {}
  _resume() {}
  _sendAgain() {}
  _hear(_frame) {}
  _abandon(_problem) {}
}
class Kept {
  #store;
  #space;
  #alone;
  constructor(token, storage) {
    this.#store = (storage === undefined ? localStore() : storage) ?? memoryStore();
    this.#space = `duly:${hash(token)}:`;
    this.#alone = storage !== undefined || !globalThis.indexedDB;
  }
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
  keys(prefix) {
    const all = Array.from({ length: this.#store.length }, (_, i) => this.#store.key(i) ?? "");
    const start = this.#space + prefix;
    return all.filter((key) => key.startsWith(start)).map((key) => key.slice(start.length));
  }
}
let database = null;
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
function localStore() {
  try {
    return globalThis.localStorage ?? null;
  } catch {
    return null;
  }
}
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
const RESENDS = 3;
const PATIENCE = 60_000;
const DAY = 86_400_000;
const FRAME_LIMIT = 256 * 1024;
const UNSETTLED = 100;
const TIMER_LIMIT = 2 ** 31 - 1;
const COMMAND = new Set(["type", "seq_id", "to", "from", "data", "exp", "queue", "order", "timeout"]);
class Command {
  constructor(frame, made, sent) {
    this.frame = frame;
    this.made = made;
    this.sent = sent;
    this.again = false;
    this.taken = false;
    this.progress = undefined;
    this.resends = 0;
    this.nextTry = Infinity;
    this.giveUp = performance.now() + PATIENCE + (frame.timeout ?? 0);
    this.timer = undefined;
    this.accepted = new Promise((resolve, reject) => {
      this.accept = resolve;
      this.deny = reject;
    });
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
class App extends Client {
  #kept;
  #keep;
  #commands = new Map();
  #unsettled = new Map();
  #cursors = {};
  constructor(url, token, { keep = false, storage, socket = globalThis.WebSocket } = {}) {
    super(url, token, socket, ["push", "gap", "end", "up", "down", "denied"]);
    this.#kept = new Kept(token, storage);
    this.#keep = keep;
    this.online = new Set();
    for (const key of this.#kept.keys("seen:")) this.#cursors[key] = Number(this.#kept.get(`seen:${key}`));
  }
  async send(device, type, data, options) {
    return (await this.post(device, type, data, options)).ended;
  }
  async post(device, type, data, { id, expires, queue, order, latest, timeout, progress, fields } = {}) {
    if (this._closed) throw this._closed;
    const taken = Object.keys(fields ?? {}).filter((name) => COMMAND.has(name));
    if (taken.length) throw new TypeError(`${taken}: the protocol's own; give your field another name`);
    const frame = { ...fields, type, seq_id: id, to: device, data };
    if (queue) frame.queue = true;
    if (timeout !== undefined) frame.timeout = Math.round(timeout * 1000);
    if (order !== undefined || latest) frame.order = { key: order ?? "", mode: latest ? "latest" : "replay" };
    const size = new TextEncoder().encode(JSON.stringify(frame)).length + 100;
    if (size > FRAME_LIMIT) throw new Refused(2, "too_large", `${size} bytes; the limit is ${FRAME_LIMIT}`);
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
  _abandon(problem) {
    for (const command of this.#commands.values()) {
      clearTimeout(command.timer);
      command.deny(problem);
      command.reject(problem);
    }
    this.#commands.clear();
  }
  _positions() {
    return this.#cursors;
  }
  _catchUp(frame) {
    this.online = new Set(frame.online ?? []);
    for (const [device, head] of Object.entries(frame.cursors ?? {})) {
      const seen = this.#cursors[device];
      if (seen === undefined) this.#see(device, head);
      else if (seen > head) {
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
      this.#end(command, { state: "unknown", code: 2, detail });
    } else if (code !== 4) {
      this.#end(command, undefined, new Refused(code, error ?? "", detail ?? ""));
    } // 4: try again, which the resend does
  }
  #ack({ type, from, seq_id, code, state, data, detail, progress, ...fields }) {
    const ack = { state, code, data, detail, fields };
    const command = this.#commands.get(seq_id);
    if (state === "delivered" && code === undefined) {
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
function silent() {
  return { state: "unknown", code: 4, detail: "no answer came; whether it took effect is not known" };
}
function never() {
  return { state: "expired", code: 4, detail: "the hub could not be reached; it was never sent" };
}
async function within(ms, promise) {
  let timer;
  const late = new Promise((resolve) => { timer = setTimeout(() => resolve(false), ms); });
  try {
    return await Promise.race([promise.then(() => true), late]);
  } finally {
    clearTimeout(timer);
  }
}
const ACK_PAUSE = 50;
const ACK_LINES = 200;
class Chat extends Client {
  #kept;
  #sending = new Map();
  #turns = new Map();
  #asked = new Map();
  #questions = 0;
  #at = {};
  #unacknowledged = {};
  #acking = undefined;
  #unsaid = 0;
  static async register(url, name, password) {
    await post(url, "people", { name, password });
  }
  static async logIn(url, name, password, device = "") {
    return (await post(url, "login", { name, password, device })).token;
  }
  constructor(url, token, { storage, socket = globalThis.WebSocket } = {}) {
    super(url, token, socket, ["line", "receipt", "typing", "presence", "up", "down", "denied"]);
    this.#kept = new Kept(token, storage);
    for (const conv of this.#kept.keys("at:")) this.#at[conv] = Number(this.#kept.get(`at:${conv}`));
  }
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
  #say(type, to, data, exp) {
    return this.#inTurn(to ?? "", async () => {
      await this.ready;
      if (this._closed) throw this._closed;
      const frame = { type, seq_id: await this.#kept.mint(this._now()), to, data, exp };
      this.#kept.set(`line:${frame.seq_id}`, JSON.stringify(frame));
      return this.#deliver(frame);
    });
  }
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
  read(conv, n) { this._send({ type: "read", conv, n }, false); }
  typing(conv) { this._send({ type: "typing", conv }, false); }
  async history(conv, { before, limit = 50 } = {}) {
    return (await this.#ask("history", { conv, before, limit })).lines.map(lineOf);
  }
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
  _resume() {
    for (const id of this.#kept.keys("line:").sort(byCounter)) {
      const kept = this.#kept.get(`line:${id}`);
      if (kept === null) continue; // another tab has just ended it
      const frame = JSON.parse(kept);
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
      if (conv !== undefined && (this.#at[conv] ?? n - 1) === n - 1) this.#have(conv, n);
      line.resolve({ conv, n, data });
    } else {
      line.reject(new Refused(code, error ?? "", detail ?? ""));
    }
  }
  _abandon(problem) {
    clearTimeout(this.#acking);
    for (const { timer, reject } of this.#sending.values()) {
      clearTimeout(timer);
      reject(problem);
    }
    for (const { reject } of this.#asked.values()) reject(problem);
  }
}
function lineOf({ conv, n, type, from, data, time, seq_id, edited }) {
  return { conv, n, type, sender: from, data, time, id: seq_id, edited: Boolean(edited) };
}
export { App, Chat, Closed, Refused };
