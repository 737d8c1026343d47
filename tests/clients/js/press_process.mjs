// An app in Node that presses a button so many times, four at once, and writes down how each press ended. Its ids are
// given: a press that has no end in the file is sent again, under its id, by the next process.
import { closeSync, existsSync, fsyncSync, openSync, readFileSync, writeSync } from "node:fs";
import { App } from "../../../src/duly/clients/js/src/app.js";

const { url, token, file, first, presses } = JSON.parse(process.argv[2]);
const known = existsSync(file) ? readFileSync(file, "utf8").split("\n").filter(Boolean) : [];
const ended = new Set(known.map((line) => JSON.parse(line).id));
const left = [...Array(presses).keys()].filter((n) => !ended.has(`${first}_${n}`));
const app = new App(url, token, { storage: null });

async function press() {
  for (let n = left.shift(); n !== undefined; n = left.shift()) {
    const id = `${first}_${n}`;
    const { state } = await app.send("lock", "lock_control", { open: n % 2 === 0 }, { id, queue: true });
    const out = openSync(file, "a");
    writeSync(out, `${JSON.stringify({ id, state })}\n`);
    fsyncSync(out);
    closeSync(out);
  }
}

await app.ready;
await Promise.all([press(), press(), press(), press()]);
app.close();
