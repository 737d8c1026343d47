/** The connection to the hub, and what goes beside it over HTTP. */
export declare const RESEND = 3000;
/**
 * The connection of a client to its hub, made again with back-off whenever it breaks. It carries frames while
 * it can and loses them while it cannot; the client repeats what was lost. Several hubs may be named, with
 * commas between: when one no longer answers, the next is tried. Which is the first is told by the token, so
 * that they share their clients.
 */
export declare class Link {
    #private;
    /** @param {string} url @param {string} token @param {any} sockets
     * @param {{cursors: () => any, welcome: (frame: any) => void, unwelcome: (frame: any) => void,
     *   hear: (frame: any) => void, down: (reason: string) => void}} client */
    constructor(url: string, token: string, sockets: any, client: {
        cursors: () => any;
        welcome: (frame: any) => void;
        unwelcome: (frame: any) => void;
        hear: (frame: any) => void;
        down: (reason: string) => void;
    });
    get up(): boolean;
    /** @param {any} frame @param {boolean} [answered] something comes back for it */
    send(frame: any, answered?: boolean): void;
    /** Whether the connection was given up: asked twice and not heard a thing. A browser would take minutes to
     * notice. */
    dead(): boolean;
    /** Connect anew at once, to be told the hub's time. @param {string} reason */
    renew(reason: string): void;
    close(): void;
}
/** @param {string} url @param {string} path @param {any} body */
export declare function post(url: string, path: string, body: any): Promise<any>;
/** The hubs that are named, with commas between. @param {string} urls */
export declare function hubs(urls: string): string[];
