/** The limits of a sentinel, and the words for what it decides. */

export const SECOND = 1_000_000;
export const HOUR = 3_600 * SECOND;
export const DAY_LONG = 24 * HOUR;
export const DISCONNECT = "disconnect";
export const SUMMARY = "summary";
const LONGEST = 10 * 366 * 86_400;

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

export const SEVERITIES = ["info", "warning", "critical"];

/** @type {SentinelPolicy} */
const USUAL = {
  debounce: 30, per_hour: 10, summary: 300, cooldown: 300, countdown: 15, settle: true, keep: 7 * 86_400,
  heartbeat: 0, retry_first: 5, retry_most: 3_600, tries: 0,
};

/** The usual limits, with others in place of some; throws if they make no sense.
 * @param {Partial<SentinelPolicy>} [limits] @returns {SentinelPolicy} */
export function policyOf(limits = {}) {
  const policy = { ...USUAL, ...limits };
  for (const [name, value] of Object.entries(policy)) {
    if (!(name in USUAL)) throw new TypeError(`${name} is not a limit of a sentinel`);
    if (name === "settle") continue;
    if (typeof value !== "number" || !(value >= 0 && value <= LONGEST)) {
      throw new RangeError(`${name} is a number from 0 to ${LONGEST}, not ${value}`);
    }
  }
  const whole = Number.isInteger(policy.per_hour) && Number.isInteger(policy.tries);
  if (!whole || policy.per_hour < 1) throw new RangeError("per_hour is 1 or more, tries 0 or more, in whole");
  if (policy.summary <= 0) throw new RangeError("a summary comes after more than 0 seconds");
  if (policy.countdown >= policy.keep) throw new RangeError("an event would expire in its countdown");
  if (policy.heartbeat > 0 && policy.heartbeat < 1) throw new RangeError("heartbeat is 0, or 1 or more");
  if (!(policy.retry_first > 0 && policy.retry_first <= policy.retry_most)) {
    throw new RangeError("retry_first is more than 0 and at most retry_most");
  }
  return policy;
}

/** Microseconds. @param {number} seconds */
export function micros(seconds) {
  return Math.round(seconds * SECOND);
}
