/**
 * The fields of a signal: what a program hands to its sentinel is checked here, before it is stored.
 *
 * The law: what the tower would refuse is refused at once, where its cause can be seen.
 */

import { SEVERITIES } from "./policy.js";

const NAME_LIMIT = 200;
const FIELD_LIMIT = 64 * 1024;
// The tower takes frames that are nested 32 deep, and a field is two below its frame.
const DEPTH_LIMIT = 30;
// Escaped backslashes, and halves of characters: `JSON.stringify` escapes no others.
const HALVES = /\\(?:\\|ud[89a-f][0-9a-f]{2})/g;

/** The name of a reason, a device or a profile, if it is one. @param {string} field @param {string} value */
export function nameOf(field, value) {
  const bytes = typeof value === "string" ? new TextEncoder().encode(value).length : 0;
  if (bytes < 1 || bytes > NAME_LIMIT || /\0|\p{Surrogate}/u.test(value)) {
    throw new TypeError(`${field} is a text of 1 to ${NAME_LIMIT} bytes without NUL`);
  }
  return value;
}

/** A severity, if it is one. @param {string} value @returns {import("./policy.js").Severity} */
export function severityOf(value) {
  if (!SEVERITIES.includes(value)) throw new TypeError(`severity is one of ${SEVERITIES.join(", ")}`);
  return /** @type {import("./policy.js").Severity} */ (value);
}

/** A copy of what goes along, as it will be on the wire. A name that was cut in the middle of an emoji would be
 * refused there, and the alert with it: half a character becomes a �.
 * @param {string} field @param {any} value */
export function fieldOf(field, value) {
  if (value === undefined || value === null) return undefined;
  const text = JSON.stringify(value)?.replace(HALVES, (found) => (found === "\\\\" ? found : "\ufffd"));
  if (text === undefined) throw new TypeError(`${field} cannot be written as JSON`);
  const size = new TextEncoder().encode(text).length;
  if (size > FIELD_LIMIT) throw new RangeError(`${field} has ${size} bytes, the limit is ${FIELD_LIMIT}`);
  const copy = JSON.parse(text);
  if (depthOf(copy) > DEPTH_LIMIT) throw new RangeError(`${field} is nested more than ${DEPTH_LIMIT} deep`);
  return copy;
}

/** @param {any} value @returns {number} */
function depthOf(value) {
  if (value === null || typeof value !== "object") return 0;
  return 1 + Object.values(value).reduce((most, one) => Math.max(most, depthOf(one)), 0);
}
