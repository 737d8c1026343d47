/** What `App` and `Chat` keep over a reload: ids, positions, what is under way. */
export type SyncStorage = Pick<Storage, "length" | "key" | "getItem" | "setItem" | "removeItem">;
/** What a client needs of a storage: `localStorage` is one, `FileStorage` of `duly/node` another.
 * @typedef {Pick<Storage, "length"|"key"|"getItem"|"setItem"|"removeItem">} SyncStorage */
/** What survives a reload, of one account: another account's is not ours. */
export declare class Kept {
    #private;
    /** @param {string} token @param {SyncStorage|null|undefined} storage */
    constructor(token: string, storage: SyncStorage | null | undefined);
    /** A new id. @param {number} now @returns {Promise<string>} */
    mint(now: number): Promise<string>;
    /** @param {string} key */
    get(key: string): string | null;
    /** @param {string} key @param {string} value */
    set(key: string, value: string): void;
    /** @param {string} key */
    forget(key: string): void;
    /** What is kept under a prefix. @param {string} prefix */
    keys(prefix: string): string[];
}
