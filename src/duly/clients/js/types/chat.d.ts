/** Chat: a person's side of the wire. */
import { Client } from "./client.js";
import { Refused } from "./errors.js";
export { Closed, Refused } from "./errors.js";
export type Line = {
    conv: string;
    n: number;
    type: string;
    sender: string;
    data: any;
    time: number;
    id: string;
    edited: boolean;
};
export type Sent = {
    conv: string;
    n: number;
    data?: any;
};
export type ChatEvents = {
    line: Line;
    receipt: {
        conv: string;
        n: number;
        reader: string;
        state: string;
    };
    typing: {
        conv: string;
        sender: string;
    };
    presence: {
        sender: string;
        data: any;
    };
    up: string;
    down: string;
    denied: Refused;
};
/** Something in a conversation: `one_chat`, `group_chat`, `edit`, `delete`, `group_join` …
 * @typedef {{conv: string, n: number, type: string, sender: string, data: any, time: number, id: string,
 *   edited: boolean}} Line */
/** @typedef {{conv: string, n: number, data?: any}} Sent */
/** @typedef {{line: Line, receipt: {conv: string, n: number, reader: string, state: string},
 *   typing: {conv: string, sender: string}, presence: {sender: string, data: any}, up: string,
 *   down: string, denied: Refused}} ChatEvents */
/**
 * A person's side of the wire.
 *
 * The laws. What is said is kept before it is sent, and sent again with the same id until the hub has taken or
 * refused it, also after a reload. What is said to one person or group goes out one line after the other, so
 * it arrives in the order it was said. What others say arrives once and in order, also what was missed; a line
 * is acknowledged when its listeners have had it. It tells of every "line", "receipt", "typing" and "presence".
 *
 *     const token = await Chat.logIn("http://127.0.0.1:7800", "ann", password);
 *     const chat = new Chat("http://127.0.0.1:7800", token);
 *     chat.on("line", ({ sender, data }) => show(sender, data.text));
 *     const { conv, n } = await chat.send("bob", "hello");
 * @extends {Client<ChatEvents>}
 */
export declare class Chat extends Client<ChatEvents> {
    #private;
    /** Create an account, at a hub with open registration.
     * @param {string} url @param {string} name @param {string} password */
    static register(url: string, name: string, password: string): Promise<void>;
    /** A token of your own for this device.
     * @param {string} url @param {string} name @param {string} password @param {string} [device]
     * @returns {Promise<string>} */
    static logIn(url: string, name: string, password: string, device?: string): Promise<string>;
    /** @param {string} url the hub; several with commas between @param {string} token
     * @param {{storage?: import("./kept.js").SyncStorage|null, socket?: any}} [options] as for `App` */
    constructor(url: string, token: string, { storage, socket }?: {
        storage?: import("./kept.js").SyncStorage | null;
        socket?: any;
    });
    /** Say something to a person or a group ("#…"). Text goes as `{text}`, anything else as it is.
     * @param {string} to @param {any} what @param {{expires?: number}} [options] seconds
     * @returns {Promise<Sent>} its conversation and number, once it is stored; rejects with `Refused` */
    send(to: string, what: any, { expires }?: {
        expires?: number;
    }): Promise<Sent>;
    /** @param {string} conv @param {number} n @param {any} what */
    edit(conv: string, n: number, what: any): Promise<Sent>;
    /** @param {string} conv @param {number} n */
    delete(conv: string, n: number): Promise<Sent>;
    /** @param {string} name @param {string[]} members
     * @param {{history?: "all"|"joined", open?: boolean}} [options] @returns {Promise<string>} its id */
    createGroup(name: string, members?: string[], { history, open }?: {
        history?: "all" | "joined";
        open?: boolean;
    }): Promise<string>;
    /** @param {string} group @param {string} user */
    invite(group: string, user: string): Promise<Sent>;
    /** @param {string} group */
    join(group: string): Promise<Sent>;
    /** @param {string} group */
    leave(group: string): Promise<Sent>;
    /** @param {string} group @param {string} user */
    remove(group: string, user: string): Promise<Sent>;
    /** @param {string} group @param {string} user @param {string} role */
    setRole(group: string, user: string, role: string): Promise<Sent>;
    /** @param {string} user */
    askFriend(user: string): Promise<Sent>;
    /** @param {string} user */
    acceptFriend(user: string): Promise<Sent>;
    /** @param {string} user */
    removeFriend(user: string): Promise<Sent>;
    /** @param {string} user */
    block(user: string): Promise<Sent>;
    /** @param {string} user */
    unblock(user: string): Promise<Sent>;
    /** Say that everything up to `n` was read. @param {string} conv @param {number} n */
    read(conv: string, n: number): void;
    /** @param {string} conv */
    typing(conv: string): void;
    /** Lines before a number (or the newest), oldest first.
     * @param {string} conv @param {{before?: number, limit?: number}} [options] @returns {Promise<Line[]>} */
    history(conv: string, { before, limit }?: {
        before?: number;
        limit?: number;
    }): Promise<Line[]>;
    /** How far a line has come: delivered to k of n, read by m of n. @param {string} conv @param {number} n */
    receipts(conv: string, n: number): Promise<any>;
    conversations(): Promise<any[]>;
    /** @param {string} group */
    group(group: string): Promise<any>;
    friends(): Promise<any>;
    _positions(): Record<string, number>;
    /** @param {any} frame */
    _catchUp(frame: any): void;
    _sendAgain(): void;
    /** What a page before this one had not got through goes before anything new. */
    _resume(): void;
    /** @param {any} frame */
    _hear(frame: any): void;
    /** What is under way is sent by the next page. @param {Error} problem */
    _abandon(problem: Error): void;
}
