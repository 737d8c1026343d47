/**
 * When an unsent event happened, by the tower's clock. Times in microseconds.
 *
 * The laws. A clock without a battery starts in 1970 and is set later; the steady clock of one run tells by how
 * much, so an event of this run is always dated right. Of an event that an earlier run has made only the
 * wall clocks are known: its time is believed if it fits, and otherwise the event says itself that it is
 * undated. No event is dropped because of a time that may be wrong: it expires only by one that was measured.
 */

const MILLISECOND = 1_000;
/** 2020: a clock that shows an earlier time runs from its maker's date, and was never set. */
const OLDEST = 1_577_836_800_000_000;
/** How far ahead of the tower's clock a time may be that is believed. */
const AHEAD = 300_000_000;
/** An offset that was measured before is corrected by a later one only if they differ this much. */
const DIFFERS = 60_000_000;

/** The data of an event of this run, with the offset of its own time to the tower's clock; `steps` is by how
 * much our clock was set since, `offset` how far the tower's is ahead of it now.
 * @param {any} data @param {number} steps @param {number} offset */
export function dated(data, steps, offset) {
  const own = offset + steps;
  const known = data.offset_ms;
  if (known !== undefined && Math.abs(known * MILLISECOND - own) < DIFFERS) return data;
  return { ...data, offset_ms: Math.floor(own / MILLISECOND) };
}

/** The data of an event of an earlier run as it is told: with its time if that can be believed, else undated;
 * null: it was made more than `keep` ago by the tower's clock, and is no longer told.
 * @param {any} data @param {number} offset @param {number} now @param {number} keep */
export function datedAgain(data, offset, now, keep) {
  if (data.undated) return data;
  const at = data.timestamp * MILLISECOND;
  const tower = now + offset;
  if (data.offset_ms !== undefined) {
    const happened = at + data.offset_ms * MILLISECOND;
    if (OLDEST <= happened && happened <= tower + AHEAD) return happened + keep <= tower ? null : data;
  } else if (at >= OLDEST) {
    // A clock that is wrong by as much all the time, or one that was right.
    for (const by of [offset, 0]) {
      if (tower - keep < at + by && at + by <= tower + AHEAD) {
        return { ...data, offset_ms: Math.floor(by / MILLISECOND) };
      }
    }
  }
  return { ...data, undated: true };
}
