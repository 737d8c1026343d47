/**
 * Suppression: holds back signals that come too often.
 *
 * The law: a signal is held back for a stated reason, for a bounded time, and what the limit held back is told
 * afterwards. A critical signal passes the cooldown and the limit, uses none of the limit up, and is debounced
 * by critical ones only. If the clock is set back, what lies in its future is void.
 */
export type Marks = {
    /**
     * what passed, by reason
     */
    last: Map<string, number>;
    /**
     * the critical ones of them
     */
    critical: Map<string, number>;
    /**
     * the newest that count for the limit
     */
    passed: number[];
    /**
     * when a person last said that all is well
     */
    cancelled: number | null;
    /**
     * what the
     * limit has held back
     */
    summary: {
        reasons: Map<string, number>;
        since: number;
        until: number;
        due: number;
    } | null;
};
export type Decision = {
    ruling: import("./policy.js").Ruling;
    until: number | null;
};
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
export declare class Suppressor {
    #private;
    /** @param {import("./policy.js").SentinelPolicy} policy */
    constructor(policy: import("./policy.js").SentinelPolicy);
    /** @returns {Marks} */
    none(): Marks;
    /** Decide on a signal. Without `limit`, the limit does not hold it back (again).
     * @param {Marks} marks @param {number} now @param {boolean} critical @param {string} reason
     * @param {boolean} [limit] @returns {Decision} */
    signal(marks: Marks, now: number, critical: boolean, reason: string, limit?: boolean): Decision;
    /** Forget what lies outside of its window, or in the future. @param {Marks} marks @param {number} now */
    refresh(marks: Marks, now: number): void;
    /** Start the cooldown; later signals are no repeats of what was called off.
     * @param {Marks} marks @param {number} now */
    cancelled(marks: Marks, now: number): void;
    /** Forget the last event for a reason, which did not reach people.
     * @param {Marks} marks @param {string} reason @param {boolean} critical */
    forgive(marks: Marks, reason: string, critical: boolean): void;
    /** Leave a signal that became an event of its own out of the summary.
     * @param {Marks} marks @param {string} reason */
    removeFromSummary(marks: Marks, reason: string): void;
    /** Move all marks: the wall clock was set. @param {Marks} marks @param {number} by */
    shift(marks: Marks, by: number): void;
    /** Whether nothing is remembered. @param {Marks} marks @param {number} now */
    idle(marks: Marks, now: number): boolean;
}
