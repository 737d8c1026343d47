/**
 * The fields of a signal: what a program hands to its sentinel is checked here, before it is stored.
 *
 * The law: what the tower would refuse is refused at once, where its cause can be seen.
 */
/** The name of a reason, a device or a profile, if it is one. @param {string} field @param {string} value */
export declare function nameOf(field: string, value: string): string;
/** A severity, if it is one. @param {string} value @returns {import("./policy.js").Severity} */
export declare function severityOf(value: string): import("./policy.js").Severity;
/** A copy of what goes along, as it will be on the wire. A name that was cut in the middle of an emoji would be
 * refused there, and the alert with it: half a character becomes a �.
 * @param {string} field @param {any} value */
export declare function fieldOf(field: string, value: any): any;
