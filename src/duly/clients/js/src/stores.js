/**
 * Where a sentinel keeps its queue and its memory.
 *
 * The law: `write` resolves when all of its changes are stored, or none of them is; after a crash `load`
 * returns either what was before a write or what was after it.
 */

/** What a sentinel needs of a store. Write one for whatever your platform has.
 * @typedef {object} Store
 * @property {() => Promise<Map<string, string>>} load everything that is stored
 * @property {(changes: Map<string, string|null>) => Promise<void>} write null removes an entry
 * @property {() => Promise<void>} [close]
 */

/** What `KeyValueStore` needs: `AsyncStorage` of React Native has it, and `localStorage` does, too.
 * @typedef {object} KeyValue
 * @property {(key: string) => Promise<string|null>|string|null} getItem
 * @property {(key: string, value: string) => Promise<void>|void} setItem
 * @property {(key: string) => Promise<void>|void} removeItem
 */

/** Another page or process has opened this store since: this one must stop. */
export class StoreTaken extends Error {
  constructor(message = "the store was opened again elsewhere; this sentinel has stopped") {
    super(message);
    this.name = "StoreTaken";
  }
}

/** A store that is forgotten with the process. @implements {Store} */
export class MemoryStore {
  /** @type {Map<string, string>} */
  #items = new Map();

  async load() {
    return new Map(this.#items);
  }

  /** @param {Map<string, string|null>} changes */
  async write(changes) {
    apply(this.#items, changes);
  }
}

/**
 * A store on any storage of keys and texts, such as React Native's `AsyncStorage`. A storage of that kind keeps
 * one entry at a time, so the changes are first written together, as a journal, and then each to its place;
 * what a crash has left in the journal is done by the next `load`.
 * @implements {Store}
 */
export class KeyValueStore {
  #storage;
  #prefix;
  /** @type {Set<string>} */
  #names = new Set();

  /** @param {KeyValue} storage @param {string} [prefix] of all keys that it uses */
  constructor(storage, prefix = "duly:sentinel:") {
    this.#storage = storage;
    this.#prefix = prefix;
  }

  async load() {
    const journal = await this.#storage.getItem(`${this.#prefix}journal`);
    this.#names = new Set(JSON.parse((await this.#storage.getItem(`${this.#prefix}names`)) ?? "[]"));
    if (journal) await this.#carryOut(new Map(JSON.parse(journal)));
    const items = new Map();
    for (const name of this.#names) {
      const text = await this.#storage.getItem(this.#prefix + name);
      if (text !== null) items.set(name, text);
    }
    return items;
  }

  /** @param {Map<string, string|null>} changes */
  async write(changes) {
    await this.#storage.setItem(`${this.#prefix}journal`, JSON.stringify([...changes]));
    await this.#carryOut(changes);
  }

  /** @param {Map<string, string|null>} changes */
  async #carryOut(changes) {
    const before = this.#names.size;
    let fewer = false;
    for (const [name, text] of changes) {
      if (text !== null) this.#names.add(name);
      else fewer = this.#names.delete(name) || fewer;
    }
    if (fewer || this.#names.size !== before) {
      await this.#storage.setItem(`${this.#prefix}names`, JSON.stringify([...this.#names]));
    }
    for (const [name, text] of changes) {
      if (text !== null) await this.#storage.setItem(this.#prefix + name, text);
      else await this.#storage.removeItem(this.#prefix + name);
    }
    await this.#storage.removeItem(`${this.#prefix}journal`);
  }
}

/**
 * A store in a browser's IndexedDB. The page that has opened it last has it: writes of an earlier one fail with
 * `StoreTaken`, so that two tabs never go on with one queue.
 * @implements {Store}
 */
export class IndexedDbStore {
  #name;
  #owner = Math.random().toString(36).slice(2) + Date.now().toString(36);
  /** @type {IDBDatabase|null} */
  #database = null;

  /** @param {string} [name] of the database */
  constructor(name = "duly-sentinel") {
    this.#name = name;
  }

  async load() {
    const items = await this.#within((entries, done) => {
      entries.put(this.#owner, "owner");
      const [keys, values] = [entries.getAllKeys(), entries.getAll()];
      values.onsuccess = () => done(new Map(keys.result.map((key, i) => [String(key), values.result[i]])));
    });
    items.delete("owner");
    return items;
  }

  /** @param {Map<string, string|null>} changes @returns {Promise<void>} */
  write(changes) {
    return this.#within((entries, done, fail) => {
      const owner = entries.get("owner");
      owner.onsuccess = () => {
        if (owner.result !== this.#owner) {
          fail(new StoreTaken());
          return;
        }
        for (const [name, text] of changes) text === null ? entries.delete(name) : entries.put(text, name);
        done(undefined);
      };
    });
  }

  async close() {
    this.#database?.close();
    this.#database = null;
  }

  /** One transaction. @template T
   * @param {(entries: IDBObjectStore, done: (value: T) => void, fail: (problem: Error) => void) => void} work
   * @returns {Promise<T>} */
  async #within(work) {
    this.#database ??= await openDatabase(this.#name);
    try {
      const transaction = this.#database.transaction("items", "readwrite", { durability: "strict" });
      return await new Promise((resolve, reject) => {
        /** @type {any} */
        let result;
        transaction.oncomplete = () => resolve(result);
        transaction.onabort = () => reject(transaction.error ?? new Error("the browser did not store it"));
        work(transaction.objectStore("items"), (value) => { result = value; }, (problem) => {
          reject(problem);
          transaction.abort();
        });
      });
    } catch (problem) {
      if (!(problem instanceof StoreTaken)) await this.close(); // as when the user clears the site's data
      throw problem;
    }
  }
}

/** @param {string} name @returns {Promise<IDBDatabase>} */
function openDatabase(name) {
  return new Promise((resolve, reject) => {
    const opening = indexedDB.open(name, 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore("items");
    opening.onsuccess = () => resolve(opening.result);
    opening.onerror = () => reject(opening.error);
  });
}

/** Carry changes out on entries.
 * @param {Map<string, string>} items @param {Map<string, string|null>} changes */
export function apply(items, changes) {
  for (const [name, text] of changes) text === null ? items.delete(name) : items.set(name, text);
}
