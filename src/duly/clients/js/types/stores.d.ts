/**
 * Where a sentinel keeps its queue and its memory.
 *
 * The law: `write` resolves when all of its changes are stored, or none of them is; after a crash `load`
 * returns either what was before a write or what was after it.
 */
export type Store = {
    /**
     * everything that is stored
     */
    load: () => Promise<Map<string, string>>;
    /**
     * null removes an entry
     */
    write: (changes: Map<string, string | null>) => Promise<void>;
    close?: () => Promise<void>;
};
export type KeyValue = {
    getItem: (key: string) => Promise<string | null> | string | null;
    setItem: (key: string, value: string) => Promise<void> | void;
    removeItem: (key: string) => Promise<void> | void;
};
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
export declare class StoreTaken extends Error {
    constructor(message?: string);
}
/** A store that is forgotten with the process. @implements {Store} */
export declare class MemoryStore implements Store {
    #private;
    load(): Promise<Map<string, string>>;
    /** @param {Map<string, string|null>} changes */
    write(changes: Map<string, string | null>): Promise<void>;
}
/**
 * A store on any storage of keys and texts, such as React Native's `AsyncStorage`. A storage of that kind keeps
 * one entry at a time, so the changes are first written together, as a journal, and then each to its place;
 * what a crash has left in the journal is done by the next `load`.
 * @implements {Store}
 */
export declare class KeyValueStore implements Store {
    #private;
    /** @param {KeyValue} storage @param {string} [prefix] of all keys that it uses */
    constructor(storage: KeyValue, prefix?: string);
    load(): Promise<Map<any, any>>;
    /** @param {Map<string, string|null>} changes */
    write(changes: Map<string, string | null>): Promise<void>;
}
/**
 * A store in a browser's IndexedDB. The page that has opened it last has it: writes of an earlier one fail with
 * `StoreTaken`, so that two tabs never go on with one queue.
 * @implements {Store}
 */
export declare class IndexedDbStore implements Store {
    #private;
    /** @param {string} [name] of the database */
    constructor(name?: string);
    load(): Promise<any>;
    /** @param {Map<string, string|null>} changes @returns {Promise<void>} */
    write(changes: Map<string, string | null>): Promise<void>;
    close(): Promise<void>;
}
/** Carry changes out on entries.
 * @param {Map<string, string>} items @param {Map<string, string|null>} changes */
export declare function apply(items: Map<string, string>, changes: Map<string, string | null>): void;
