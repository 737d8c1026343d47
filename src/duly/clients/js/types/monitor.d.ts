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
export declare const EVENT = "alert_event";
export declare const UPDATE = "alert_update";
export declare const CANCEL = "alert_cancel";
export declare const CALLED_OFF = "a person called it off before it went out";
export declare const SETTLED = "the device was back before the countdown ended";
export type Identity = {
    sentinel: string;
    tower: string;
    profile: string;
    session: string;
};
export type Message = {
    id: string;
    kind: string;
    /**
     * when it was made; microseconds, as all times here
     */
    at: number;
    /**
     * 0: never
     */
    expires: number;
    /**
     * when its countdown ends
     */
    due: number;
    /**
     * what the tower is told
     */
    data: any;
    /**
     * whether it may have left
     */
    sent: boolean;
    /**
     * its countdown is over, and that was told
     */
    queued: boolean;
    /**
     * transmissions over this connection
     */
    tries: number;
    /**
     * when it is sent again
     */
    again: number;
    /**
     * by how much the clock was set since it was made; null: an earlier run made it
     */
    steps: number | null;
};
export type Effect = {
    do: "ruled";
    origin: any;
    device: string;
    reason: string;
    ruling: import("./policy.js").Ruling;
    until: number | null;
    event: string;
    due: number;
} | {
    do: "transmit";
    message: Message;
} | {
    do: "ended";
    id: string;
    kind: string;
    event: string;
    state: string;
    detail: string;
} | {
    do: "queued";
    event: string;
    device: string;
    reason: string;
} | {
    do: "cancelled";
    device: string;
    dropped: string[];
    corrected: string[];
    held: string[];
} | {
    do: "in vain";
    event: string;
} | {
    do: "beat";
};
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
export declare function eventId({ sentinel, tower, profile, session }: Identity, reason: string, device: string, at: number): string;
/** The sentinel's machine. */
export declare class Monitor {
    #private;
    /** @param {import("./policy.js").SentinelPolicy} policy @param {Identity} identity
     * @param {() => number} [random] */
    constructor(policy: import("./policy.js").SentinelPolicy, identity: Identity, random?: () => number);
    /** How much has not ended: messages, and signals that may become one. */
    get waiting(): number;
    /** What to store, and what to do once it is stored; each is returned once. */
    take(): {
        changes: Map<string, string | null>;
        effects: Effect[];
    };
    /** Start from what an earlier run has stored. @param {Map<string, string>} kept @param {number} now */
    restore(kept: Map<string, string>, now: number): void;
    /** @param {import("./devices.js").Signal} signal @param {number} now */
    signal(signal: import("./devices.js").Signal, now: number): void;
    /** A device can be reached again. @param {string} name @param {number} at */
    back(name: string, at: number): void;
    /** All is well: with one event, or with everything at a device.
     * @param {string} name @param {string} event @param {number} at @param {number} now */
    cancel(name: string, event: string, at: number, now: number): void;
    /** Something newer about an event: it goes out with it, or after it.
     * @param {string} event @param {{severity?: string, device_meta?: any, location?: any}} change
     * @param {number} at @param {number} now */
    change(event: string, change: {
        severity?: string;
        device_meta?: any;
        location?: any;
    }, at: number, now: number): void;
    /** The tower can be reached: what it has not answered goes out again, in order. @param {number} now */
    reached(now: number): void;
    lost(): void;
    /** The promise of a heartbeat is taken back. */
    standDown(): void;
    /** Date unsent events by the tower's clock; ours may have started in 1970, and have been set since.
     * @param {number} offset @param {number} now */
    measured(offset: number, now: number): void;
    /** The tower has answered. @param {string} id @param {"done"|"failed"|"unknown"} state
     * @param {string} detail @param {number} now */
    answered(id: string, state: "done" | "failed" | "unknown", detail: string, now: number): void;
    /** Send, judge again, sum up and expire what is due. @param {number} now */
    wake(now: number): void;
    /** When `wake` has something to do; Infinity: never. */
    nextWake(): number;
    /** Follow a wall clock that was set by this much: lengths of time stay what they are. @param {number} by */
    shift(by: number): void;
}
