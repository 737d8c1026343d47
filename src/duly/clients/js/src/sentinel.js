/**
 * A sentinel: reports what a monitor notices; each event reaches the tower once, unless it is cancelled.
 *
 * The laws. Reporting never waits for the network: a signal is judged and stored here, and goes out when its
 * countdown is over and the tower can be reached, in order. A reload, a restart and kill -9 lose nothing that
 * was stored (`await alert.stored` says when). A sentinel starts, and works for days, without its tower. While
 * nothing can be stored, a critical event goes to the tower all the same.
 *
 *     const sentinel = new Sentinel("http://hub:7800", token, { profile: "home" });
 *     sentinel.disconnect("aa:bb:cc:dd:ee:ff");
 *     const alert = sentinel.trigger("fall", "watch-1", { severity: "critical", location: { lat: 31.2 } });
 *     console.log((await alert.sent).state);
 */

import { Alert } from "./alerts.js";
import { Closed, Refused } from "./errors.js";
import { HttpLink } from "./http_link.js";
import { Link, RESEND } from "./link.js";
import { Listeners } from "./listeners.js";
import { CANCEL, EVENT, Monitor, UPDATE } from "./monitor.js";
import { DISCONNECT, SUMMARY, micros, policyOf } from "./policy.js";
import { fieldOf, nameOf, severityOf } from "./signal_fields.js";
import { IndexedDbStore, MemoryStore, StoreTaken } from "./stores.js";

export { Closed, Refused } from "./errors.js";

const HELD = 1_000;
const LOOK = 60_000;
const STEP = 1_000;
// Errors of the tower that no further try can change.
const FINAL = new Set(["malformed", "too_large", "id_conflict", "stale", "expired", "refused"]);
const DONE = new Map([[EVENT, "sent"], [UPDATE, "updated"], [CANCEL, "corrected"]]);

/** Something that a sentinel did. `what` is `stored`, `countdown`, `held`, `queued`, `sent`, `cancelled`,
 * `correcting`, `corrected`, `updated`, `summary`, `refused`, `online`, `offline`, `denied`, `trouble` (the
 * store fails) or `unstored` (a critical event could not be stored; `detail` says whether it goes to the tower all
 * the same), or how an event ended. Times in milliseconds.
 * @typedef {{what: string, time: number, device: string, reason: string, event: string, detail: string,
 *   until: number}} SentinelNews */

/** @typedef {object} SentinelOptions
 * @property {import("./stores.js").Store|null} [store] its queue and memory: `FileStorage` of `duly/node`,
 *   `KeyValueStore` or one of your own; if not given, IndexedDB where there is one. null: they end with the
 *   process
 * @property {string} [profile] who is told, at the tower
 * @property {Partial<import("./policy.js").SentinelPolicy>} [policy] limits
 * @property {number} [heartbeat] promises the tower a sign of life every so many seconds
 * @property {string} [session] what is guarded, if one sentinel guards one thing after another
 * @property {new (url: string) => WebSocket} [socket] a WebSocket, where there is none, as in Node 20
 * @property {"websocket"|"http"} [transport] `http` for networks that let no WebSocket through
 */

/** @typedef {object} SignalOptions
 * @property {import("./policy.js").Severity} [severity] `warning` if not given
 * @property {any} [meta] about the device
 * @property {any} [location]
 * @property {number} [countdown] seconds, instead of the policy's
 */

/** @extends {Listeners<{news: SentinelNews}>} */
export class Sentinel extends Listeners {
  #url;
  #token;
  #socket;
  #transport;
  #store;
  #profile;
  #session;
  #policy;
  /** @type {Monitor|null} once the store is read */
  #monitor = null;
  /** @type {Link|HttpLink|null} */
  #link = null;
  /** Signals that came before that. @type {((monitor: Monitor, now: number) => void)[]} */
  #early = [];
  /** Those that wait for their end, by event. @type {Map<string, Alert[]>} */
  #alerts = new Map();
  /** Those whose signal is not stored yet. @type {Set<Alert>} */
  #unruled = new Set();
  /** The device and the reason of each event. @type {Map<string, [string, string]>} */
  #causes = new Map();
  #seen = new Set();
  #committing = false;
  /** Critical events that could not be stored, and whether they went out. @type {Map<string, boolean>} */
  #unstored = new Map();
  #taken = new Set();
  /** While the store fails: takes in what comes. @type {(() => void)|null} */
  #meanwhile = null;
  /** @type {Error|null} */
  #closed = null;
  #last = 0;
  #drift = Date.now() - performance.now();
  /** @type {any} */
  #timer = undefined;
  /** @type {any} */
  #silence = undefined;
  /** @type {any} */
  #telling = undefined;
  /** whether the promise of a heartbeat was taken back */
  #stoodDown = false;
  #beats = 0;
  #run = draw();
  #told = "{}";
  /** @type {Set<() => void>} */
  #idle = new Set();
  /** @type {() => void} */
  #isReady = () => {};
  /** @type {(problem: Error) => void} */
  #isOver = () => {};

