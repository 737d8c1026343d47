/** The limits of a sentinel, and the words for what it decides. */
export declare const SECOND = 1000000;
export declare const HOUR: number;
export declare const DAY_LONG: number;
export declare const DISCONNECT = "disconnect";
export declare const SUMMARY = "summary";
export type SentinelPolicy = {
    /**
     * repeats for one reason within this are one event; 0: none are
     */
    debounce: number;
    /**
     * events of one device in an hour; what more there is comes as a summary
     */
    per_hour: number;
    /**
     * the summary comes so long after the first signal that the limit held back
     */
    summary: number;
    /**
     * after a cancel nothing but what is critical; 0: no cooldown
     */
    cooldown: number;
    /**
     * how long a person may call an event off before it goes out
     */
    countdown: number;
    /**
     * a device that is back when the countdown of its disconnect ends was no alarm
     */
    settle: boolean;
    /**
     * an event that cannot be handed over for so long expires; a critical one never does
     */
    keep: number;
    /**
     * how often the tower is promised a sign of life; 0: never
     */
    heartbeat: number;
    /**
     * how soon what is not answered is sent again
     */
    retry_first: number;
    /**
     * and how rarely at last; a reconnect does so at once
     */
    retry_most: number;
    /**
     * how often it is sent over one connection; 0: until it is answered
     */
    tries: number;
};
export type Severity = "info" | "warning" | "critical";
export type Ruling = "pass" | "debounced" | "cooling" | "limited";
/** All limits of a sentinel, in seconds.
 * @typedef {object} SentinelPolicy
 * @property {number} debounce repeats for one reason within this are one event; 0: none are
 * @property {number} per_hour events of one device in an hour; what more there is comes as a summary
 * @property {number} summary the summary comes so long after the first signal that the limit held back
 * @property {number} cooldown after a cancel nothing but what is critical; 0: no cooldown
 * @property {number} countdown how long a person may call an event off before it goes out
 * @property {boolean} settle a device that is back when the countdown of its disconnect ends was no alarm
 * @property {number} keep an event that cannot be handed over for so long expires; a critical one never does
 * @property {number} heartbeat how often the tower is promised a sign of life; 0: never
 * @property {number} retry_first how soon what is not answered is sent again
 * @property {number} retry_most and how rarely at last; a reconnect does so at once
 * @property {number} tries how often it is sent over one connection; 0: until it is answered
 */
/** @typedef {"info"|"warning"|"critical"} Severity */
/** @typedef {"pass"|"debounced"|"cooling"|"limited"} Ruling */
export declare const SEVERITIES: string[];
/** The usual limits, with others in place of some; throws if they make no sense.
 * @param {Partial<SentinelPolicy>} [limits] @returns {SentinelPolicy} */
export declare function policyOf(limits?: Partial<SentinelPolicy>): SentinelPolicy;
/** Microseconds. @param {number} seconds */
export declare function micros(seconds: number): number;
