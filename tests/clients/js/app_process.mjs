// An app in Node that sends its commands one after the other, keeps them in a file, and resumes what an earlier
// process had under way. Every end is printed.
import { App } from "../../../src/duly/clients/js/src/app.js";
import { FileStorage } from "../../../src/duly/clients/js/src/node.js";

const { url, token, file, commands } = JSON.parse(process.argv[2]);
const storage = new FileStorage(file);
const app = new App(url, token, { keep: true, storage });
app.on("end", ({ id, ack, refused }) => process.stdout.write(`${JSON.stringify({ id, ack, refused })}\n`));
await app.ready;
const sent = [];
for (let n = 0; n < commands; n++) sent.push(await app.post("lock", "lock_control", { n }, { queue: true }));
await Promise.all(sent.map(({ accepted }) => accepted));
process.stdout.write("accepted\n");
while ([...Array(storage.length).keys()].some((i) => storage.key(i).includes(":command:"))) {
  await new Promise((resolve) => setTimeout(resolve, 20));
}
app.close();
await storage.close();
