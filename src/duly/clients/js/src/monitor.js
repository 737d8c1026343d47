/**
 * The monitor turns signals into events for the tower. Signal → suppression → countdown → upload.
 *
 * The laws. A signal that passes is an event with an id, stored before any report; from then on it ends in one
 * way only: the tower has it, a person called it off, or it expired. The id is minted once, from the signal's
 * own time. An event that was not sent can be called off without a trace; one that may have been sent is
 * corrected. An update or a correction waits until the tower has its event.
 *
 * No emergency is lost. A signal that is held back, and that no event reports, is judged again when its window
 * ends, unless the device is back by then or a person has called it off. A critical signal is held back only
 * as a repeat of an event that reports the same, and it never expires here.
 *
 * Times go by the tower's clock, which is measured with every connection.
 * It is pure: time is an argument, in microseconds, and `take` returns what to store and what to do then.
 */

import { MonitoredDevices } from "./devices.js";
import { dated, datedAgain } from "./event_times.js";
import { nextId } from "./ids.js";
import { DISCONNECT, SUMMARY, micros } from "./policy.js";
import { sha256 } from "./sha256.js";

export const EVENT = "alert_event";
export const UPDATE = "alert_update";
export const CANCEL = "alert_cancel";
const MS = 1_000;
const JITTER = 0.2;
/** What is not stored of a message. @type {{queued: boolean, tries: number, again: number, steps: number|null}} */
const UNKNOWN = { queued: false, tries: 0, again: 0, steps: null };

export const CALLED_OFF = "a person called it off before it went out";
export const SETTLED = "the device was back before the countdown ended";
const OVERTAKEN = "a critical event for the same reason took its place";
const EXPIRED = "it expired before it could be done";
const SILENT = "no answer came; whether it took effect is not known";

/** The names that an event's id is made of, besides the event itself.
 * @typedef {{sentinel: string, tower: string, profile: string, session: string}} Identity */

/** Something that goes to the tower: an event, or an update or a cancel of one.
 * @typedef {object} Message
 * @property {string} id
 * @property {string} kind
 * @property {number} at when it was made; microseconds, as all times here
 * @property {number} expires 0: never
 * @property {number} due when its countdown ends
 * @property {any} data what the tower is told
 * @property {boolean} sent whether it may have left
 * @property {boolean} queued its countdown is over, and that was told
 * @property {number} tries transmissions over this connection
 * @property {number} again when it is sent again
 * @property {number|null} steps by how much the clock was set since it was made; null: an earlier run made it
 */

/** What to do once everything is stored.
 * @typedef {{do: "ruled", origin: any, device: string, reason: string, ruling: import("./policy.js").Ruling,
 *     until: number|null, event: string, due: number}
 *   | {do: "transmit", message: Message}
 *   | {do: "ended", id: string, kind: string, event: string, state: string, detail: string}
 *   | {do: "queued", event: string, device: string, reason: string}
 *   | {do: "cancelled", device: string, dropped: string[], corrected: string[], held: string[]}
 *   | {do: "in vain", event: string}
 *   | {do: "beat"}} Effect */

/** The id of an alert: the same episode of the same device in the same session is the same event.
 * @param {Identity} identity @param {string} reason @param {string} device @param {number} at */
export function eventId({ sentinel, tower, profile, session }, reason, device, at) {
  return sha256(JSON.stringify({ device, profile, reason, sentinel, session, tower, window_start: at }))
    .slice(0, 32);
}

/** The sentinel's machine. */
export class Monitor {
  #policy;
  #identity;
  #keep;
  #devices;
  /** What has not ended, in the order it was made. @type {Map<string, Message>} */
  #messages = new Map();
  /** @type {number|null} by how much the tower's clock is ahead of ours; null: this run has not measured it */
  #offset = null;
  /** @type {string|undefined} the last id of an update or a cancel */
  #minted;
  #reachable = false;
  #promised;
  #beatAt = Infinity;
  #random;
  /** @type {Map<string, string|null>} */
  #changes = new Map();
  /** @type {Effect[]} */
  #effects = [];

  /** @param {import("./policy.js").SentinelPolicy} policy @param {Identity} identity
   * @param {() => number} [random] */
  constructor(policy, identity, random = Math.random) {
    this.#policy = policy;
    this.#identity = identity;
    this.#keep = micros(policy.keep);
    this.#devices = new MonitoredDevices(policy);
    this.#promised = policy.heartbeat > 0;
    this.#random = random;
  }

  /** How much has not ended: messages, and signals that may become one. */
  get waiting() {
    return this.#messages.size + this.#devices.holding;
  }

