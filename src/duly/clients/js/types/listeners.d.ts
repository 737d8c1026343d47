/** Listeners of events: what the clients tell. */
/**
 * Tells listeners of events. What has an underscore is for the classes that extend this one.
 * @template {Record<string, any>} Told the events by name, with what is told of each
 */
export declare class Listeners<Told extends Record<string, any>> {
    #private;
    /** @param {string[]} events */
    constructor(events: string[]);
    /**
     * Call `listener` for every event of this kind.
     * @template {keyof Told} E
     * @param {E & string} event
     * @param {(what: Told[E]) => void} listener
     * @returns {() => void} stops it
     */
    on<E extends keyof Told>(event: E & string, listener: (what: Told[E]) => void): () => void;
    /** @template {keyof Told} E @param {E & string} event @param {Told[E]} what */
    _emit<E extends keyof Told>(event: E & string, what: Told[E]): void;
}
