/**
 * Media: a file from a device, in chunks, resumed after a break and checked by its hash.
 *
 * The laws. Reading a chunk changes nothing, so it may be asked for any number of times. A download is finished
 * only when its SHA-256 is right. A device, hub or network that is away is waited for; a download gives up
 * after two minutes without anything new.
 */
/** The device does not give what was asked for, or not whole. */
export declare class MediaError extends Error {
    /** @param {string} message */
    constructor(message: string);
}
export type DownloadOptions = {
    /**
     * the chunks that an earlier call had got: it goes on behind them. The call
     * itself adds to it, so that the next one can go on where this one has failed
     */
    parts?: Uint8Array[];
    /**
     * hears how many chunks there are
     */
    progress?: (done: number, all: number) => void;
};
/** @typedef {object} DownloadOptions
 * @property {Uint8Array[]} [parts] the chunks that an earlier call had got: it goes on behind them. The call
 *   itself adds to it, so that the next one can go on where this one has failed
 * @property {(done: number, all: number) => void} [progress] hears how many chunks there are
 */
/** Fetch a file from a device. @param {import("./app.js").App} app @param {string} device @param {string} name
 * @param {DownloadOptions} [options] @returns {Promise<Uint8Array>} */
export declare function download(app: import("./app.js").App, device: string, name: string, { parts, progress }?: DownloadOptions): Promise<Uint8Array>;
