/** What `App` and `Chat` share. */
import { Listeners } from "./listeners.js";
/** The cursor that is no stream's: the hub's ledger, which a restore from a backup begins anew. It is kept and sent
 * back like the others. */
export declare const GENERATION = "";
/** The streams that a hub which was restored from a backup does not name any more.
 * @param {Record<string, number>} own @param {Record<string, number>} [told] the cursors of its welcome */
export declare function forgotten(own: Record<string, number>, told?: Record<string, number>): string[];
/**
 * What `App` and `Chat` share: the link to the hub, what is told to listeners, how it begins and how it ends.
 * What has an underscore is between this class and those two.
 * Every client tells when the connection is "up" (our name) or "down" (why), or "denied": the hub no longer
 * knows our token (it is tried again, ever more slowly).
 * @template {Record<string, any>} Told
 * @extends {Listeners<Told>}
 */
export declare class Client<Told extends Record<string, any>> extends Listeners<Told> {
    #private;
    /** Our account's name, once the hub has told it. */
    name: string;
    /** Resolves at the first welcome, rejects with `Refused` if the hub does not know the token.
     * @type {Promise<void>} */
    ready: Promise<void>;
    /** @type {Error|null} why nothing is sent any more */
    _closed: Error | null;
    /** @param {string} url @param {string} token @param {any} socket @param {string[]} events */
    constructor(url: string, token: string, socket: any, events: string[]);
    get connected(): boolean;
    /** End. What is under way rejects with `Closed`; what was kept is resumed by the next page. */
    close(): void;
    /** @param {any} frame @param {boolean} [answered] something comes back for it */
    _send(frame: any, answered?: boolean): void;
    /** Whether the connection was given up, since the hub was silent. */
    _dead(): boolean;
    /** The hub's time in ms, by what the last welcome said. */
    _now(): number;
    /** Resolves when the hub's time is known: after the first welcome, and if our clock was set or we have slept
     * since the last one, after another, for which we connect anew. An id with a wrong time would be refused, and
     * so would all after it, since ids never go back. @returns {Promise<void>} */
    _timed(): Promise<void>;
    /** When something expires that was asked for at this time of the steady clock, by the hub's time.
     * @param {number} asked @param {number} seconds */
    _expiry(asked: number, seconds: number): number;
    /** How far we have come in each stream, as the hub is told when we connect. @returns {any} */
    _positions(): any;
    /** Take what the welcome says of those streams. @param {any} _frame */
    _catchUp(_frame: any): void;
    /** Go on with what an earlier page has left, once. */
    _resume(): void;
    /** Send again what is under way, at every connection. */
    _sendAgain(): void;
    /** @param {any} _frame */
    _hear(_frame: any): void;
    /** Fail what is under way: it is over. @param {Error} _problem */
    _abandon(_problem: Error): void;
}
