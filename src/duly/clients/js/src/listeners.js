/** Listeners of events: what the clients tell. */

/**
 * Tells listeners of events. What has an underscore is for the classes that extend this one.
 * @template {Record<string, any>} Told the events by name, with what is told of each
 */
export class Listeners {
  /** @type {Map<string, Set<(what: any) => void>>} */
  #listeners;

  /** @param {string[]} events */
  constructor(events) {
    this.#listeners = new Map(events.map((event) => [event, new Set()]));
  }

  /**
   * Call `listener` for every event of this kind.
   * @template {keyof Told} E
   * @param {E & string} event
   * @param {(what: Told[E]) => void} listener
   * @returns {() => void} stops it
   */
  on(event, listener) {
    const listeners = this.#listeners.get(event);
    if (!listeners) throw new TypeError(`there is no event ${event}`);
    listeners.add(listener);
    return () => void listeners.delete(listener);
  }

  /** @template {keyof Told} E @param {E & string} event @param {Told[E]} what */
  _emit(event, what) {
    for (const listener of this.#listeners.get(event) ?? []) {
      try {
        listener(what);
      } catch (problem) {
        setTimeout(() => { throw problem; }); // the page's own mistake must not stop us, nor be hidden
      }
    }
  }
}
