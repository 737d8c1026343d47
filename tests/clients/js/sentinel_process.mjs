// A sentinel and its monitor as a process that can be killed: by the test, or by itself at a point. It reports its
// signals, one device each, and ends when the tower has everything. What is known to be stored is in FILE.stored.
import { closeSync, existsSync, fsyncSync, openSync, readFileSync, writeSync } from "node:fs";
import { FileStorage } from "../../../src/duly/clients/js/src/node.js";
import { Sentinel } from "../../../src/duly/clients/js/src/sentinel.js";

const { url, token, file, signals, point, count, transport } = JSON.parse(process.argv[2]);
let left = count;

function fuse(name) {
  if (name === point && --left === 0) process.kill(process.pid, "SIGKILL");
}

class DeadlyStorage extends FileStorage {
  async write(changes) {
    fuse("before commit");
    await super.write(changes);
    fuse("after commit");
  }
}

class DeadlySocket extends WebSocket {
  send(text) {
    fuse("before sending");
    super.send(text);
    fuse("after sending");
  }

  set onmessage(listener) {
    this.addEventListener("message", (event) => {
      fuse("before the answer");
      listener(event);
      fuse("after the answer");
    });
  }
}

const known = existsSync(`${file}.stored`) ? readFileSync(`${file}.stored`, "utf8").split("\n").length - 1 : 0;
const book = openSync(`${file}.stored`, "a");
const sentinel = new Sentinel(url, token, {
  store: new DeadlyStorage(file), profile: "home", socket: DeadlySocket, transport,
  policy: { debounce: 3_600, countdown: 0.02, retry_first: 0.5, retry_most: 2 },
});
sentinel.on("news", (news) => process.stdout.write(`${JSON.stringify(news)}\n`));
for (let n = known; n < signals; n++) {
  await sentinel.trigger("fall", `device-${n}`).stored;
  writeSync(book, `device-${n}\n`);
  fsyncSync(book);
}
await sentinel.drained();
await sentinel.close();
closeSync(book);
