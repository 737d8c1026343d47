/**
 * When an unsent event happened, by the tower's clock. Times in microseconds.
 *
 * The laws. A clock without a battery starts in 1970 and is set later; the steady clock of one run tells by how
 * much, so an event of this run is always dated right. Of an event that an earlier run has made only the
 * wall clocks are known: its time is believed if it fits, and otherwise the event says itself that it is
 * undated. No event is dropped because of a time that may be wrong: it expires only by one that was measured.
 */
/** The data of an event of this run, with the offset of its own time to the tower's clock; `steps` is by how
 * much our clock was set since, `offset` how far the tower's is ahead of it now.
 * @param {any} data @param {number} steps @param {number} offset */
export declare function dated(data: any, steps: number, offset: number): any;
/** The data of an event of an earlier run as it is told: with its time if that can be believed, else undated;
 * null: it was made more than `keep` ago by the tower's clock, and is no longer told.
 * @param {any} data @param {number} offset @param {number} now @param {number} keep */
export declare function datedAgain(data: any, offset: number, now: number, keep: number): any;