  /** @param {string} url the hub; several with commas between @param {string} token
   * @param {SentinelOptions} [options] */
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
    /** What it has done since it was started. */
    this.counts = { signals: 0, debounced: 0, cooling: 0, limited: 0, cancelled: 0, sent: 0, resent: 0 };
    /** Resolves at the first welcome of the tower. @type {Promise<void>} */
    this.ready = new Promise((resolve, reject) => {
      this.#isReady = resolve;
      this.#isOver = reject;
    });
    this.ready.catch(() => {});
    /** Resolves when the store is read; rejects if it cannot be. @type {Promise<void>} */
    this.opened = this.#open();
    this.opened.catch((problem) => this.#stop(problem));
  }

  async #open() {
    const kept = await this.#store.load();
    /** @type {{name: string, session: string}} */
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

  // ── signals ────────────────────────────────────────────────────────────────────────────────────

  /** Report that a device can no longer be reached.
   * @param {string} device @param {{meta?: any, location?: any}} [options] @returns {Alert} */
  disconnect(device, options) {
    return this.trigger(DISCONNECT, device, options);
  }

  /** Report that a device can be reached again. While the countdown of its disconnect runs, this ends it
   * without an alarm. @param {string} device */
  reconnect(device) {
    const at = this.#now();
    nameOf("device", device);
    this.#tell((monitor) => monitor.back(device, at));
  }

  /** Report an event of a device. @param {string} reason @param {string} device
   * @param {SignalOptions} [options] @returns {Alert} */
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

  /** Call off a device's events, or one of them: what has not gone out never will, and for what went out
   * within the last hour a correction follows. @param {string} device @param {string} [event] */
  cancel(device, event = "") {
    const at = this.#now();
    nameOf("device", device);
    this.#tell((monitor, now) => monitor.cancel(device, event, at, now));
  }

  /** Add something newer to an event: it goes out with it, or after it.
   * @param {string} event @param {import("./alerts.js").Newer} newer */
  update(event, { severity, meta, location }) {
    if (!event) throw new TypeError("there is no event yet, or it was held back; await alert.stored first");
    /** @type {Record<string, any>} */
    const change = {};
    if (severity !== undefined) change.severity = severityOf(severity);
    if (meta !== undefined) change.device_meta = fieldOf("meta", meta);
    if (location !== undefined) change.location = fieldOf("location", location);
    const at = this.#now();
    this.#tell((monitor, now) => monitor.change(event, change, at, now));
  }

  /** Take the promise of a heartbeat back: from now on no recipient is told when this sentinel falls silent. */
  standDown() {
    if (!this.connected) {
      throw new Refused(1, "offline", "the tower cannot be reached; it expects the heartbeat until it is told");
    }
    this.#tell((monitor) => monitor.standDown());
    this.#stoodDown = true;
    this.#beat(0);
  }

  /** Whether there is a connection to the tower. */
  get connected() {
    return this.#link?.up ?? false;
  }

