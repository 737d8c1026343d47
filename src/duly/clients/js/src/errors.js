/** Why a promise of a client fails. */

/** The hub did not take the command: nothing was done. `code` and `error` (a word) say why. */
export class Refused extends Error {
  /** @param {number} code @param {string} error @param {string} detail */
  constructor(code, error, detail) {
    super(`${detail || error} (code ${code})`);
    this.name = "Refused";
    this.code = code;
    this.error = error;
    this.detail = detail;
  }
}

/** The client was closed before something ended. */
export class Closed extends Error {
  /** @param {string} [message] */
  constructor(message = "the app was closed before the command ended") {
    super(message);
    this.name = "Closed";
  }
}
