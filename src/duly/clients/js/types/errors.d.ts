/** Why a promise of a client fails. */
/** The hub did not take the command: nothing was done. `code` and `error` (a word) say why. */
export declare class Refused extends Error {
    code: number;
    error: string;
    detail: string;
    /** @param {number} code @param {string} error @param {string} detail */
    constructor(code: number, error: string, detail: string);
}
/** The client was closed before something ended. */
export declare class Closed extends Error {
    /** @param {string} [message] */
    constructor(message?: string);
}