  /** How many events, updates and corrections the tower does not have yet. */
  get waiting() {
    return (this.#monitor?.waiting ?? 0) + this.#early.length;
  }

  /** Resolves when everything that was reported has ended. @returns {Promise<void>} */
  async drained() {
    await this.opened;
    while (this.waiting || this.#committing) {
      await new Promise((/** @type {(value: void) => void} */ resolve) => this.#idle.add(resolve));
      if (this.#closed) throw this.#closed;
    }
  }

  /** End. What is stored goes on at the next start. */
  async close() {
    this.#stop(new Closed("the sentinel was closed; what it has stored goes on at its next start"));
    while (this.#committing) {
      await new Promise((/** @type {(value: void) => void} */ resolve) => this.#idle.add(resolve));
    }
    await this.#store.close?.();
  }

  /** @param {Error} problem */
  #stop(problem) {
    if (this.#closed) return;
    this.#closed = problem;
    for (const timer of [this.#timer, this.#silence, this.#telling]) clearTimeout(timer);
    this.#link?.close();
    this.#isOver(problem);
    for (const alert of [...this.#unruled, ...[...this.#alerts.values()].flat()]) alert._abandon(problem);
    this.#rest();
  }

  // ── the machine ────────────────────────────────────────────────────────────────────────────────

  #now() {
    return Date.now() * 1_000;
  }

  /** The time of a new signal: no two have the same, so it says which was first. */
  #moment() {
    const now = this.#now();
    this.#last = now > this.#last || now < this.#last - micros(1) ? now : this.#last + 1;
    return this.#last;
  }

  /** @param {(monitor: Monitor, now: number) => void} work */
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

  /** A wall clock that was set moves no countdown. @param {Monitor} monitor */
  #followClock(monitor) {
    const drift = Date.now() - performance.now();
    const by = Math.round(drift - this.#drift);
    if (Math.abs(by) < STEP) return;
    this.#drift = drift;
    monitor.shift(by * 1_000);
  }

  /** Store what is to be stored, then do what is to be done; one after the other. */
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

  /** Until it is stored: nothing but what is critical is sent, and no sign of life given, before. What comes
   * meanwhile is added. @param {Monitor} monitor @param {Map<string, string|null>} changes
   * @param {import("./monitor.js").Effect[]} effects */
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

  /** Send what is critical though it cannot be stored: the tower's answer is the acceptance, and what is stored and
   * sent later is a duplicate. @param {Map<string, string|null>} changes
   * @param {import("./monitor.js").Effect[]} effects @param {string} problem */
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

  /** Say once that a critical event is not stored. @param {string} event @param {boolean} up @param {string} problem */
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

  /** @param {Monitor} monitor */
  #setTimer(monitor) {
    clearTimeout(this.#timer);
    if (this.#closed) return;
    const wait = Math.min(Math.max((monitor.nextWake() - this.#now()) / 1_000, 0), LOOK);
    this.#timer = setTimeout(() => this.#tell((machine, now) => machine.wake(now)), Math.ceil(wait));
  }

  /** @param {import("./monitor.js").Effect} effect */
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

  /** @param {import("./monitor.js").Effect & {do: "ruled"}} effect */
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

  /** @param {import("./monitor.js").Effect & {do: "ended"}} effect */
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

  /** @param {string} what @param {Partial<SentinelNews>} [about] */
  #say(what, { device = "", reason = "", event = "", detail = "", until = 0 } = {}) {
    if (event && !device) [device, reason] = this.#causes.get(event) ?? ["", ""];
    this._emit("news", { what, time: Date.now(), device, reason, event, detail, until });
  }

  // ── the wire ───────────────────────────────────────────────────────────────────────────────────

  /** @param {any} frame */
  #send(frame) {
    if (!this.#link?.up) return;
    this.#link.send(frame);
    // A browser would take minutes to notice a connection that swallows everything.
    this.#silence ??= setTimeout(() => {
      this.#silence = undefined;
      this.#link?.dead();
    }, 2 * RESEND + 100);
  }

  /** @param {any} frame */
  #up(frame) {
    this.#measure(frame.time);
    this.#tell((monitor, now) => monitor.reached(now));
    this.#say("online");
    this.#isReady();
    this.#told = "{}";
    this.#tellHeldBack();
  }

  /** Measure how far the tower's clock is ahead of ours, if it says what it shows.
   * @param {number|undefined} time */
  #measure(time) {
    if (!Number.isFinite(time)) return;
    const offset = Number(time) * 1_000 - this.#now();
    this.#tell((monitor, now) => monitor.measured(offset, now));
  }

  /** @param {string} reason */
  #down(reason) {
    if (this.#closed) return;
    this.#tell((monitor) => monitor.lost());
    this.#say("offline", { detail: reason });
  }

  /** @param {any} frame */
  #hear({ type, seq_id: id, code, error = "", detail = "", time }) {
    if (type !== "server_ack" || typeof id !== "string") return;
    this.#measure(time);
    if (id.startsWith("beat-")) {
      if (error) this.#say("refused", { detail: `the heartbeat: ${error}: ${detail}` });
    } else if (code === 0 || code === 5) {
      this.#tell((monitor, now) => monitor.answered(id, "done", "", now));
    } else if (code === 2 && FINAL.has(error)) {
      // The tower may have taken an earlier transmission, and forgotten it since. If it has the event in another
      // form, an earlier run has sent it unstored.
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

  /** Tell the tower soon how many signals were held back, if that is news. */
  #tellHeldBack() {
    if (this.#telling !== undefined || !this.connected) return;
    if (this.#told === JSON.stringify(this.#heldBack())) return;
    this.#telling = setTimeout(() => {
      this.#telling = undefined;
      // To a profile that demands heartbeats, one without a promise is a sign of life: more are expected.
      this.#beat(this.#stoodDown ? 0 : null);
    }, HELD);
  }

  /** Send a heartbeat, and promise the next within `every` ms; 0 takes the promise back, null leaves it as it
   * is. It has an id, so that the tower answers and a dead connection is noticed. @param {number|null} every */
  #beat(every) {
    const held = this.#heldBack();
    this.#told = JSON.stringify(held);
    const reported = this.#told === "{}" ? {} : { run: this.#run, held };
    this.#beats += 1;
    const data = { profile_id: this.#profile, every, ...reported };
    this.#send({ type: "alert_heartbeat", seq_id: `beat-${this.#beats}`, data });
  }
}

/** Something that no other sentinel has. */
function draw() {
  const bytes = new Uint8Array(8);
  if (globalThis.crypto) globalThis.crypto.getRandomValues(bytes);
  else bytes.forEach((_, i) => { bytes[i] = Math.random() * 256; });
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
