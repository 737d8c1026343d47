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
import { Listeners } from "./listeners.js";
export { Closed, Refused } from "./errors.js";
export type SentinelNews = {
    what: string;
    time: number;
    device: string;
    reason: string;
    event: string;
    detail: string;
    until: number;
};
export type SentinelOptions = {
    /**
     * its queue and memory: `FileStorage` of `duly/node`,
     * `KeyValueStore` or one of your own; if not given, IndexedDB where there is one. null: they end with the
     * process
     */
    store?: import("./stores.js").Store | null;
    /**
     * who is told, at the tower
     */
    profile?: string;
    /**
     * limits
     */
    policy?: Partial<import("./policy.js").SentinelPolicy>;
    /**
     * promises the tower a sign of life every so many seconds
     */
    heartbeat?: number;
    /**
     * what is guarded, if one sentinel guards one thing after another
     */
    session?: string;
    /**
     * a WebSocket, where there is none, as in Node 20
     */
    socket?: new (url: string) => WebSocket;
    /**
     * `http` for networks that let no WebSocket through
     */
    transport?: "websocket" | "http";
};
export type SignalOptions = {
    /**
     * `warning` if not given
     */
    severity?: import("./policy.js").Severity;
    /**
     * about the device
     */
    meta?: any;
    location?: any;
    /**
     * seconds, instead of the policy's
     */
    countdown?: number;
};
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
export declare class Sentinel extends Listeners<{
    news: SentinelNews;
}> {
    #private;
    /** What it has done since it was started. */
    counts: {
        signals: number;
        debounced: number;
        cooling: number;
        limited: number;
        cancelled: number;
        sent: number;
        resent: number;
    };
    /** Resolves at the first welcome of the tower. @type {Promise<void>} */
    ready: Promise<void>;
    /** Resolves when the store is read; rejects if it cannot be. @type {Promise<void>} */
    opened: Promise<void>;
    /** @param {string} url the hub; several with commas between @param {string} token
     * @param {SentinelOptions} [options] */
    constructor(url: string, token: string, options?: SentinelOptions);
    /** Report that a device can no longer be reached.
     * @param {string} device @param {{meta?: any, location?: any}} [options] @returns {Alert} */
    disconnect(device: string, options?: {
        meta?: any;
        location?: any;
    }): Alert;
    /** Report that a device can be reached again. While the countdown of its disconnect runs, this ends it
     * without an alarm. @param {string} device */
    reconnect(device: string): void;
    /** Report an event of a device. @param {string} reason @param {string} device
     * @param {SignalOptions} [options] @returns {Alert} */
    trigger(reason: string, device: string, { severity, meta, location, countdown }?: SignalOptions): Alert;
    /** Call off a device's events, or one of them: what has not gone out never will, and for what went out
     * within the last hour a correction follows. @param {string} device @param {string} [event] */
    cancel(device: string, event?: string): void;
    /** Add something newer to an event: it goes out with it, or after it.
     * @param {string} event @param {import("./alerts.js").Newer} newer */
    update(event: string, { severity, meta, location }: import("./alerts.js").Newer): void;
    /** Take the promise of a heartbeat back: from now on no recipient is told when this sentinel falls silent. */
    standDown(): void;
    /** Whether there is a connection to the tower. */
    get connected(): boolean;
    /** How many events, updates and corrections the tower does not have yet. */
    get waiting(): number;
    /** Resolves when everything that was reported has ended. @returns {Promise<void>} */
    drained(): Promise<void>;
    /** End. What is stored goes on at the next start. */
    close(): Promise<void>;
}
