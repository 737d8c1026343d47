/**
 * What a sentinel remembers of each device: limits, cancels, which events may be called off, and which signals
 * are held back.
 *
 * The law: a signal that is held back is remembered until its window ends; then it is judged again.
 */
import { Suppressor } from "./suppression.js";
export type Signal = {
    device: string;
    reason: string;
    at: number;
    severity: import("./policy.js").Severity;
    meta?: any;
    location?: any;
    /**
     * microseconds
     */
    countdown?: number | null;
    origin?: any;
};
export type HeldSignal = {
    signal: Signal;
    until: number;
    limited: boolean;
};
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
export declare class MonitoredDevice {
    name: string;
    marks: import("./suppression.js").Marks;
    /** @type {number} how often a person has cancelled */
    cancels: number;
    /** @type {number} when it came back; 0: it has not */
    back: number;
    /** Those the tower has or will have, with their times. @type {Map<string, number>} */
    events: Map<string, number>;
    /** @type {string} the event that tells of its present absence; empty: there is none */
    covered: string;
    /** Signals that wait to be judged again, by reason. @type {Map<string, HeldSignal>} */
    held: Map<string, HeldSignal>;
    /** @param {string} name @param {import("./suppression.js").Marks} marks @param {any} [saved] */
    constructor(name: string, marks: import("./suppression.js").Marks, saved?: any);
    /** Of several signals for one reason: the first time, the last data and the highest severity.
     * @param {Signal} signal @param {number} until @param {boolean} limited */
    hold({ origin, ...signal }: Signal, until: number, limited: boolean): void;
    /** The events within a span of a time. @param {number} at @param {number} [span] */
    recent(at: number, span?: number): string[];
    /** @param {string} event @param {number} at */
    add(event: string, at: number): void;
    /** As text. */
    save(): string;
}
/** The devices of one sentinel. */
export declare class MonitoredDevices {
    #private;
    suppressor: Suppressor;
    /** @param {import("./policy.js").SentinelPolicy} policy */
    constructor(policy: import("./policy.js").SentinelPolicy);
    /** Take a device over from an earlier run; waits are limited, so that a clock that was set back holds no
     * signal longer than its own window. @param {string} name @param {string} text @param {number} now */
    restore(name: string, text: string, now: number): void;
    /** A device, which is added if it is new. @param {string} name */
    at(name: string): MonitoredDevice;
    /** @param {string} name */
    get(name: string): MonitoredDevice | undefined;
    /** The device of an event that may still be called off. @param {string} event */
    of(event: string): MonitoredDevice | undefined;
    /** Hold a signal back if no event reports it; returns whether there is something to save. The summary counts
     * what the limit holds back, but a lasting state that still stands becomes an event then.
     * @param {MonitoredDevice} device @param {Signal} signal
     * @param {import("./suppression.js").Decision} decision */
    hold(device: MonitoredDevice, signal: Signal, { ruling, until }: import("./suppression.js").Decision): boolean;
    /** Remove and return the signals whose window is over, the oldest first. @param {number} now
     * @returns {{device: MonitoredDevice, held: HeldSignal}[]} */
    lapsed(now: number): {
        device: MonitoredDevice;
        held: HeldSignal;
    }[];
    /** The summaries that are due, each once. @param {number} now */
    summaries(now: number): {
        reasons: Map<string, number>;
        since: number;
        until: number;
        due: number;
        device: MonitoredDevice;
    }[];
    /** The number of signals that are held back. */
    get holding(): number;
    /** When the next signal is judged again, or a summary is due; Infinity: never. */
    nextWake(): number;
    /** Follow a wall clock that was set: windows go on as if it had not been, and what was noticed is as long
     * ago as it was. @param {number} by */
    shift(by: number): void;
    /** Forget devices that have nothing left to remember, once there are many; their names.
     * @param {number} now */
    sweep(now: number): string[];
}
