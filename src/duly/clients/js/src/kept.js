/** What `App` and `Chat` keep over a reload: ids, positions, what is under way. */

import { hash, nextId } from "./ids.js";

/** What a client needs of a storage: `localStorage` is one, `FileStorage` of `duly/node` another.
 * @typedef {Pick<Storage, "length"|"key"|"getItem"|"setItem"|"removeItem">} SyncStorage */

/** What survives a reload, of one account: another account's is not ours. */
export class Kept {
  #store;
  #space;
  #alone;

  /** @param {string} token @param {SyncStorage|null|undefined} storage */
  constructor(token, storage) {
    this.#store = (storage === undefined ? localStore() : storage) ?? memoryStore();
    this.#space = `duly:${hash(token)}:`;
    this.#alone = storage !== undefined || !globalThis.indexedDB;
  }

  /** A new id. @param {number} now @returns {Promise<string>} */
  async mint(now) {
    if (!this.#alone) return mintAmongTabs(this.#space, (last) => nextId(last, now));
    const id = nextId(this.get("last"), now);
    this.set("last", id);
    return id;
  }

  /** @param {string} key */
  get(key) {
    return this.#store.getItem(this.#space + key);
  }

  /** @param {string} key @param {string} value */
  set(key, value) {
    this.#store.setItem(this.#space + key, value);
  }

  /** @param {string} key */
  forget(key) {
    this.#store.removeItem(this.#space + key);
  }

  /** What is kept under a prefix. @param {string} prefix */
  keys(prefix) {
    const all = Array.from({ length: this.#store.length }, (_, i) => this.#store.key(i) ?? "");
    const start = this.#space + prefix;
    return all.filter((key) => key.startsWith(start)).map((key) => key.slice(start.length));
  }
}

/** @type {Promise<IDBDatabase>|null} */
let database = null;

/** The next id of an account, whichever tab asks. Not in localStorage: tabs see each other's writes there too
 * late, even under a lock. A transaction is one, for all of them.
 * @param {string} space @param {(last: string|undefined) => string} next @returns {Promise<string>} */
async function mintAmongTabs(space, next) {
  database ??= new Promise((resolve, reject) => {
    const opening = indexedDB.open("duly", 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore("ids");
    opening.onsuccess = () => resolve(opening.result);
    opening.onerror = () => reject(opening.error);
  });
  try {
    const transaction = (await database).transaction("ids", "readwrite", { durability: "strict" });
    const ids = transaction.objectStore("ids");
    return await new Promise((resolve, reject) => {
      let id = "";
      const reading = ids.get(space);
      reading.onsuccess = () => {
        id = next(reading.result);
        ids.put(id, space);
      };
      transaction.oncomplete = () => resolve(id);
      transaction.onabort = () => reject(transaction.error);
    });
  } catch (problem) {
    database = null; // closed under us, as when the user clears the site's data
    throw problem;
  }
}

/** The browser's own store, unless it is forbidden or there is none. */
function localStore() {
  try {
    return globalThis.localStorage ?? null;
  } catch {
    return null;
  }
}

/** A store that is forgotten with the page. @returns {SyncStorage} */
function memoryStore() {
  /** @type {Map<string, string>} */
  const items = new Map();
  return {
    get length() { return items.size; },
    key: (i) => [...items.keys()][i] ?? null,
    getItem: (key) => items.get(key) ?? null,
    setItem: (key, value) => { items.set(key, value); },
    removeItem: (key) => { items.delete(key); },
  };
}
