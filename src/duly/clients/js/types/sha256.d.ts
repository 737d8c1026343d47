/** SHA-256, since browsers have their own only on pages that came by https, and React Native has none. */
/** A hash that grows with what is added to it. */
export declare class Sha256 {
    #private;
    /** @param {Uint8Array} bytes */
    add(bytes: Uint8Array): this;
    /** The hash of everything, in hexadecimal digits. Nothing can be added afterwards. */
    hex(): string;
}
/** The hash of a text, in hexadecimal digits. @param {string} text */
export declare function sha256(text: string): string;
