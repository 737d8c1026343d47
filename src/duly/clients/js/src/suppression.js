/**
 * Suppression: holds back signals that come too often.
 *
 * The law: a signal is held back for a stated reason, for a bounded time, and what the limit held back is told
 * afterwards. A critical signal passes the cooldown and the limit, uses none of the limit up, and is debounced
 * by critical ones only. If the clock is set back, what lies in its future is void.
 */

import { HOUR, micros } from "./policy.js";

/** What a sentinel remembers of the signals of one device. Times in microseconds.
 * @typedef {object} Marks
 * @property {Map<string, number>} last what passed, by reason
 * @property {Map<string, number>} critical the critical ones of them
 * @property {number[]} passed the newest that count for the limit
 * @property {number|null} cancelled when a person last said that all is well
 * @property {{reasons: Map<string, number>, since: number, until: number, due: number}|null} summary what the
 *   limit has held back
 */

/** @typedef {{ruling: import("./policy.js").Ruling, until: number|null}} Decision */

/** Decides which signals of a device become events. */
export class Suppressor {
  #debounce;
  #cooldown;
  #summary;
  #limit;

  /** @param {import("./policy.js").SentinelPolicy} policy */
  constructor(policy) {
    this.#debounce = micros(policy.debounce);
    this.#cooldown = micros(policy.cooldown);
    this.#summary = micros(policy.summary);
    this.#limit = policy.per_hour;
  }

  /** @returns {Marks} */
  none() {
    return { last: new Map(), critical: new Map(), passed: [], cancelled: null, summary: null };
  }

  /** Decide on a signal. Without `limit`, the limit does not hold it back (again).
   * @param {Marks} marks @param {number} now @param {boolean} critical @param {string} reason
   * @param {boolean} [limit] @returns {Decision} */
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

  /** @param {Marks} marks @param {number} now @param {string} reason @returns {Decision} */
  #hold(marks, now, reason) {
    const free = marks.passed[0] + HOUR;
    marks.summary ??= { reasons: new Map(), since: now, until: now, due: Math.min(free, now + this.#summary) };
    marks.summary.reasons.set(reason, (marks.summary.reasons.get(reason) ?? 0) + 1);
    marks.summary.until = now;
    return { ruling: "limited", until: free };
  }

  /** Forget what lies outside of its window, or in the future. @param {Marks} marks @param {number} now */
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

  /** Start the cooldown; later signals are no repeats of what was called off.
   * @param {Marks} marks @param {number} now */
  cancelled(marks, now) {
    this.refresh(marks, now);
    marks.cancelled = now;
    marks.last.clear();
    marks.critical.clear();
  }

  /** Forget the last event for a reason, which did not reach people.
   * @param {Marks} marks @param {string} reason @param {boolean} critical */
  forgive(marks, reason, critical) {
    marks.critical.delete(reason);
    if (!critical) marks.last.delete(reason);
  }

  /** Leave a signal that became an event of its own out of the summary.
   * @param {Marks} marks @param {string} reason */
  removeFromSummary(marks, reason) {
    const { summary } = marks;
    const count = summary?.reasons.get(reason);
    if (!summary || !count) return;
    if (count > 1) summary.reasons.set(reason, count - 1);
    else summary.reasons.delete(reason);
    if (!summary.reasons.size) marks.summary = null;
  }

  /** Move all marks: the wall clock was set. @param {Marks} marks @param {number} by */
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

  /** Whether nothing is remembered. @param {Marks} marks @param {number} now */
  idle(marks, now) {
    this.refresh(marks, now);
    const { last, critical, passed, cancelled, summary } = marks;
    return !last.size && !critical.size && !passed.length && cancelled === null && summary === null;
  }
}
