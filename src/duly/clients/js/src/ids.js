/** Ids, and the short hash that tells accounts apart. */

/** Ids rise in both parts, whatever the clock does.
 * @param {string|null|undefined} last @param {number} now */
export function nextId(last, now) {
  const [ms, n] = (last ?? "0_-1").split("_").map(Number);
  return `${Math.max(ms, now)}_${n + 1}`;
}

/** The order in which ids were minted. @param {string} a @param {string} b */
export function byCounter(a, b) {
  return Number(a.split("_")[1]) - Number(b.split("_")[1]);
}

/** 53 bits of a token: enough to tell accounts apart, too little to be one. @param {string} text */
export function hash(text) {
  let a = 0xdeadbeef;
  let b = 0x41c6ce57;
  for (let i = 0; i < text.length; i++) {
    a = Math.imul(a ^ text.charCodeAt(i), 2654435761);
    b = Math.imul(b ^ text.charCodeAt(i), 1597334677);
  }
  a = Math.imul(a ^ (a >>> 16), 2246822507) ^ Math.imul(b ^ (b >>> 13), 3266489909);
  b = Math.imul(b ^ (b >>> 16), 2246822507) ^ Math.imul(a ^ (a >>> 13), 3266489909);
  return (4294967296 * (2097151 & b) + (a >>> 0)).toString(36);
}