  /** What to store, and what to do once it is stored; each is returned once. */
  take() {
    const taken = { changes: this.#changes, effects: this.#effects };
    this.#changes = new Map();
    this.#effects = [];
    return taken;
  }

  /** Start from what an earlier run has stored. @param {Map<string, string>} kept @param {number} now */
  restore(kept, now) {
    /** @type {Message[]} */
    const messages = [];
    for (const [key, text] of kept) {
      if (key.startsWith("device:")) this.#devices.restore(key.slice(7), text, now);
      if (key.startsWith("message:")) messages.push({ ...JSON.parse(text), ...UNKNOWN });
    }
    this.#minted = JSON.parse(kept.get("monitor") ?? "{}").minted;
    // What was stored together is not kept in order; the signals' own times say what it was.
    for (const message of messages.sort((a, b) => a.at - b.at)) {
      // A countdown is never longer than it was, even if the clock was set back.
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

  // ── signals ──────────────────────────────────────────────────────────────────────────────────────

  /** @param {import("./devices.js").Signal} signal @param {number} now */
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

  /** Turn held signals whose window has ended, and that still stand, into events. @param {number} now */
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

  /** Turn a signal into an event, whose countdown begins at `begins`.
   * @param {import("./devices.js").Signal} signal @param {import("./devices.js").MonitoredDevice} device
   * @param {number} begins @param {number} now */
  #pass(signal, device, begins, now) {
    const critical = signal.severity === "critical";
    const reason = critical ? `${signal.reason}, critical` : signal.reason;
    // Cancels count in the id: a signal in the moment of one that was called off is another event.
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

  /** @param {import("./devices.js").Signal} signal @param {number} cancels @param {any} [summary] */
  #event(signal, cancels, summary) {
    return {
      profile_id: this.#identity.profile, trigger_reason: signal.reason, device_address: signal.device,
      session_id: this.#identity.session, timestamp: Math.floor(signal.at / MS), severity: signal.severity,
      cancelled_count: cancels, device_meta: signal.meta ?? undefined, location: signal.location ?? undefined,
      offset_ms: this.#offset === null ? undefined : Math.floor(this.#offset / MS), summary,
    };
  }

  /** @param {{device: import("./devices.js").MonitoredDevice, reasons: Map<string, number>, since: number}} sum
   * @param {number} now */
  #sumUp({ device, reasons, since }, now) {
    const id = eventId(this.#identity, SUMMARY, device.name, since);
    const held = [...reasons.values()].reduce((sum, count) => sum + count, 0);
    const summary = { held, reasons: Object.fromEntries(reasons), since: Math.floor(since / MS) };
    /** @type {import("./devices.js").Signal} */
    const signal = { device: device.name, reason: SUMMARY, at: now, severity: "warning" };
    this.#ruled(signal, "pass", null, id, now);
    this.#save(device);
    this.#send(EVENT, id, now, this.#event(signal, device.cancels, summary), now, now);
  }

  /** A device can be reached again. @param {string} name @param {number} at */
  back(name, at) {
    const device = this.#devices.get(name);
    if (!device || device.back) return;
    device.back = at;
    device.covered = "";
    device.held.delete(DISCONNECT);
    this.#save(device);
  }

  // ── what a person says ───────────────────────────────────────────────────────────────────────────

  /** All is well: with one event, or with everything at a device.
   * @param {string} name @param {string} event @param {number} at @param {number} now */
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

  /** The recent events of a device, and its unsent ones, however old they are and whatever the clock shows.
   * @param {import("./devices.js").MonitoredDevice} device @param {number} at */
  #cancellable(device, at) {
    const unsent = [...this.#messages.values()].filter(
      ({ kind, sent, data }) => kind === EVENT && !sent && data.device_address === device.name && !data.summary
    );
    return [...new Set([...device.recent(at), ...unsent.map(({ id }) => id)])];
  }

  /** Something newer about an event: it goes out with it, or after it.
   * @param {string} event @param {{severity?: string, device_meta?: any, location?: any}} change
   * @param {number} at @param {number} now */
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

  /** @param {string} kind @param {any} data @param {number} at @param {number} now */
  #follow(kind, data, at, now) {
    this.#minted = nextId(this.#minted, Math.floor(at / MS));
    this.#saveSelf();
    this.#send(kind, this.#minted, at, data, at, now);
  }

  // ── the tower ────────────────────────────────────────────────────────────────────────────────────

  /** The tower can be reached: what it has not answered goes out again, in order. @param {number} now */
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

  /** The promise of a heartbeat is taken back. */
  standDown() {
    this.#promised = false;
    this.#beatAt = Infinity;
  }

  /** Date unsent events by the tower's clock; ours may have started in 1970, and have been set since.
   * @param {number} offset @param {number} now */
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

  /** The tower has answered. @param {string} id @param {"done"|"failed"|"unknown"} state
   * @param {string} detail @param {number} now */
  answered(id, state, detail, now) {
    const message = this.#messages.get(id);
    if (message?.sent) this.#ended(message, state, detail, now);
  }

  // ── sending ──────────────────────────────────────────────────────────────────────────────────────

  /** Store a message, and let it go if nothing prevents that. @param {string} kind @param {string} id
   * @param {number} at @param {any} data @param {number} due @param {number} now */
  #send(kind, id, at, data, due, now) {
    const expires = this.#expiry(data, at, now);
    /** @type {Message} */
    const message = { id, kind, at, expires, due, data, sent: false, ...UNKNOWN, steps: 0 };
    this.#messages.set(id, message);
    this.#store(message);
    if (due > now) return;
    if (this.#mayStart(message)) this.#start(message, now);
    else this.#queue(message);
  }

