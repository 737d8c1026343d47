/** SHA-256, since browsers have their own only on pages that came by https, and React Native has none. */

const ROUNDS = fractions(64, 1 / 3);

/** A hash that grows with what is added to it. */
export class Sha256 {
  #state = fractions(8, 1 / 2);
  #block = new Uint8Array(64);
  #words = new Uint32Array(64);
  #filled = 0;
  #length = 0;

  /** @param {Uint8Array} bytes */
  add(bytes) {
    this.#length += bytes.length;
    for (let at = 0; at < bytes.length; ) {
      const part = bytes.subarray(at, at + 64 - this.#filled);
      this.#block.set(part, this.#filled);
      this.#filled += part.length;
      at += part.length;
      if (this.#filled === 64) this.#compress();
    }
    return this;
  }

  /** The hash of everything, in hexadecimal digits. Nothing can be added afterwards. */
  hex() {
    const length = this.#length;
    this.add(new Uint8Array([0x80]));
    while (this.#filled !== 56) this.add(new Uint8Array(1));
    const view = new DataView(new ArrayBuffer(8));
    view.setUint32(0, Math.floor(length / 2 ** 29));
    view.setUint32(4, (length << 3) >>> 0);
    this.add(new Uint8Array(view.buffer));
    return Array.from(this.#state, (word) => word.toString(16).padStart(8, "0")).join("");
  }

  #compress() {
    const words = this.#words;
    const view = new DataView(this.#block.buffer);
    this.#filled = 0;
    for (let i = 0; i < 16; i++) words[i] = view.getUint32(4 * i);
    for (let i = 16; i < 64; i++) {
      const x = words[i - 15];
      const y = words[i - 2];
      const low = turn(x, 7) ^ turn(x, 18) ^ (x >>> 3);
      const high = turn(y, 17) ^ turn(y, 19) ^ (y >>> 10);
      words[i] = words[i - 16] + low + words[i - 7] + high;
    }
    let [a, b, c, d, e, f, g, h] = this.#state;
    for (let i = 0; i < 64; i++) {
      const choice = (e & f) ^ (~e & g);
      const one = (h + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + choice + ROUNDS[i] + words[i]) | 0;
      const majority = (a & b) ^ (a & c) ^ (b & c);
      const two = ((turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + majority) | 0;
      [h, g, f, e, d, c, b, a] = [g, f, e, (d + one) | 0, c, b, a, (one + two) | 0];
    }
    [a, b, c, d, e, f, g, h].forEach((word, i) => { this.#state[i] += word; });
  }
}

/** The hash of a text, in hexadecimal digits. @param {string} text */
export function sha256(text) {
  return new Sha256().add(new TextEncoder().encode(text)).hex();
}

/** @param {number} word @param {number} by */
function turn(word, by) {
  return (word >>> by) | (word << (32 - by));
}

/** The first 32 bits behind the point of a power of the first primes: the constants of the standard.
 * @param {number} count @param {number} power */
function fractions(count, power) {
  const found = new Uint32Array(count);
  for (let n = 2, i = 0; i < count; n++) {
    let divisor = 2;
    while (divisor * divisor <= n && n % divisor) divisor++;
    if (divisor * divisor > n) found[i++] = (n ** power % 1) * 2 ** 32;
  }
  return found;
}
