/**
 * duly for browsers: send a command to a device, and know how it ended; and chat. One file, no dependencies.
 *
 * The laws. A command keeps its id: it is sent again every three seconds, three times, and at once after a
 * reconnect, and the hub makes that harmless. It ends, one way or another: what was sent and never answered
 * is `unknown`, what never left us is `expired`. What we call `unknown` is asked for at every connection: what
 * the hub has taken is sent again; of what it never confirmed we ask the `outcome`, which runs nothing, since a
 * repeat might run it long after its time. Ids
 * never go backwards, in no tab and after no reload. What devices tell arrives once and in order, also what
 * was missed while away; where that is gone, `gap` says so.
 *
 *     import { App } from "http://127.0.0.1:7800/duly.js";
 *     const app = new App("http://127.0.0.1:7800", token);
 *     const { state, code, data } = await app.send("lock-1", "lock_control", { open: true });
 */
import { Client } from "./client.js";
import { Refused } from "./errors.js";
export { Closed, Refused } from "./errors.js";
export { MediaError } from "./media.js";
export type Ack = {
    state: "done" | "failed" | "expired" | "superseded" | "cancelled" | "unknown";
    /**
     * 0 done, or what went wrong
     */
    code: number;
    data?: any;
    /**
     * a sentence
     */
    detail?: string;
    /**
     * what the device's ack carried beside that
     */
    fields?: Record<string, any>;
};
export type SendOptions = {
    /**
     * send under this id again, instead of a new one
     */
    id?: string;
    /**
     * seconds after which it must not take effect
     */
    expires?: number;
    /**
     * keep it for a device that is away
     */
    queue?: boolean;
    /**
     * the lane in which a sender's commands keep their order
     */
    order?: string;
    /**
     * in that lane only the newest counts
     */
    latest?: boolean;
    /**
     * seconds that the device may take, instead of the hub's patience
     */
    timeout?: number;
    /**
     * hears how far a device is that says so
     */
    progress?: (progress: any) => void;
    /**
     * stand beside `data`, for devices that look for their own there
     */
    fields?: Record<string, any>;
};
export type Push = {
    device: string;
    type: string;
    data: any;
    cursor: number;
    time?: number;
    fields?: Record<string, any>;
};
export type Gap = {
    device: string;
    after: number;
    first: number;
};
export type End = {
    id: string;
    device: string;
    type: string;
    ack?: Ack;
    refused?: Refused;
};
export type Events = {
    push: Push;
    gap: Gap;
    end: End;
    up: string;
    down: string;
    denied: Refused;
};
/**
 * An app's side of the wire. It tells of every "push", "gap" and "end".
 * @extends {Client<Events>}
 */
export declare class App extends Client<Events> {
    #private;
    /** Our devices that are online, as far as the hub has told. @type {Set<string>} */
    online: Set<string>;
    /**
     * @param {string} url the hub, such as "http://127.0.0.1:7800"; several with commas between
     * @param {string} token
     * @param {object} [options]
     * @param {boolean} [options.keep] commands under way survive a reload of the page, and are resumed
     * @param {import("./kept.js").SyncStorage|null} [options.storage] where ids, cursors and commands are kept, if not
     *   in the browser's own stores; null: nowhere
     * @param {new (url: string) => WebSocket} [options.socket] a WebSocket, where there is none, as in Node 20
     */
    constructor(url: string, token: string, { keep, storage, socket }?: {
        keep?: boolean;
        storage?: import("./kept.js").SyncStorage | null;
        socket?: new (url: string) => WebSocket;
    });
    /** Send a command and wait for its end. Rejects with `Refused` if the hub does not take it.
     * @param {string} device @param {string} type @param {any} [data] @param {SendOptions} [options]
     * @returns {Promise<Ack>} */
    send(device: string, type: string, data?: any, options?: SendOptions): Promise<Ack>;
    /** Send a command without waiting for its end.
     * @param {string} device @param {string} type @param {any} [data] @param {SendOptions} [options]
     * @returns {Promise<{id: string, accepted: Promise<void>, ended: Promise<Ack>}>} */
    post(device: string, type: string, data?: any, { id, expires, queue, order, latest, timeout, progress, fields }?: SendOptions): Promise<{
        id: string;
        accepted: Promise<void>;
        ended: Promise<Ack>;
    }>;
    /** Fetch a file from a device, checked by its hash.
     * @param {string} device @param {string} name @param {import("./media.js").DownloadOptions} [options]
     * @returns {Promise<Uint8Array>} */
    download(device: string, name: string, options?: import("./media.js").DownloadOptions): Promise<Uint8Array>;
    /** What a page before this one had under way. What was never answered in its time is not sent again. */
    _resume(): void;
    /** Commands under way reject with `Closed`; kept ones are resumed by the next page. @param {Error} problem */
    _abandon(problem: Error): void;
    _positions(): Record<string, number>;
    /** @param {any} frame */
    _catchUp(frame: any): void;
    _sendAgain(): void;
    /** @param {any} frame */
    _hear(frame: any): void;
}
