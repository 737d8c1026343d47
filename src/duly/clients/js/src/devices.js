/**
 * What a sentinel remembers of each device: limits, cancels, which events may be called off, and which signals
 * are held back.
 *
 * The law: a signal that is held back is remembered until its window ends; then it is judged again.
 */

import { DAY_LONG, DISCONNECT, HOUR, SEVERITIES, micros } from "./policy.js";
import { Suppressor } from "./suppression.js";

const RECENT = 32;
const SWEEP = 256;

/** Something was noticed at a device. `at` is when, in microseconds; `origin` hears what becomes of it.
 * @typedef {object} Signal
 * @property {string} device
 * @property {string} reason
 * @property {number} at
 * @property {import("./policy.js").Severity} severity
 * @property {any} [meta]
 * @property {any} [location]
 * @property {number|null} [countdown] microseconds
 * @property {any} [origin]
 */

/** A signal that was held back: `until` is when it is judged again, `limited` that the summary counts it.
 * @typedef {{signal: Signal, until: number, limited: boolean}} HeldSignal */

/** The state of one device. */
export class MonitoredDevice {
  /** @param {string} name @param {import("./suppression.js").Marks} marks @param {any} [saved] */
  constructor(name, marks, saved = {}) {
    this.name = name;
    this.marks = marks;
    /** @type {number} how often a person has cancelled */
    this.cancels = saved.cancels ?? 0;
    /** @type {number} when it came back; 0: it has not */
    this.back = saved.back ?? 0;
    /** Those the tower has or will have, with their times. @type {Map<string, number>} */
    this.events = new Map(saved.events ?? []);
    /** @type {string} the event that tells of its present absence; empty: there is none */
    this.covered = saved.covered ?? "";
    /** Signals that wait to be judged again, by reason. @type {Map<string, HeldSignal>} */
    this.held = new Map(saved.held ?? []);
  }

  /** Of several signals for one reason: the first time, the last data and the highest severity.
   * @param {Signal} signal @param {number} until @param {boolean} limited */
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

  /** The events within a span of a time. @param {number} at @param {number} [span] */
  recent(at, span = HOUR) {
    return [...this.events].filter(([, then]) => Math.abs(at - then) < span).map(([event]) => event);
  }

  /** @param {string} event @param {number} at */
  add(event, at) {
    const recent = new Set(this.recent(at, DAY_LONG));
    for (const known of [...this.events.keys()]) if (!recent.has(known)) this.events.delete(known);
    this.events.set(event, at);
    for (const [oldest] of this.events) {
      if (this.events.size <= RECENT) break;
      this.events.delete(oldest);
    }
  }

  /** As text. */
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

/** The devices of one sentinel. */
export class MonitoredDevices {
  /** @type {Map<string, MonitoredDevice>} */
  #devices = new Map();
  #longest;
  #summary;
  #sweepAt = SWEEP;

  /** @param {import("./policy.js").SentinelPolicy} policy */
  constructor(policy) {
    this.suppressor = new Suppressor(policy);
    this.#longest = micros(Math.max(policy.debounce, policy.cooldown, policy.summary));
    this.#summary = micros(policy.summary);
  }

  /** Take a device over from an earlier run; waits are limited, so that a clock that was set back holds no
   * signal longer than its own window. @param {string} name @param {string} text @param {number} now */
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

  /** A device, which is added if it is new. @param {string} name */
  at(name) {
    let device = this.#devices.get(name);
    if (!device) this.#devices.set(name, (device = new MonitoredDevice(name, this.suppressor.none())));
    return device;
  }

  /** @param {string} name */
  get(name) {
    return this.#devices.get(name);
  }

  /** The device of an event that may still be called off. @param {string} event */
  of(event) {
    for (const device of this.#devices.values()) if (device.events.has(event)) return device;
    return undefined;
  }

  /** Hold a signal back if no event reports it; returns whether there is something to save. The summary counts
   * what the limit holds back, but a lasting state that still stands becomes an event then.
   * @param {MonitoredDevice} device @param {Signal} signal
   * @param {import("./suppression.js").Decision} decision */
  hold(device, signal, { ruling, until }) {
    const limited = ruling === "limited";
    const when = limited ? (device.marks.summary?.due ?? null) : until;
    const told = signal.reason === DISCONNECT ? device.covered !== "" : ruling !== "cooling";
    if (!told && when !== null) device.hold(signal, when, limited);
    return limited || !told;
  }

  /** Remove and return the signals whose window is over, the oldest first. @param {number} now
   * @returns {{device: MonitoredDevice, held: HeldSignal}[]} */
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

  /** The summaries that are due, each once. @param {number} now */
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

  /** The number of signals that are held back. */
  get holding() {
    let count = 0;
    for (const device of this.#devices.values()) count += device.held.size;
    return count;
  }

  /** When the next signal is judged again, or a summary is due; Infinity: never. */
  nextWake() {
    let next = Infinity;
    for (const { held, marks } of this.#devices.values()) {
      for (const { until } of held.values()) next = Math.min(next, until);
      next = Math.min(next, marks.summary?.due ?? Infinity);
    }
    return next;
  }

  /** Follow a wall clock that was set: windows go on as if it had not been, and what was noticed is as long
   * ago as it was. @param {number} by */
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

  /** Forget devices that have nothing left to remember, once there are many; their names.
   * @param {number} now */
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
