/** One signal, and what becomes of it. */
export type SentEvent = {
    state: string;
    reason: string;
    event: string;
};
export type Newer = {
    severity?: import("./policy.js").Severity;
    meta?: any;
    location?: any;
};
export type AlertOwner = {
    cancel: (device: string, event?: string) => void;
    update: (event: string, newer: Newer) => void;
};
/** How a signal ended: `done` (the tower has it), `cancelled`, `held` (held back, for `reason`), `superseded`,
 * `expired`, `failed` or `unknown`.
 * @typedef {{state: string, reason: string, event: string}} SentEvent */
/** What can be added to an event later.
 * @typedef {{severity?: import("./policy.js").Severity, meta?: any, location?: any}} Newer */
/** What an alert needs of its sentinel.
 * @typedef {{cancel: (device: string, event?: string) => void,
 *   update: (event: string, newer: Newer) => void}} AlertOwner */
/** A signal that was reported. */
export declare class Alert {
    #private;
    device: string;
    reason: string;
    /** The event's id, once it is stored; of a repeat, the id of the event it repeats. */
    id: string;
    /** Resolves when the signal is judged and stored, with `pass` or why it was held back.
     * @type {Promise<string>} */
    stored: Promise<string>;
    /** Resolves with how it ended. @type {Promise<SentEvent>} */
    sent: Promise<SentEvent>;
    /** @param {AlertOwner} owner @param {string} device @param {string} reason */
    constructor(owner: AlertOwner, device: string, reason: string);
    /** Call it off. If it has gone out already, a correction follows. */
    cancel(): void;
    /** Add something newer: it goes out with the event, or after it. Await `stored` first.
     * @param {Newer} newer */
    update(newer: Newer): void;
    /** For the sentinel: the signal is judged. @param {string} event @param {string} ruling */
    _rule(event: string, ruling: string): void;
    /** For the sentinel: it has ended. @param {SentEvent} end */
    _end(end: SentEvent): void;
    /** For the sentinel: its end will not be heard. @param {Error} problem */
    _abandon(problem: Error): void;
}