  /** @param {Message} message @param {number} now */
  #start(message, now) {
    message.sent = true;
    if (message.expires) message.expires = now + this.#keep;
    this.#messages.delete(message.id); // what was sent is repeated in the order in which it went out
    this.#messages.set(message.id, message);
    this.#store(message);
    this.#transmit(message, now);
  }

  /** @param {Message} message @param {number} now */
  #transmit(message, now) {
    message.tries += 1;
    const { tries, retry_first, retry_most } = this.#policy;
    const longest = micros(Math.min(retry_first * 2 ** Math.min(message.tries - 1, 40), retry_most));
    const more = !tries || message.tries < tries;
    message.again = more ? now + Math.round(longest * (1 - JITTER * this.#random())) : Infinity;
    this.#effects.push({ do: "transmit", message });
  }

  /** @param {Message} message */
  #queue(message) {
    message.queued = true;
    if (message.kind !== EVENT) return;
    const { device_address: device, trigger_reason: reason } = message.data;
    this.#effects.push({ do: "queued", event: message.id, device, reason });
  }

  /** Whether the tower can be reached, and has the event that a message is about. @param {Message} message */
  #mayStart(message) {
    return this.#reachable && (message.kind === EVENT || !this.#messages.has(message.data.event));
  }

  /** The event in its countdown for a cause. @param {string} device @param {string} reason
   * @param {boolean} critical @returns {Message|undefined} */
  #counting(device, reason, critical) {
    let found;
    for (const message of this.#messages.values()) {
      const { kind, sent, queued, data } = message;
      if (kind !== EVENT || sent || queued || data.device_address !== device) continue;
      if (data.trigger_reason === reason && (data.severity === "critical") === critical) found = message;
    }
    return found;
  }

  /** What waits for an event. @param {string} event */
  #behind(event) {
    return [...this.#messages.values()].filter(({ kind, data }) => kind !== EVENT && data.event === event);
  }

  /** @param {any} data @param {number} at @param {number} now */
  #expiry(data, at, now) {
    return data.severity === "critical" && !data.event ? 0 : Math.max(at, now) + this.#keep;
  }

  // ── ends ─────────────────────────────────────────────────────────────────────────────────────────

  /** @param {Message} message @param {string} state @param {string} detail */
  #end(message, state, detail) {
    const { id, kind, data } = message;
    this.#messages.delete(id);
    this.#changes.set(`message:${id}`, null);
    this.#effects.push({ do: "ended", id, kind, event: kind === EVENT ? id : data.event, state, detail });
  }

  /** End a message, and start or end what waited for it.
   * @param {Message} message @param {string} state @param {string} detail @param {number} now */
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

  /** Drop an event that the tower will never get, so that the next signal is no repeat of it; but a device that
   * was back in time (`settled`) may still be flapping. @param {Message} message @param {boolean} settled */
  #forget({ id, data }, settled) {
    const device = this.#devices.get(data.device_address);
    if (!device?.events.delete(id)) return; // a person has called it off, and it is forgotten already
    const critical = data.severity === "critical";
    if (critical || !settled) this.#devices.suppressor.forgive(device.marks, data.trigger_reason, critical);
    if (device.covered === id) device.covered = "";
    this.#save(device);
  }

  // ── time ─────────────────────────────────────────────────────────────────────────────────────────

  /** Send, judge again, sum up and expire what is due. @param {number} now */
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

  /** Start every message that is due and may go, in the order they were made. @param {number} now */
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

  /** When `wake` has something to do; Infinity: never. */
  nextWake() {
    let next = Math.min(this.#devices.nextWake(), this.#beatAt);
    for (const { sent, queued, due, again, expires } of this.#messages.values()) {
      if (expires) next = Math.min(next, expires);
      if (sent && this.#reachable) next = Math.min(next, again);
      if (!sent && !queued) next = Math.min(next, due);
    }
    return next;
  }

  /** Follow a wall clock that was set by this much: lengths of time stay what they are. @param {number} by */
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

  // ── the store ────────────────────────────────────────────────────────────────────────────────────

  /** @param {import("./devices.js").MonitoredDevice} device */
  #save(device) {
    this.#changes.set(`device:${device.name}`, device.save());
  }

  #saveSelf() {
    this.#changes.set("monitor", JSON.stringify({ minted: this.#minted }));
  }

  /** @param {Message} message */
  #store({ id, kind, at, expires, due, data, sent }) {
    this.#changes.set(`message:${id}`, JSON.stringify({ id, kind, at, expires, due, data, sent }));
  }

  /** @param {{device: string, reason: string, origin?: any}} signal
   * @param {import("./policy.js").Ruling} ruling @param {number|null} until @param {string} [event]
   * @param {number} [due] */
  #ruled({ device, reason, origin }, ruling, until, event = "", due = 0) {
    this.#effects.push({ do: "ruled", origin, device, reason, ruling, until, event, due });
  }
}
