/** For Node: a file that keeps what must survive the process. */
export type Store = import("./stores.js").Store;
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
export declare class FileStorage implements Store {
    #private;
    /** @param {string} path */
    constructor(path: string);
    load(): Promise<Map<string, string>>;
    /** @param {Map<string, string|null>} changes */
    write(changes: Map<string, string | null>): Promise<void>;
    close(): Promise<void>;
    get length(): number;
    /** @param {number} i */
    key(i: number): string;
    /** @param {string} key */
    getItem(key: string): string | null;
    /** @param {string} key @param {string} value */
    setItem(key: string, value: string): void;
    /** @param {string} key */
    removeItem(key: string): void;
}
