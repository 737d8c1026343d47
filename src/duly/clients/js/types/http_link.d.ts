/** A sentinel's way to its tower over plain HTTP, for networks that let no WebSocket through. */
/**
 * Carries frames in batches by POST, with the same calls as `Link`. One request is under way at a time, so frames
 * arrive in order. HTTP has no connection: the link is up while requests are answered; after one that is not, an
 * empty batch asks, with back-off, whether the tower answers again.
 */
export declare class HttpLink {
    #private;
    /** @param {string} url @param {string} token
     * @param {{welcome: (frame: any) => void, unwelcome: (frame: any) => void, hear: (frame: any) => void,
     *   down: (reason: string) => void}} client */
    constructor(url: string, token: string, client: {
        welcome: (frame: any) => void;
        unwelcome: (frame: any) => void;
        hear: (frame: any) => void;
        down: (reason: string) => void;
    });
    get up(): boolean;
    /** @param {any} frame */
    send(frame: any): void;
    /** Whether the connection was given up: never, since each request has a deadline. */
    dead(): boolean;
    close(): void;
}
