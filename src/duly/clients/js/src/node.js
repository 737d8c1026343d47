/** For Node: a file that keeps what must survive the process. */

import {
  closeSync, existsSync, fdatasyncSync, fsyncSync, ftruncateSync, openSync, readFileSync, renameSync, rmSync,
  writeSync,
} from "node:fs";
import { dirname } from "node:path";
import { sha256 } from "./sha256.js";
import { apply } from "./stores.js";

/** @typedef {import("./stores.js").Store} Store */

const ROOM = 1024 * 1024;

/**
 * A file of entries that survives kill -9 and a power cut at any moment. It is a storage for `App` and `Chat`
 * and a store for `Sentinel`; use one file for one of them.
 *
 * The laws. A change is one line, with its hash, and is flushed before the call returns. A last line that is
 * not whole was never promised, and is cut off. A file that has grown is written anew beside itself and put in
 * its place. Two processes on one file are
 * refused.
 *
 * @implements {Store}
 */
export class FileStorage {
  #path;
  /** @type {Map<string, string>} */
  #items = new Map();
  #file;
  #size = 0;
  #room = ROOM;

  /** @param {string} path */
  constructor(path) {
    this.#path = path;
    claim(`${path}.lock`);
    try {
      this.#file = openSync(path, "a+", 0o600);
      this.#read();
    } catch (problem) {
      rmSync(`${path}.lock`, { force: true });
      throw problem;
    }
  }

  // ── as a store ─────────────────────────────────────────────────────────────────────────────────

  async load() {
    return new Map(this.#items);
  }

  /** @param {Map<string, string|null>} changes */
  async write(changes) {
    this.#append(changes);
  }

  async close() {
    if (this.#file < 0) return;
    closeSync(this.#file);
    this.#file = -1;
    rmSync(`${this.#path}.lock`, { force: true });
  }

  // ── as a storage ───────────────────────────────────────────────────────────────────────────────

  get length() {
    return this.#items.size;
  }

  /** @param {number} i */
  key(i) {
    return [...this.#items.keys()][i] ?? null;
  }

  /** @param {string} key */
  getItem(key) {
    return this.#items.get(key) ?? null;
  }

  /** @param {string} key @param {string} value */
  setItem(key, value) {
    if (this.#items.get(key) !== value) this.#append(new Map([[key, value]]));
  }

  /** @param {string} key */
  removeItem(key) {
    if (this.#items.has(key)) this.#append(new Map([[key, null]]));
  }

  // ── the file ───────────────────────────────────────────────────────────────────────────────────

  #read() {
    const bytes = readFileSync(this.#path);
    let whole = 0;
    for (let end; (end = bytes.indexOf("\n", whole)) >= 0; whole = end + 1) {
      const line = bytes.toString("utf8", whole, end);
      const body = line.slice(17);
      if (line.slice(0, 16) === sha256(body).slice(0, 16)) apply(this.#items, new Map(JSON.parse(body)));
      else if (end === bytes.length - 1) break; // the last write did not come to its end
      else throw new Error(`${this.#path} is damaged in its middle; put a copy in its place, or move it away`);
    }
    if (whole < bytes.length) ftruncateSync(this.#file, whole);
    this.#size = whole;
    if (whole > ROOM) this.#writeAnew();
  }

  /** @param {Map<string, string|null>} changes */
  #append(changes) {
    if (this.#file < 0) throw new Error(`${this.#path} was closed`);
    const line = Buffer.from(lineOf(changes));
    try {
      for (let done = 0; done < line.length; ) done += writeSync(this.#file, line, done);
      fdatasyncSync(this.#file);
    } catch (problem) {
      ftruncateSync(this.#file, this.#size); // what was not promised must not stand before the next line
      throw problem;
    }
    this.#size += line.length;
    apply(this.#items, changes);
    if (this.#size > this.#room) this.#writeAnew();
  }

  #writeAnew() {
    const beside = `${this.#path}.new`;
    const file = openSync(beside, "w", 0o600);
    const line = Buffer.from(this.#items.size ? lineOf(this.#items) : "");
    for (let done = 0; done < line.length; ) done += writeSync(file, line, done);
    fsyncSync(file);
    closeSync(file);
    renameSync(beside, this.#path);
    const folder = openSync(dirname(this.#path), "r");
    fsyncSync(folder);
    closeSync(folder);
    closeSync(this.#file);
    this.#file = openSync(this.#path, "a+");
    this.#size = line.length;
    this.#room = Math.max(ROOM, 2 * line.length);
  }
}

/** @param {Map<string, string|null>} changes */
function lineOf(changes) {
  const body = JSON.stringify([...changes]);
  return `${sha256(body).slice(0, 16)} ${body}\n`;
}

/** Make the lock of a file ours; one of a process that is gone is taken over. @param {string} path */
function claim(path) {
  for (let attempt = 0; attempt < 3; attempt++) {
    try {
      const file = openSync(path, "wx", 0o600);
      writeSync(file, `${process.pid} ${begun(process.pid)}`);
      closeSync(file);
      return;
    } catch (problem) {
      if (/** @type {NodeJS.ErrnoException} */ (problem).code !== "EEXIST") throw problem;
    }
    const [pid, since] = existsSync(path) ? readFileSync(path, "utf8").split(" ") : ["", ""];
    if (pid && alive(Number(pid)) && begun(Number(pid)) === since) {
      const file = path.replace(/\.lock$/, "");
      throw new Error(`${file} is in use by process ${pid}; give each program its own file`);
    }
    const aside = `${path}.${process.pid}`;
    try {
      renameSync(path, aside); // only one of several takes it away
      rmSync(aside, { force: true });
    } catch {
      // another was faster
    }
  }
  throw new Error(`${path} cannot be had: another program is starting on the same file`);
}

/** @param {number} pid */
function alive(pid) {
  try {
    process.kill(pid, 0);
    return true;
  } catch (problem) {
    return /** @type {NodeJS.ErrnoException} */ (problem).code === "EPERM";
  }
}

/** When a process began, where the system tells: numbers are given anew after a restart. @param {number} pid */
function begun(pid) {
  try {
    return readFileSync(`/proc/${pid}/stat`, "utf8").split(") ")[1].split(" ")[19];
  } catch {
    return "";
  }
}
