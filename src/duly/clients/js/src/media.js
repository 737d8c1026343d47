/**
 * Media: a file from a device, in chunks, resumed after a break and checked by its hash.
 *
 * The laws. Reading a chunk changes nothing, so it may be asked for any number of times. A download is finished
 * only when its SHA-256 is right. A device, hub or network that is away is waited for; a download gives up
 * after two minutes without anything new.
 */

import { Refused } from "./errors.js";
import { Sha256 } from "./sha256.js";

const AT_ONCE = 4;
const ASK_AGAIN = 5;
const MEDIA_PATIENCE = 120_000;
const LOST = ["unknown", "expired", "superseded"];

/** The device does not give what was asked for, or not whole. */
export class MediaError extends Error {
  /** @param {string} message */
  constructor(message) {
    super(message);
    this.name = "MediaError";
  }
}

/** @typedef {object} DownloadOptions
 * @property {Uint8Array[]} [parts] the chunks that an earlier call had got: it goes on behind them. The call
 *   itself adds to it, so that the next one can go on where this one has failed
 * @property {(done: number, all: number) => void} [progress] hears how many chunks there are
 */

/** Fetch a file from a device. @param {import("./app.js").App} app @param {string} device @param {string} name
 * @param {DownloadOptions} [options] @returns {Promise<Uint8Array>} */
export async function download(app, device, name, { parts = [], progress } = {}) {
  const media = await ask(app, device, "media_download", { name });
  const { size, sha256, chunk } = media ?? {};
  if (!(size >= 0 && chunk > 0 && typeof sha256 === "string")) {
    throw new MediaError(`${device} does not answer media_download as a device should`);
  }
  const all = Math.ceil(size / chunk);
  if (parts.some((part, n) => n >= all || part.length !== Math.min(chunk, size - n * chunk))) parts.length = 0;
  while (parts.length < all) {
    const wanted = Array.from({ length: Math.min(AT_ONCE, all - parts.length) }, (_, i) => parts.length + i);
    parts.push(...(await Promise.all(wanted.map((n) => chunkOf(app, device, name, n)))));
    progress?.(parts.length, all);
  }
  const whole = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  const found = new Sha256().add(whole).hex();
  if (found === sha256) return whole;
  parts.length = 0;
  throw new MediaError(`${name} arrived damaged (its SHA-256 is ${found.slice(0, 12)}…); ask again`);
}

/** @param {import("./app.js").App} app @param {string} device @param {string} name @param {number} n */
async function chunkOf(app, device, name, n) {
  for (let tries = 0; tries < ASK_AGAIN; tries++) {
    const answer = await ask(app, device, "media_download_chunk", { name, n });
    // The hub answers the repeat of an answered question without the data: ask anew.
    if (answer?.data) return Uint8Array.from(atob(answer.data), (letter) => letter.charCodeAt(0));
  }
  throw new MediaError(`${device} does not give chunk ${n} of ${name}`);
}

/** Ask until there is an answer. Reading changes nothing, so another try is always safe.
 * @param {import("./app.js").App} app @param {string} device @param {string} type @param {any} data */
async function ask(app, device, type, data) {
  const until = performance.now() + MEDIA_PATIENCE;
  for (let pause = 200; ; pause = Math.min(2 * pause, 3_000)) {
    let why = "";
    try {
      const ack = await app.send(device, type, data);
      if (ack.state === "done") return ack.data;
      why = ack.detail || ack.state;
      if (!LOST.includes(ack.state)) throw new MediaError(`${device}: ${why}`);
    } catch (problem) {
      if (!(problem instanceof Refused) || (problem.code !== 1 && problem.code !== 4)) throw problem;
      why = problem.detail;
    }
    if (performance.now() >= until) throw new MediaError(`${device}: ${why}`);
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}
