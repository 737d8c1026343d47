// duly for browsers: App, Chat, Sentinel. Made by tools/js from the modules in src/; edit those.
class Alert {
  #owner;
  #ruled = false;
  #calledOff = false;
  #settle = () => {};
  #end = () => {};
  #fails = [];
  constructor(owner, device, reason) {
    this.#owner = owner;
    this.device = device;
    this.reason = reason;
    this.id = "";
    this.stored = new Promise((resolve, reject) => {
      this.#settle = resolve;
      this.#fails.push(reject);
    });
    this.sent = new Promise((resolve, reject) => {
      this.#end = resolve;
      this.#fails.push(reject);
    });
    for (const promise of [this.stored, this.sent]) promise.catch(() => {}); // it need not be awaited
  }
  cancel() {
    if (!this.#ruled) this.#calledOff = true;
    else if (this.id) this.#owner.cancel(this.device, this.id);
  }
  update(newer) {
    this.#owner.update(this.id, newer);
  }
  _rule(event, ruling) {
    this.#ruled = true;
    this.id = event;
    this.#settle(ruling);
    if (this.#calledOff) this.cancel();
  }
  _end(end) {
    this.#end(end);
  }
  _abandon(problem) {
    for (const fail of this.#fails) fail(problem);
  }
}
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
function frameOf(text) {
  try {
    const frame = JSON.parse(text);
    return typeof frame?.type === "string" ? frame : null;
  } catch {
    return null;
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
const CLOCK_STEP = 2_000;
const GENERATION = "";
function forgotten(own, told = {}) {
  if ((told[GENERATION] ?? 0) === (own[GENERATION] ?? 0)) return [];
  return Object.keys(own).filter((stream) => stream !== GENERATION && told[stream] === undefined);
}
class Client extends Listeners {
  #link;
  #resumed = false;
  #isReady = () => {};
  #isRefused = () => {};
  _closed = null;
  #ahead = 0;
  #drift = 0;
  #waiting = [];
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
    for (const { reject } of this.#waiting.splice(0)) reject(problem);
    this._abandon(problem);
    this.#link.close();
  }
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
    return Date.now() + this.#ahead;
  }
  async _timed() {
    await this.ready;
    if (this._closed || Math.abs(Date.now() - performance.now() - this.#drift) < CLOCK_STEP) return;
    const welcome = new Promise((resolve, reject) => {
      this.#waiting.push({ resolve: () => resolve(undefined), reject });
    });
    this.#link.renew("the clock was set");
    await welcome;
  }
  _expiry(asked, seconds) {
    return Math.round(this._now() - (performance.now() - asked) + seconds * 1_000);
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
const ROUNDS = fractions(64, 1 / 3);
class Sha256 {
  #state = fractions(8, 1 / 2);
  #block = new Uint8Array(64);
  #words = new Uint32Array(64);
  #filled = 0;
  #length = 0;
  add(bytes) {
    this.#length += bytes.length;
    for (let at = 0; at < bytes.length; ) {
      const part = bytes.subarray(at, at + 64 - this.#filled);
      this.#block.set(part, this.#filled);
      this.#filled += part.length;
      at += part.length;
      if (this.#filled === 64) this.#compress();
    }
    return this;
  }
  hex() {
    const length = this.#length;
    this.add(new Uint8Array([0x80]));
    while (this.#filled !== 56) this.add(new Uint8Array(1));
    const view = new DataView(new ArrayBuffer(8));
    view.setUint32(0, Math.floor(length / 2 ** 29));
    view.setUint32(4, (length << 3) >>> 0);
    this.add(new Uint8Array(view.buffer));
    return Array.from(this.#state, (word) => word.toString(16).padStart(8, "0")).join("");
  }
  #compress() {
    const words = this.#words;
    const view = new DataView(this.#block.buffer);
    this.#filled = 0;
    for (let i = 0; i < 16; i++) words[i] = view.getUint32(4 * i);
    for (let i = 16; i < 64; i++) {
      const x = words[i - 15];
      const y = words[i - 2];
      const low = turn(x, 7) ^ turn(x, 18) ^ (x >>> 3);
      const high = turn(y, 17) ^ turn(y, 19) ^ (y >>> 10);
      words[i] = words[i - 16] + low + words[i - 7] + high;
    }
    let [a, b, c, d, e, f, g, h] = this.#state;
    for (let i = 0; i < 64; i++) {
      const choice = (e & f) ^ (~e & g);
      const one = (h + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + choice + ROUNDS[i] + words[i]) | 0;
      const majority = (a & b) ^ (a & c) ^ (b & c);
      const two = ((turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + majority) | 0;
      [h, g, f, e, d, c, b, a] = [g, f, e, (d + one) | 0, c, b, a, (one + two) | 0];
    }
    [a, b, c, d, e, f, g, h].forEach((word, i) => { this.#state[i] += word; });
  }
}
function sha256(text) {
  return new Sha256().add(new TextEncoder().encode(text)).hex();
}
function turn(word, by) {
  return (word >>> by) | (word << (32 - by));
}
function fractions(count, power) {
  const found = new Uint32Array(count);
  for (let n = 2, i = 0; i < count; n++) {
    let divisor = 2;
    while (divisor * divisor <= n && n % divisor) divisor++;
    if (divisor * divisor > n) found[i++] = (n ** power % 1) * 2 ** 32;
  }
  return found;
}
const AT_ONCE = 4;
const ASK_AGAIN = 5;
const MEDIA_PATIENCE = 120_000;
const LOST = ["unknown", "expired", "superseded"];
class MediaError extends Error {
  constructor(message) {
    super(message);
    this.name = "MediaError";
  }
}
async function download(app, device, name, { parts = [], progress } = {}) {
  const media = await ask(app, device, "media_download", { name });
  const { size, sha256, chunk } = media ?? {};
  if (!(size >= 0 && chunk > 0 && typeof sha256 === "string")) {
    throw new MediaError(`${device} does not answer media_download as a device should`);
  }
  const all = Math.ceil(size / chunk);
  if (parts.some((part, n) => n >= all || part.length !== Math.min(chunk, size - n * chunk))) parts.length = 0;
  while (parts.length < all) {
    const wanted = Array.from({ length: Math.min(AT_ONCE, all - parts.length) }, (_, i) => parts.length + i);
    parts.push(...(await Promise.all(wanted.map((n) => chunkOf(app, device, name, n)))));
    progress?.(parts.length, all);
  }
  const whole = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  const found = new Sha256().add(whole).hex();
  if (found === sha256) return whole;
  parts.length = 0;
  throw new MediaError(`${name} arrived damaged (its SHA-256 is ${found.slice(0, 12)}…); ask again`);
}
async function chunkOf(app, device, name, n) {
  for (let tries = 0; tries < ASK_AGAIN; tries++) {
    const answer = await ask(app, device, "media_download_chunk", { name, n });
    if (answer?.data) return Uint8Array.from(atob(answer.data), (letter) => letter.charCodeAt(0));
  }
  throw new MediaError(`${device} does not give chunk ${n} of ${name}`);
}
async function ask(app, device, type, data) {
  const until = performance.now() + MEDIA_PATIENCE;
  for (let pause = 200; ; pause = Math.min(2 * pause, 3_000)) {
    let why = "";
    try {
      const ack = await app.send(device, type, data);
      if (ack.state === "done") return ack.data;
      why = ack.detail || ack.state;
      if (!LOST.includes(ack.state)) throw new MediaError(`${device}: ${why}`);
    } catch (problem) {
      if (!(problem instanceof Refused) || (problem.code !== 1 && problem.code !== 4)) throw problem;
      why = problem.detail;
    }
    if (performance.now() >= until) throw new MediaError(`${device}: ${why}`);
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
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
    this.inDoubt = false;
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
  #restored = false;
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
    if (taken.length) throw new TypeError(`${taken}: a field of the protocol; give your own field another name`);
    const frame = { ...fields, type, seq_id: id, to: device, data };
    if (queue) frame.queue = true;
    if (timeout !== undefined) frame.timeout = Math.round(timeout * 1000);
    if (order !== undefined || latest) frame.order = { key: order ?? "", mode: latest ? "latest" : "replay" };
    const size = new TextEncoder().encode(JSON.stringify(frame)).length + 100;
    if (size > FRAME_LIMIT) throw new Refused(2, "too_large", `${size} bytes; the limit is ${FRAME_LIMIT}`);
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
  download(device, name, options) {
    return download(this, device, name, options);
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
  _hear(frame) {
    if (frame.type === "server_ack") this.#serverAck(frame);
    else if (frame.type === "ack") this.#ack(frame);
    else if (typeof frame.from !== "string") return;
    else if (frame.type === "gap" && Number.isInteger(frame.first)) this.#gap(frame);
    else if (Number.isInteger(frame.cursor)) this.#push(frame);
  }
  #serverAck({ seq_id, code, error, detail }) {
    const command = this.#commands.get(seq_id);
    if (!command) return;
    if (code === 0 || code === 5) {
      this.#accepted(command);
    } else if ((error === "stale" && command.again) || (command.inDoubt && code !== 4)) {
      this.#end(command, { state: "unknown", code: 2, detail });
    } else if (code !== 4) {
      this.#end(command, undefined, new Refused(code, error ?? "", detail ?? ""));
    } // 4: try again, which the resend does
  }
  #ack({ type, from, seq_id, code, state, data, detail, progress, ...fields }) {
    const ack = { state, code, data, detail, fields };
    const command = this.#commands.get(seq_id);
    if (state === "delivered") {
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
    const known = this.#cursors[device] ?? 0;
    if (cursor < known || (cursor === known && type !== "device_status")) return;
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
    return this.#say(to.startsWith("#") ? "group_chat" : "one_chat", to, data, expires);
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
  async conversations() {
    const found = [];
    for (let wanted = /** @type {{ after?: string } | null} */ ({}); wanted; ) {
      const page = await this.#ask("conversations", wanted);
      found.push(...page.conversations);
      wanted = page.next ? { after: page.next } : null;
    }
    return found;
  }
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
    for (const conv of forgotten(this.#at, frame.cursors)) {
      delete this.#at[conv];
      this.#kept.forget(`at:${conv}`);
    }
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
    else if (type === "receipt") this._emit("receipt", { conv, n, reader: from, state: data?.state });
    else if (type === "typing") this._emit("typing", { conv, sender: from });
    else if (type === "presence") this._emit("presence", { sender: from, data });
    else if (typeof conv === "string" && Number.isInteger(n)) this.#told(conv, n, frame);
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
      if (conv !== undefined && (this.#at[conv] ?? 0) === n - 1) this.#have(conv, n);
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
const HTTP_BATCH = 100;
const HTTP_DEADLINE = 60_000;
class HttpLink {
  #urls;
  #hub = 0;
  #token;
  #client;
  #queue = [];
  #up = false;
  #busy = false;
  #closed = false;
  #attempt = 0;
  #retry = undefined;
  #request = new AbortController();
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
  send(frame) {
    if (!this.#up) return;
    this.#queue.push(frame);
    this.#carry();
  }
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
const SECOND = 1_000_000;
const HOUR = 3_600 * SECOND;
const DAY_LONG = 24 * HOUR;
const DISCONNECT = "disconnect";
const SUMMARY = "summary";
const LONGEST = 10 * 366 * 86_400;
const SEVERITIES = ["info", "warning", "critical"];
const USUAL = {
  debounce: 30, per_hour: 10, summary: 300, cooldown: 300, countdown: 15, settle: true, keep: 7 * 86_400,
  heartbeat: 0, retry_first: 5, retry_most: 3_600, tries: 0,
};
function policyOf(limits = {}) {
  const policy = { ...USUAL, ...limits };
  for (const [name, value] of Object.entries(policy)) {
    if (!(name in USUAL)) throw new TypeError(`${name} is not a limit of a sentinel`);
    if (name === "settle") continue;
    if (typeof value !== "number" || !(value >= 0 && value <= LONGEST)) {
      throw new RangeError(`${name} is a number from 0 to ${LONGEST}, not ${value}`);
    }
  }
  const whole = Number.isInteger(policy.per_hour) && Number.isInteger(policy.tries);
  if (!whole || policy.per_hour < 1) throw new RangeError("per_hour is 1 or more, tries 0 or more, in whole");
  if (policy.summary <= 0) throw new RangeError("a summary comes after more than 0 seconds");
  if (policy.countdown >= policy.keep) throw new RangeError("an event would expire in its countdown");
  if (policy.heartbeat > 0 && policy.heartbeat < 1) throw new RangeError("heartbeat is 0, or 1 or more");
  if (!(policy.retry_first > 0 && policy.retry_first <= policy.retry_most)) {
    throw new RangeError("retry_first is more than 0 and at most retry_most");
  }
  return policy;
}
function micros(seconds) {
  return Math.round(seconds * SECOND);
}
class Suppressor {
  #debounce;
  #cooldown;
  #summary;
  #limit;
  constructor(policy) {
    this.#debounce = micros(policy.debounce);
    this.#cooldown = micros(policy.cooldown);
    this.#summary = micros(policy.summary);
    this.#limit = policy.per_hour;
  }
  none() {
    return { last: new Map(), critical: new Map(), passed: [], cancelled: null, summary: null };
  }
  signal(marks, now, critical, reason, limit = true) {
    this.refresh(marks, now);
    const same = (critical ? marks.critical : marks.last).get(reason);
    if (same !== undefined) return { ruling: "debounced", until: same + this.#debounce };
    if (critical) {
      marks.critical.set(reason, now);
    } else {
      if (marks.cancelled !== null) return { ruling: "cooling", until: marks.cancelled + this.#cooldown };
      if (limit && marks.passed.length >= this.#limit) return this.#hold(marks, now, reason);
      marks.passed.push(now);
      if (marks.passed.length > this.#limit) marks.passed.shift();
    }
    marks.last.set(reason, now);
    return { ruling: "pass", until: null };
  }
  #hold(marks, now, reason) {
    const free = marks.passed[0] + HOUR;
    marks.summary ??= { reasons: new Map(), since: now, until: now, due: Math.min(free, now + this.#summary) };
    marks.summary.reasons.set(reason, (marks.summary.reasons.get(reason) ?? 0) + 1);
    marks.summary.until = now;
    return { ruling: "limited", until: free };
  }
  refresh(marks, now) {
    for (const times of [marks.last, marks.critical]) {
      for (const [reason, at] of times) if (!(at <= now && now - at < this.#debounce)) times.delete(reason);
    }
    const { cancelled } = marks;
    if (cancelled !== null && !(cancelled <= now && now - cancelled < this.#cooldown)) marks.cancelled = null;
    marks.passed = marks.passed.filter((at) => at <= now && now - at < HOUR).slice(-this.#limit);
    if (marks.summary && marks.passed.length < this.#limit) {
      marks.summary.due = Math.min(marks.summary.due, now);
    }
  }
  cancelled(marks, now) {
    this.refresh(marks, now);
    marks.cancelled = now;
    marks.last.clear();
    marks.critical.clear();
  }
  forgive(marks, reason, critical) {
    marks.critical.delete(reason);
    if (!critical) marks.last.delete(reason);
  }
  removeFromSummary(marks, reason) {
    const { summary } = marks;
    const count = summary?.reasons.get(reason);
    if (!summary || !count) return;
    if (count > 1) summary.reasons.set(reason, count - 1);
    else summary.reasons.delete(reason);
    if (!summary.reasons.size) marks.summary = null;
  }
  shift(marks, by) {
    for (const times of [marks.last, marks.critical]) {
      for (const [reason, at] of times) times.set(reason, at + by);
    }
    marks.passed = marks.passed.map((at) => at + by);
    if (marks.cancelled !== null) marks.cancelled += by;
    if (!marks.summary) return;
    marks.summary.since += by;
    marks.summary.until += by;
    marks.summary.due += by;
  }
  idle(marks, now) {
    this.refresh(marks, now);
    const { last, critical, passed, cancelled, summary } = marks;
    return !last.size && !critical.size && !passed.length && cancelled === null && summary === null;
  }
}
const RECENT = 32;
const SWEEP = 256;
class MonitoredDevice {
  constructor(name, marks, saved = {}) {
    this.name = name;
    this.marks = marks;
    this.cancels = saved.cancels ?? 0;
    this.back = saved.back ?? 0;
    this.events = new Map(saved.events ?? []);
    this.covered = saved.covered ?? "";
    this.held = new Map(saved.held ?? []);
  }
  hold({ origin, ...signal }, until, limited) {
    const before = this.held.get(signal.reason);
    if (before) {
      const rank = Math.max(SEVERITIES.indexOf(signal.severity), SEVERITIES.indexOf(before.signal.severity));
      signal.severity = /** @type {import("./policy.js").Severity} */ (SEVERITIES[rank]);
      signal.at = Math.min(signal.at, before.signal.at);
      until = Math.min(until, before.until);
    }
    this.held.set(signal.reason, { signal, until, limited });
  }
  recent(at, span = HOUR) {
    return [...this.events].filter(([, then]) => Math.abs(at - then) < span).map(([event]) => event);
  }
  add(event, at) {
    const recent = new Set(this.recent(at, DAY_LONG));
    for (const known of [...this.events.keys()]) if (!recent.has(known)) this.events.delete(known);
    this.events.set(event, at);
    for (const [oldest] of this.events) {
      if (this.events.size <= RECENT) break;
      this.events.delete(oldest);
    }
  }
  save() {
    const { last, critical, passed, cancelled, summary } = this.marks;
    const marks = {
      last: [...last], critical: [...critical], passed, cancelled,
      summary: summary && { ...summary, reasons: [...summary.reasons] },
    };
    const { cancels, back, events, covered, held } = this;
    return JSON.stringify({ marks, cancels, back, events: [...events], covered, held: [...held] });
  }
}
class MonitoredDevices {
  #devices = new Map();
  #longest;
  #summary;
  #sweepAt = SWEEP;
  constructor(policy) {
    this.suppressor = new Suppressor(policy);
    this.#longest = micros(Math.max(policy.debounce, policy.cooldown, policy.summary));
    this.#summary = micros(policy.summary);
  }
  restore(name, text, now) {
    const saved = JSON.parse(text);
    const { last, critical, passed, cancelled, summary } = saved.marks;
    const marks = {
      last: new Map(last), critical: new Map(critical), passed, cancelled,
      summary: summary && { ...summary, reasons: new Map(summary.reasons) },
    };
    if (marks.summary) marks.summary.due = Math.min(marks.summary.due, now + this.#summary);
    const device = new MonitoredDevice(name, marks, saved);
    for (const held of device.held.values()) held.until = Math.min(held.until, now + Math.min(this.#longest, held.until - held.signal.at));
    this.#devices.set(name, device);
  }
  at(name) {
    let device = this.#devices.get(name);
    if (!device) this.#devices.set(name, (device = new MonitoredDevice(name, this.suppressor.none())));
    return device;
  }
  get(name) {
    return this.#devices.get(name);
  }
  of(event) {
    for (const device of this.#devices.values()) if (device.events.has(event)) return device;
    return undefined;
  }
  hold(device, signal, { ruling, until }) {
    const limited = ruling === "limited";
    const when = limited ? (device.marks.summary?.due ?? null) : until;
    const told = signal.reason === DISCONNECT ? device.covered !== "" : ruling !== "cooling";
    if (!told && when !== null) device.hold(signal, when, limited);
    return limited || !told;
  }
  lapsed(now) {
    const over = [];
    for (const device of this.#devices.values()) {
      for (const [reason, held] of device.held) {
        if (held.until > now) continue;
        device.held.delete(reason);
        over.push({ device, held });
      }
    }
    return over.sort((a, b) => a.held.signal.at - b.held.signal.at);
  }
  summaries(now) {
    const due = [];
    for (const device of this.#devices.values()) {
      if (!device.marks.summary) continue;
      this.suppressor.refresh(device.marks, now);
      if (device.marks.summary.due > now) continue;
      due.push({ device, ...device.marks.summary });
      device.marks.summary = null;
    }
    return due;
  }
  get holding() {
    let count = 0;
    for (const device of this.#devices.values()) count += device.held.size;
    return count;
  }
  nextWake() {
    let next = Infinity;
    for (const { held, marks } of this.#devices.values()) {
      for (const { until } of held.values()) next = Math.min(next, until);
      next = Math.min(next, marks.summary?.due ?? Infinity);
    }
    return next;
  }
  shift(by) {
    for (const device of this.#devices.values()) {
      const { back, events, held, marks } = device;
      device.back = back && Math.max(1, back + by);
      for (const [event, at] of events) events.set(event, at + by);
      for (const one of held.values()) {
        one.signal.at = Math.max(0, one.signal.at + by);
        one.until += by;
      }
      this.suppressor.shift(marks, by);
    }
  }
  sweep(now) {
    if (this.#devices.size < this.#sweepAt) return [];
    const idle = [...this.#devices.values()].filter(
      (device) => !device.cancels && !device.held.size && !device.recent(now, DAY_LONG).length
        && this.suppressor.idle(device.marks, now),
    );
    for (const { name } of idle) this.#devices.delete(name);
    this.#sweepAt = Math.max(SWEEP, 2 * this.#devices.size);
    return idle.map(({ name }) => name);
  }
}
const MILLISECOND = 1_000;
const OLDEST = 1_577_836_800_000_000;
const AHEAD = 300_000_000;
const DIFFERS = 60_000_000;
function dated(data, steps, offset) {
  const own = offset + steps;
  const known = data.offset_ms;
  if (known !== undefined && Math.abs(known * MILLISECOND - own) < DIFFERS) return data;
  return { ...data, offset_ms: Math.floor(own / MILLISECOND) };
}
function datedAgain(data, offset, now, keep) {
  if (data.undated) return data;
  const at = data.timestamp * MILLISECOND;
  const tower = now + offset;
  if (data.offset_ms !== undefined) {
    const happened = at + data.offset_ms * MILLISECOND;
    if (OLDEST <= happened && happened <= tower + AHEAD) return happened + keep <= tower ? null : data;
  } else if (at >= OLDEST) {
    for (const by of [offset, 0]) {
      if (tower - keep < at + by && at + by <= tower + AHEAD) {
        return { ...data, offset_ms: Math.floor(by / MILLISECOND) };
      }
    }
  }
  return { ...data, undated: true };
}
const EVENT = "alert_event";
const UPDATE = "alert_update";
const CANCEL = "alert_cancel";
const MS = 1_000;
const JITTER = 0.2;
const UNKNOWN = { queued: false, tries: 0, again: 0, steps: null };
const CALLED_OFF = "a person called it off before it went out";
const SETTLED = "the device was back before the countdown ended";
const OVERTAKEN = "a critical event for the same reason took its place";
const EXPIRED = "it expired before it could be done";
const SILENT = "no answer came; whether it took effect is not known";
function eventId({ sentinel, tower, profile, session }, reason, device, at) {
  return sha256(JSON.stringify({ device, profile, reason, sentinel, session, tower, window_start: at }))
    .slice(0, 32);
}
class Monitor {
  #policy;
  #identity;
  #keep;
  #devices;
  #messages = new Map();
  #offset = null;
  #minted;
  #reachable = false;
  #promised;
  #beatAt = Infinity;
  #random;
  #changes = new Map();
  #effects = [];
  constructor(policy, identity, random = Math.random) {
    this.#policy = policy;
    this.#identity = identity;
    this.#keep = micros(policy.keep);
    this.#devices = new MonitoredDevices(policy);
    this.#promised = policy.heartbeat > 0;
    this.#random = random;
  }
  get waiting() {
    return this.#messages.size + this.#devices.holding;
  }
  take() {
    const taken = { changes: this.#changes, effects: this.#effects };
    this.#changes = new Map();
    this.#effects = [];
    return taken;
  }
  restore(kept, now) {
    const messages = [];
    for (const [key, text] of kept) {
      if (key.startsWith("device:")) this.#devices.restore(key.slice(7), text, now);
      if (key.startsWith("message:")) messages.push({ ...JSON.parse(text), ...UNKNOWN });
    }
    this.#minted = JSON.parse(kept.get("monitor") ?? "{}").minted;
    for (const message of messages.sort((a, b) => a.at - b.at)) {
      const begun = message.expires ? Math.max(message.at, message.expires - this.#keep) : message.at;
      message.due = Math.min(message.due, now + Math.max(0, message.due - begun));
      if (message.expires) message.expires = now + this.#keep;
      this.#messages.set(message.id, message);
      if (message.sent || message.kind !== EVENT) continue;
      const { device_address: device, trigger_reason: reason } = message.data;
      this.#ruled({ device, reason }, "pass", null, message.id, message.due);
    }
    this.#advance(now);
  }
  signal(signal, now) {
    const device = this.#devices.at(signal.device);
    const { suppressor } = this.#devices;
    const critical = signal.severity === "critical";
    const lasting = signal.reason === DISCONNECT;
    let changed = lasting && device.back !== 0;
    if (changed) {
      device.back = 0;
      device.covered = "";
    }
    const counting = this.#counting(signal.device, signal.reason, critical);
    if (counting) {
      if (lasting && device.covered !== counting.id) {
        device.covered = counting.id;
        changed = true;
      }
      this.#ruled(signal, "debounced", counting.due, counting.id);
    } else {
      if (critical && lasting && !device.covered) suppressor.forgive(device.marks, signal.reason, true);
      const decision = suppressor.signal(device.marks, signal.at, critical, signal.reason);
      if (decision.ruling === "pass") {
        this.#pass(signal, device, Math.min(signal.at, now), now);
        return;
      }
      changed = this.#devices.hold(device, signal, decision) || changed;
      const limited = decision.ruling === "limited";
      this.#ruled(signal, decision.ruling, limited ? (device.marks.summary?.due ?? null) : decision.until);
    }
    if (changed) this.#save(device);
  }
  #judgeAgain(now) {
    for (const { device, held } of this.#devices.lapsed(now)) {
      const { signal, limited } = held;
      this.#save(device);
      if (signal.reason === DISCONNECT && (device.back || device.covered)) continue;
      const critical = signal.severity === "critical";
      const { suppressor } = this.#devices;
      const decision = suppressor.signal(device.marks, now, critical, signal.reason, !limited);
      if (decision.ruling === "pass") {
        if (limited) suppressor.removeFromSummary(device.marks, signal.reason);
        this.#pass(signal, device, now, now);
      } else {
        this.#devices.hold(device, signal, decision);
        this.#save(device);
      }
    }
  }
  #pass(signal, device, begins, now) {
    const critical = signal.severity === "critical";
    const reason = critical ? `${signal.reason}, critical` : signal.reason;
    const id = eventId(this.#identity, reason, signal.device, signal.at + device.cancels);
    device.add(id, signal.at);
    device.held.delete(signal.reason);
    if (signal.reason === DISCONNECT) device.covered = id;
    const lasts = signal.countdown ?? micros(this.#policy.countdown);
    const due = lasts ? begins + lasts : Math.min(begins, now);
    for (const name of this.#devices.sweep(now)) this.#changes.set(`device:${name}`, null);
    const milder = critical ? this.#counting(signal.device, signal.reason, false) : undefined;
    this.#ruled(signal, "pass", null, id, due);
    if (milder) {
      device.events.delete(milder.id);
      this.#end(milder, "superseded", OVERTAKEN);
    }
    this.#save(device);
    this.#send(EVENT, id, signal.at, this.#event(signal, device.cancels), due, now);
  }
  #event(signal, cancels, summary) {
    return {
      profile_id: this.#identity.profile, trigger_reason: signal.reason, device_address: signal.device,
      session_id: this.#identity.session, timestamp: Math.floor(signal.at / MS), severity: signal.severity,
      cancelled_count: cancels, device_meta: signal.meta ?? undefined, location: signal.location ?? undefined,
      offset_ms: this.#offset === null ? undefined : Math.floor(this.#offset / MS), summary,
    };
  }
  #sumUp({ device, reasons, since }, now) {
    const id = eventId(this.#identity, SUMMARY, device.name, since);
    const held = [...reasons.values()].reduce((sum, count) => sum + count, 0);
    const summary = { held, reasons: Object.fromEntries(reasons), since: Math.floor(since / MS) };
    const signal = { device: device.name, reason: SUMMARY, at: now, severity: "warning" };
    this.#ruled(signal, "pass", null, id, now);
    this.#save(device);
    this.#send(EVENT, id, now, this.#event(signal, device.cancels, summary), now, now);
  }
  back(name, at) {
    const device = this.#devices.get(name);
    if (!device || device.back) return;
    device.back = at;
    device.covered = "";
    device.held.delete(DISCONNECT);
    this.#save(device);
  }
  cancel(name, event, at, now) {
    const device = name ? this.#devices.get(name) : this.#devices.of(event);
    const known = device && (!event || device.events.has(event));
    const events = !known ? [] : event ? [event] : this.#cancellable(device, at);
    const held = known && !event ? [...device.held.keys()] : [];
    if (!device || (!events.length && !held.length)) {
      this.#effects.push({ do: "cancelled", device: name, dropped: [], corrected: [], held: [] });
      return;
    }
    if (held.length) device.held.clear();
    const dropped = events.filter((one) => this.#messages.get(one)?.sent === false);
    const corrected = events.filter((one) => !dropped.includes(one));
    for (const one of events) device.events.delete(one);
    if (events.includes(device.covered)) device.covered = "";
    device.cancels += 1;
    this.#devices.suppressor.cancelled(device.marks, at);
    this.#save(device);
    this.#effects.push({ do: "cancelled", device: device.name, dropped, corrected, held });
    for (const one of dropped) {
      for (const message of [this.#messages.get(one), ...this.#behind(one)]) {
        if (message) this.#end(message, "cancelled", CALLED_OFF);
      }
    }
    for (const one of corrected) {
      this.#follow(CANCEL, { event: one, cancelled_at: Math.floor(at / MS) }, at, now);
    }
  }
  #cancellable(device, at) {
    const unsent = [...this.#messages.values()].filter(
      ({ kind, sent, data }) => kind === EVENT && !sent && data.device_address === device.name && !data.summary
    );
    return [...new Set([...device.recent(at), ...unsent.map(({ id }) => id)])];
  }
  change(event, change, at, now) {
    if (!this.#devices.of(event)) {
      this.#effects.push({ do: "in vain", event });
      return;
    }
    const waiting = this.#messages.get(event);
    if (!waiting || waiting.sent) {
      this.#follow(UPDATE, { event, ...change }, at, now);
      return;
    }
    waiting.data = { ...waiting.data, ...change };
    waiting.expires = this.#expiry(waiting.data, waiting.at, now);
    this.#store(waiting);
  }
  #follow(kind, data, at, now) {
    this.#minted = nextId(this.#minted, Math.floor(at / MS));
    this.#saveSelf();
    this.#send(kind, this.#minted, at, data, at, now);
  }
  reached(now) {
    this.#reachable = true;
    this.#beatAt = this.#promised ? now : Infinity;
    for (const message of [...this.#messages.values()]) {
      if (!message.sent) continue;
      message.tries = 0;
      this.#transmit(message, now);
    }
    this.#advance(now);
  }
  lost() {
    this.#reachable = false;
    this.#beatAt = Infinity;
  }
  standDown() {
    this.#promised = false;
    this.#beatAt = Infinity;
  }
  measured(offset, now) {
    this.#offset = offset;
    for (const message of [...this.#messages.values()]) {
      if (message.sent || message.kind !== EVENT || !this.#messages.has(message.id)) continue;
      const before = message.data;
      const data = message.steps === null
        ? datedAgain(before, offset, now, this.#keep) : dated(before, message.steps, offset);
      if (data === null && message.expires) this.#ended(message, "expired", EXPIRED, now);
      if (data === null || data === before) continue;
      message.data = data;
      message.expires = this.#expiry(data, message.at, now);
      this.#store(message);
    }
  }
  answered(id, state, detail, now) {
    const message = this.#messages.get(id);
    if (message?.sent) this.#ended(message, state, detail, now);
  }
  #send(kind, id, at, data, due, now) {
    const expires = this.#expiry(data, at, now);
    const message = { id, kind, at, expires, due, data, sent: false, ...UNKNOWN, steps: 0 };
    this.#messages.set(id, message);
    this.#store(message);
    if (due > now) return;
    if (this.#mayStart(message)) this.#start(message, now);
    else this.#queue(message);
  }
  #start(message, now) {
    message.sent = true;
    if (message.expires) message.expires = now + this.#keep;
    this.#messages.delete(message.id); // what was sent is repeated in the order in which it went out
    this.#messages.set(message.id, message);
    this.#store(message);
    this.#transmit(message, now);
  }
  #transmit(message, now) {
    message.tries += 1;
    const { tries, retry_first, retry_most } = this.#policy;
    const longest = micros(Math.min(retry_first * 2 ** Math.min(message.tries - 1, 40), retry_most));
    const more = !tries || message.tries < tries;
    message.again = more ? now + Math.round(longest * (1 - JITTER * this.#random())) : Infinity;
    this.#effects.push({ do: "transmit", message });
  }
  #queue(message) {
    message.queued = true;
    if (message.kind !== EVENT) return;
    const { device_address: device, trigger_reason: reason } = message.data;
    this.#effects.push({ do: "queued", event: message.id, device, reason });
  }
  #mayStart(message) {
    return this.#reachable && (message.kind === EVENT || !this.#messages.has(message.data.event));
  }
  #counting(device, reason, critical) {
    let found;
    for (const message of this.#messages.values()) {
      const { kind, sent, queued, data } = message;
      if (kind !== EVENT || sent || queued || data.device_address !== device) continue;
      if (data.trigger_reason === reason && (data.severity === "critical") === critical) found = message;
    }
    return found;
  }
  #behind(event) {
    return [...this.#messages.values()].filter(({ kind, data }) => kind !== EVENT && data.event === event);
  }
  #expiry(data, at, now) {
    return data.severity === "critical" && !data.event ? 0 : Math.max(at, now) + this.#keep;
  }
  #end(message, state, detail) {
    const { id, kind, data } = message;
    this.#messages.delete(id);
    this.#changes.set(`message:${id}`, null);
    this.#effects.push({ do: "ended", id, kind, event: kind === EVENT ? id : data.event, state, detail });
  }
  #ended(message, state, detail, now) {
    this.#end(message, state, detail);
    if (message.kind !== EVENT) return;
    const never = state !== "done" && state !== "unknown";
    if (never) this.#forget(message, detail === SETTLED);
    for (const waiting of this.#behind(message.id)) {
      if (never) this.#end(waiting, "cancelled", detail);
      else if (waiting.due <= now && this.#mayStart(waiting)) this.#start(waiting, now);
    }
  }
  #forget({ id, data }, settled) {
    const device = this.#devices.get(data.device_address);
    if (!device?.events.delete(id)) return; // a person has called it off, and it is forgotten already
    const critical = data.severity === "critical";
    if (critical || !settled) this.#devices.suppressor.forgive(device.marks, data.trigger_reason, critical);
    if (device.covered === id) device.covered = "";
    this.#save(device);
  }
  wake(now) {
    for (const message of [...this.#messages.values()]) {
      if (!message.sent || !this.#messages.has(message.id)) continue;
      if (message.expires && message.expires <= now) this.#ended(message, "unknown", SILENT, now);
      else if (this.#reachable && message.again <= now) this.#transmit(message, now);
    }
    this.#judgeAgain(now);
    for (const summary of this.#devices.summaries(now)) this.#sumUp(summary, now);
    this.#advance(now);
    if (this.#beatAt <= now) {
      this.#beatAt = now + micros(this.#policy.heartbeat);
      this.#effects.push({ do: "beat" });
    }
  }
  #advance(now) {
    for (const message of [...this.#messages.values()]) {
      if (message.sent || message.due > now || !this.#messages.has(message.id)) continue;
      if (message.expires && message.expires <= now) {
        this.#ended(message, "expired", EXPIRED, now);
        continue;
      }
      if (!message.queued) {
        const { device_address: name, trigger_reason: reason } = message.data;
        const back = this.#devices.get(name)?.back ?? 0;
        if (reason === DISCONNECT && this.#policy.settle && back > 0 && back <= message.due) {
          this.#ended(message, "cancelled", SETTLED, now);
          continue;
        }
        this.#queue(message);
      }
      if (this.#mayStart(message)) this.#start(message, now);
    }
  }
  nextWake() {
    let next = Math.min(this.#devices.nextWake(), this.#beatAt);
    for (const { sent, queued, due, again, expires } of this.#messages.values()) {
      if (expires) next = Math.min(next, expires);
      if (sent && this.#reachable) next = Math.min(next, again);
      if (!sent && !queued) next = Math.min(next, due);
    }
    return next;
  }
  shift(by) {
    this.#devices.shift(by);
    this.#beatAt += by;
    if (this.#offset !== null) this.#offset -= by;
    for (const message of this.#messages.values()) {
      message.due += by;
      message.again += by;
      if (message.expires) message.expires += by;
      if (message.steps !== null) message.steps += by;
      this.#store(message);
    }
  }
  #save(device) {
    this.#changes.set(`device:${device.name}`, device.save());
  }
  #saveSelf() {
    this.#changes.set("monitor", JSON.stringify({ minted: this.#minted }));
  }
  #store({ id, kind, at, expires, due, data, sent }) {
    this.#changes.set(`message:${id}`, JSON.stringify({ id, kind, at, expires, due, data, sent }));
  }
  #ruled({ device, reason, origin }, ruling, until, event = "", due = 0) {
    this.#effects.push({ do: "ruled", origin, device, reason, ruling, until, event, due });
  }
}
const NAME_LIMIT = 200;
const FIELD_LIMIT = 64 * 1024;
const DEPTH_LIMIT = 30;
const HALVES = /\\(?:\\|ud[89a-f][0-9a-f]{2})/g;
function nameOf(field, value) {
  const bytes = typeof value === "string" ? new TextEncoder().encode(value).length : 0;
  if (bytes < 1 || bytes > NAME_LIMIT || /\0|\p{Surrogate}/u.test(value)) {
    throw new TypeError(`${field} is a text of 1 to ${NAME_LIMIT} bytes without NUL`);
  }
  return value;
}
function severityOf(value) {
  if (!SEVERITIES.includes(value)) throw new TypeError(`severity is one of ${SEVERITIES.join(", ")}`);
  return /** @type {import("./policy.js").Severity} */ (value);
}
function fieldOf(field, value) {
  if (value === undefined || value === null) return undefined;
  const text = JSON.stringify(value)?.replace(HALVES, (found) => (found === "\\\\" ? found : "\ufffd"));
  if (text === undefined) throw new TypeError(`${field} cannot be written as JSON`);
  const size = new TextEncoder().encode(text).length;
  if (size > FIELD_LIMIT) throw new RangeError(`${field} has ${size} bytes, the limit is ${FIELD_LIMIT}`);
  const copy = JSON.parse(text);
  if (depthOf(copy) > DEPTH_LIMIT) throw new RangeError(`${field} is nested more than ${DEPTH_LIMIT} deep`);
  return copy;
}
function depthOf(value) {
  if (value === null || typeof value !== "object") return 0;
  return 1 + Object.values(value).reduce((most, one) => Math.max(most, depthOf(one)), 0);
}
class StoreTaken extends Error {
  constructor(message = "the store was opened again elsewhere; this sentinel has stopped") {
    super(message);
    this.name = "StoreTaken";
  }
}
class MemoryStore {
  #items = new Map();
  async load() {
    return new Map(this.#items);
  }
  async write(changes) {
    apply(this.#items, changes);
  }
}
class KeyValueStore {
  #storage;
  #prefix;
  #names = new Set();
  constructor(storage, prefix = "duly:sentinel:") {
    this.#storage = storage;
    this.#prefix = prefix;
  }
  async load() {
    const journal = await this.#storage.getItem(`${this.#prefix}journal`);
    this.#names = new Set(JSON.parse((await this.#storage.getItem(`${this.#prefix}names`)) ?? "[]"));
    if (journal) await this.#carryOut(new Map(JSON.parse(journal)));
    const items = new Map();
    for (const name of this.#names) {
      const text = await this.#storage.getItem(this.#prefix + name);
      if (text !== null) items.set(name, text);
    }
    return items;
  }
  async write(changes) {
    await this.#storage.setItem(`${this.#prefix}journal`, JSON.stringify([...changes]));
    await this.#carryOut(changes);
  }
  async #carryOut(changes) {
    const before = this.#names.size;
    let fewer = false;
    for (const [name, text] of changes) {
      if (text !== null) this.#names.add(name);
      else fewer = this.#names.delete(name) || fewer;
    }
    if (fewer || this.#names.size !== before) {
      await this.#storage.setItem(`${this.#prefix}names`, JSON.stringify([...this.#names]));
    }
    for (const [name, text] of changes) {
      if (text !== null) await this.#storage.setItem(this.#prefix + name, text);
      else await this.#storage.removeItem(this.#prefix + name);
    }
    await this.#storage.removeItem(`${this.#prefix}journal`);
  }
}
class IndexedDbStore {
  #name;
  #owner = Math.random().toString(36).slice(2) + Date.now().toString(36);
  #database = null;
  constructor(name = "duly-sentinel") {
    this.#name = name;
  }
  async load() {
    const items = await this.#within((entries, done) => {
      entries.put(this.#owner, "owner");
      const [keys, values] = [entries.getAllKeys(), entries.getAll()];
      values.onsuccess = () => done(new Map(keys.result.map((key, i) => [String(key), values.result[i]])));
    });
    items.delete("owner");
    return items;
  }
  write(changes) {
    return this.#within((entries, done, fail) => {
      const owner = entries.get("owner");
      owner.onsuccess = () => {
        if (owner.result !== this.#owner) {
          fail(new StoreTaken());
          return;
        }
        for (const [name, text] of changes) text === null ? entries.delete(name) : entries.put(text, name);
        done(undefined);
      };
    });
  }
  async close() {
    this.#database?.close();
    this.#database = null;
  }
  async #within(work) {
    this.#database ??= await openDatabase(this.#name);
    try {
      const transaction = this.#database.transaction("items", "readwrite", { durability: "strict" });
      return await new Promise((resolve, reject) => {
        let result;
        transaction.oncomplete = () => resolve(result);
        transaction.onabort = () => reject(transaction.error ?? new Error("the browser did not store it"));
        work(transaction.objectStore("items"), (value) => { result = value; }, (problem) => {
          reject(problem);
          transaction.abort();
        });
      });
    } catch (problem) {
      if (!(problem instanceof StoreTaken)) await this.close(); // as when the user clears the site's data
      throw problem;
    }
  }
}
function openDatabase(name) {
  return new Promise((resolve, reject) => {
    const opening = indexedDB.open(name, 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore("items");
    opening.onsuccess = () => resolve(opening.result);
    opening.onerror = () => reject(opening.error);
  });
}
function apply(items, changes) {
  for (const [name, text] of changes) text === null ? items.delete(name) : items.set(name, text);
}
const HELD = 1_000;
const LOOK = 60_000;
const STEP = 1_000;
const FINAL = new Set(["malformed", "too_large", "id_conflict", "stale", "expired", "refused"]);
const DONE = new Map([[EVENT, "sent"], [UPDATE, "updated"], [CANCEL, "corrected"]]);
class Sentinel extends Listeners {
  #url;
  #token;
  #socket;
  #transport;
  #store;
  #profile;
  #session;
  #policy;
  #monitor = null;
  #link = null;
  #early = [];
  #alerts = new Map();
  #unruled = new Set();
  #causes = new Map();
  #seen = new Set();
  #committing = false;
  #unstored = new Map();
  #taken = new Set();
  #meanwhile = null;
  #closed = null;
  #last = 0;
  #drift = Date.now() - performance.now();
  #timer = undefined;
  #silence = undefined;
  #telling = undefined;
  #stoodDown = false;
  #beats = 0;
  #run = draw();
  #told = "{}";
  #idle = new Set();
  #isReady = () => {};
  #isOver = () => {};
  constructor(url, token, options = {}) {
    super(["news"]);
    const { store, profile = "default", policy, heartbeat, session = "" } = options;
    this.#url = url;
    this.#token = token;
    this.#socket = options.socket ?? globalThis.WebSocket;
    this.#transport = options.transport ?? "websocket";
    if (!["websocket", "http"].includes(this.#transport)) throw new TypeError("transport is 'websocket' or 'http'");
    if (!this.#socket && this.#transport === "websocket") {
      throw new TypeError("there is no WebSocket here; pass one as the option `socket`, or transport: \"http\"");
    }
    const usual = store === undefined && globalThis.indexedDB ? new IndexedDbStore() : new MemoryStore();
    this.#store = /** @type {import("./stores.js").Store} */ (store ?? usual);
    this.#profile = nameOf("profile", profile);
    this.#session = session;
    this.#policy = policyOf(heartbeat === undefined ? policy : { ...policy, heartbeat });
    this.counts = { signals: 0, debounced: 0, cooling: 0, limited: 0, cancelled: 0, sent: 0, resent: 0 };
    this.ready = new Promise((resolve, reject) => {
      this.#isReady = resolve;
      this.#isOver = reject;
    });
    this.ready.catch(() => {});
    this.opened = this.#open();
    this.opened.catch((problem) => this.#stop(problem));
  }
  async #open() {
    const kept = await this.#store.load();
    const self = JSON.parse(kept.get("self") ?? "null") ?? { name: draw(), session: draw() };
    if (!kept.has("self")) await this.#store.write(new Map([["self", JSON.stringify(self)]]));
    if (this.#closed) throw this.#closed;
    const tower = this.#url.split(",")[0].replace(/^\w+:\/\//, "").replace(/\/.*$/, "");
    const session = this.#session || self.session;
    const identity = { sentinel: self.name, tower, profile: this.#profile, session };
    this.#monitor = new Monitor(this.#policy, identity);
    this.#monitor.restore(kept, this.#now());
    const client = {
      cursors: () => undefined,
      welcome: (/** @type {any} */ frame) => this.#up(frame),
      unwelcome: (/** @type {any} */ { error, detail }) => this.#say("denied", { detail: detail ?? error ?? "" }),
      hear: (/** @type {any} */ frame) => this.#hear(frame),
      down: (/** @type {string} */ reason) => this.#down(reason),
    };
    this.#link =
      this.#transport === "http"
        ? new HttpLink(this.#url, this.#token, client)
        : new Link(this.#url, this.#token, this.#socket, client);
    for (const early of this.#early.splice(0)) early(this.#monitor, this.#now());
    this.#commit();
  }
  disconnect(device, options) {
    return this.trigger(DISCONNECT, device, options);
  }
  reconnect(device) {
    const at = this.#now();
    nameOf("device", device);
    this.#tell((monitor) => monitor.back(device, at));
  }
  trigger(reason, device, { severity = "warning", meta, location, countdown } = {}) {
    if (nameOf("reason", reason) === SUMMARY) throw new TypeError("`summary` is the sentinel's own reason");
    if (countdown !== undefined && !(countdown >= 0 && countdown < this.#policy.keep)) {
      throw new RangeError(`countdown is a number of seconds, 0 or more, not ${countdown}`);
    }
    if (this.#closed) throw this.#closed;
    const alert = new Alert(this, nameOf("device", device), reason);
    const signal = {
      device, reason, at: this.#moment(), severity: severityOf(severity), meta: fieldOf("meta", meta),
      location: fieldOf("location", location), countdown: countdown === undefined ? null : micros(countdown),
      origin: alert,
    };
    this.#unruled.add(alert);
    this.#tell((monitor, now) => monitor.signal(signal, now));
    return alert;
  }
  cancel(device, event = "") {
    const at = this.#now();
    nameOf("device", device);
    this.#tell((monitor, now) => monitor.cancel(device, event, at, now));
  }
  update(event, { severity, meta, location }) {
    if (!event) throw new TypeError("there is no event yet, or it was held back; await alert.stored first");
    const change = {};
    if (severity !== undefined) change.severity = severityOf(severity);
    if (meta !== undefined) change.device_meta = fieldOf("meta", meta);
    if (location !== undefined) change.location = fieldOf("location", location);
    const at = this.#now();
    this.#tell((monitor, now) => monitor.change(event, change, at, now));
  }
  standDown() {
    if (!this.connected) {
      throw new Refused(1, "offline", "the tower cannot be reached; it expects the heartbeat until it is told");
    }
    this.#tell((monitor) => monitor.standDown());
    this.#stoodDown = true;
    this.#beat(0);
  }
  get connected() {
    return this.#link?.up ?? false;
  }
  get waiting() {
    return (this.#monitor?.waiting ?? 0) + this.#early.length;
  }
  async drained() {
    await this.opened;
    while (this.waiting || this.#committing) {
      await new Promise((/** @type {(value: void) => void} */ resolve) => this.#idle.add(resolve));
      if (this.#closed) throw this.#closed;
    }
  }
  async close() {
    this.#stop(new Closed("the sentinel was closed; what it has stored goes on at its next start"));
    while (this.#committing) {
      await new Promise((/** @type {(value: void) => void} */ resolve) => this.#idle.add(resolve));
    }
    await this.#store.close?.();
  }
  #stop(problem) {
    if (this.#closed) return;
    this.#closed = problem;
    for (const timer of [this.#timer, this.#silence, this.#telling]) clearTimeout(timer);
    this.#link?.close();
    this.#isOver(problem);
    for (const alert of [...this.#unruled, ...[...this.#alerts.values()].flat()]) alert._abandon(problem);
    this.#rest();
  }
  #now() {
    return Date.now() * 1_000;
  }
  #moment() {
    const now = this.#now();
    this.#last = now > this.#last || now < this.#last - micros(1) ? now : this.#last + 1;
    return this.#last;
  }
  #tell(work) {
    if (this.#closed) throw this.#closed;
    if (!this.#monitor) {
      this.#early.push(work);
      return;
    }
    this.#followClock(this.#monitor);
    work(this.#monitor, this.#now());
    this.#commit();
  }
  #followClock(monitor) {
    const drift = Date.now() - performance.now();
    const by = Math.round(drift - this.#drift);
    if (Math.abs(by) < STEP) return;
    this.#drift = drift;
    monitor.shift(by * 1_000);
  }
  async #commit() {
    const monitor = this.#monitor;
    if (this.#committing) this.#meanwhile?.();
    if (this.#committing || !monitor) return;
    this.#committing = true;
    try {
      for (;;) {
        const { changes, effects } = monitor.take();
        if (!changes.size && !effects.length) break;
        if (changes.size) await this.#write(monitor, changes, effects);
        if (this.#closed) break;
        for (const effect of effects) this.#perform(effect);
      }
    } catch (problem) {
      this.#stop(/** @type {Error} */ (problem));
    } finally {
      this.#committing = false;
    }
    this.#setTimer(monitor);
    this.#rest();
  }
  async #write(monitor, changes, effects) {
    for (let pause = 200; ; pause = Math.min(2 * pause, 10_000)) {
      try {
        await this.#store.write(new Map(changes));
        return;
      } catch (problem) {
        if (problem instanceof StoreTaken || this.#closed) throw problem;
        this.#say("trouble", { detail: String(problem) });
        this.#meanwhile = () => {
          const more = monitor.take();
          for (const [key, text] of more.changes) changes.set(key, text);
          effects.push(...more.effects);
          this.#handOver(changes, effects, String(problem));
          this.#setTimer(monitor);
        };
        this.#meanwhile();
        await new Promise((resolve) => setTimeout(resolve, pause));
        this.#meanwhile = null;
        if (this.#closed) throw this.#closed;
      }
    }
  }
  #handOver(changes, effects, problem) {
    for (const effect of [...effects]) {
      if (effect.do === "transmit" && effect.message.kind === EVENT && effect.message.data.severity === "critical") {
        effects.splice(effects.indexOf(effect), 1);
        this.#perform(effect);
        this.#notStored(effect.message.id, this.connected, problem);
      } else if (effect.do === "queued") {
        const data = JSON.parse(changes.get(`message:${effect.event}`) ?? "null")?.data;
        this.#causes.set(effect.event, [effect.device, effect.reason]);
        if (data?.severity === "critical" && !this.connected) this.#notStored(effect.event, false, problem);
      } else if (effect.do === "ended" && effect.state === "done" && this.#unstored.has(effect.event)) {
        if (effect.kind !== EVENT || this.#taken.has(effect.event)) continue;
        const { event } = effect;
        this.#taken.add(event);
        this.counts.sent += 1;
        this.#say("sent", { event, detail: "it is not stored here yet" });
        const ruled = effects.map((one) => (one.do === "ruled" && one.event === event ? one.origin : null));
        for (const alert of [...ruled, ...(this.#alerts.get(event) ?? [])]) {
          if (alert instanceof Alert) alert._end({ state: "done", reason: "", event });
        }
      }
    }
  }
  #notStored(event, up, problem) {
    if (this.#unstored.get(event) === up) return;
    this.#unstored.set(event, up);
    const sent = "cannot be stored, and goes to the tower all the same";
    const lost = "can neither be stored nor sent, as the tower cannot be reached";
    this.#say("unstored", { event, detail: `it ${up ? sent : lost}: ${problem}` });
  }
  #rest() {
    const waiting = [...this.#idle];
    this.#idle.clear();
    for (const resolve of waiting) resolve();
  }
  #setTimer(monitor) {
    clearTimeout(this.#timer);
    if (this.#closed) return;
    const wait = Math.min(Math.max((monitor.nextWake() - this.#now()) / 1_000, 0), LOOK);
    this.#timer = setTimeout(() => this.#tell((machine, now) => machine.wake(now)), Math.ceil(wait));
  }
  #perform(effect) {
    switch (effect.do) {
      case "ruled":
        return this.#ruled(effect);
      case "transmit": {
        const { id, kind, data, at } = effect.message;
        if (kind === EVENT) this.#causes.set(id, [data.device_address, data.trigger_reason]);
        if (this.#seen.has(id)) this.counts.resent += 1;
        this.#seen.add(id);
        return this.#send({ type: kind, seq_id: id, data, time: Math.floor(at / 1_000) });
      }
      case "ended":
        return this.#ended(effect);
      case "queued":
        return this.#say("queued", effect);
      case "cancelled": {
        const { device, dropped, corrected, held } = effect;
        if (!dropped.length && !corrected.length && !held.length) this.#say("nothing to cancel", { device });
        for (const reason of held) this.#say("cancelled", { device, reason, detail: "it was held back" });
        for (const event of corrected) this.#say("correcting", { device, event });
        return;
      }
      case "in vain":
        return this.#say("nothing to update", effect);
      case "beat":
        this.#beat(Math.round(this.#policy.heartbeat * 1_000));
    }
  }
  #ruled({ origin, device, reason, ruling, until, event, due }) {
    const passed = ruling === "pass";
    if (event && !this.#causes.has(event)) this.#causes.set(event, [device, reason]);
    const counting = passed && due > this.#now();
    const what = !passed ? "held" : reason === SUMMARY ? SUMMARY : counting ? "countdown" : "stored";
    const end = passed ? (counting ? due : 0) : (until ?? 0);
    this.#say(what, { device, reason, event, detail: passed ? "" : ruling, until: Math.floor(end / 1_000) });
    if (!(origin instanceof Alert)) return;
    this.#unruled.delete(origin);
    this.counts.signals += 1;
    if (ruling !== "pass") {
      this.counts[ruling] += 1;
      origin._end({ state: "held", reason: ruling, event });
    } else {
      this.#alerts.set(event, [...(this.#alerts.get(event) ?? []), origin]);
    }
    origin._rule(event, ruling);
    this.#tellHeldBack();
  }
  #ended({ kind, event, state, detail }) {
    const told = kind === EVENT && state === "done" && this.#taken.has(event);
    if (!told) this.#say((state === "done" && DONE.get(kind)) || state, { event, detail });
    if (kind !== EVENT) return;
    if (state === "done" && !told) this.counts.sent += 1;
    this.#taken.delete(event);
    this.#unstored.delete(event);
    if (state === "cancelled") this.counts.cancelled += 1;
    this.#causes.delete(event);
    this.#seen.delete(event);
    for (const alert of this.#alerts.get(event) ?? []) alert._end({ state, reason: detail, event });
    this.#alerts.delete(event);
  }
  #say(what, { device = "", reason = "", event = "", detail = "", until = 0 } = {}) {
    if (event && !device) [device, reason] = this.#causes.get(event) ?? ["", ""];
    this._emit("news", { what, time: Date.now(), device, reason, event, detail, until });
  }
  #send(frame) {
    if (!this.#link?.up) return;
    this.#link.send(frame);
    this.#silence ??= setTimeout(() => {
      this.#silence = undefined;
      this.#link?.dead();
    }, 2 * RESEND + 100);
  }
  #up(frame) {
    this.#measure(frame.time);
    this.#tell((monitor, now) => monitor.reached(now));
    this.#say("online");
    this.#isReady();
    this.#told = "{}";
    this.#tellHeldBack();
  }
  #measure(time) {
    if (!Number.isFinite(time)) return;
    const offset = Number(time) * 1_000 - this.#now();
    this.#tell((monitor, now) => monitor.measured(offset, now));
  }
  #down(reason) {
    if (this.#closed) return;
    this.#tell((monitor) => monitor.lost());
    this.#say("offline", { detail: reason });
  }
  #hear({ type, seq_id: id, code, error = "", detail = "", time }) {
    if (type !== "server_ack" || typeof id !== "string") return;
    this.#measure(time);
    if (id.startsWith("beat-")) {
      if (error) this.#say("refused", { detail: `the heartbeat: ${error}: ${detail}` });
    } else if (code === 0 || code === 5) {
      this.#tell((monitor, now) => monitor.answered(id, "done", "", now));
    } else if (code === 2 && FINAL.has(error)) {
      const otherForm = error === "id_conflict" && this.#causes.has(id);
      const state = otherForm || error === "stale" ? "unknown" : "failed";
      this.#tell((monitor, now) => monitor.answered(id, state, `${error}: ${detail}`, now));
    } else {
      this.#say("refused", { event: id, detail: `${error}: ${detail}` });
    }
  }
  #heldBack() {
    const { debounced: debounce, limited: limit, cooling: cooldown } = this.counts;
    return Object.fromEntries(Object.entries({ debounce, limit, cooldown }).filter(([, count]) => count));
  }
  #tellHeldBack() {
    if (this.#telling !== undefined || !this.connected) return;
    if (this.#told === JSON.stringify(this.#heldBack())) return;
    this.#telling = setTimeout(() => {
      this.#telling = undefined;
      this.#beat(this.#stoodDown ? 0 : null);
    }, HELD);
  }
  #beat(every) {
    const held = this.#heldBack();
    this.#told = JSON.stringify(held);
    const reported = this.#told === "{}" ? {} : { run: this.#run, held };
    this.#beats += 1;
    const data = { profile_id: this.#profile, every, ...reported };
    this.#send({ type: "alert_heartbeat", seq_id: `beat-${this.#beats}`, data });
  }
}
function draw() {
  const bytes = new Uint8Array(8);
  if (globalThis.crypto) globalThis.crypto.getRandomValues(bytes);
  else bytes.forEach((_, i) => { bytes[i] = Math.random() * 256; });
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
export { Alert, App, Chat, Closed, IndexedDbStore, KeyValueStore, MediaError, MemoryStore, Refused, Sentinel, StoreTaken };
