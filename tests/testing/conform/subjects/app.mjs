// An app that tells how its commands end, by duly.js: LIBRARY URL TOKEN STORE.
import { existsSync, readFileSync, writeFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [library, url, token, store] = process.argv.slice(2);
const { App, Refused } = await import(pathToFileURL(library).href);

/** What a browser keeps over a reload, in a file. */
class FileStore {
  #file = `${store}/app.json`;
  #items = new Map(existsSync(this.#file) ? JSON.parse(readFileSync(this.#file, "utf8")) : []);
  get length() {
    return this.#items.size;
  }
  key(i) {
    return [...this.#items.keys()][i] ?? null;
  }
  getItem(key) {
    return this.#items.get(key) ?? null;
  }
  setItem(key, value) {
    this.#items.set(key, value);
    this.#save();
  }
  removeItem(key) {
    this.#items.delete(key);
    this.#save();
  }
  #save() {
    writeFileSync(this.#file, JSON.stringify([...this.#items]));
  }
}

const app = new App(url.replace(/^ws/, "http"), token, { storage: new FileStore() });
let ended = null;
for (;;) {
  const command = await app.post("lock", "conform", { ended });
  try {
    const { state, code } = await command.ended;
    ended = { id: command.id, state, code };
  } catch (problem) {
    if (!(problem instanceof Refused)) throw problem;
    ended = { id: command.id, state: "refused", code: problem.code };
  }
}
