/** Ids, and the short hash that tells accounts apart. */
/** Ids rise in both parts, whatever the clock does.
 * @param {string|null|undefined} last @param {number} now */
export declare function nextId(last: string | null | undefined, now: number): string;
/** The order in which ids were minted. @param {string} a @param {string} b */
export declare function byCounter(a: string, b: string): number;
/** 53 bits of a token: enough to tell accounts apart, too little to be one. @param {string} text */
export declare function hash(text: string): string;
