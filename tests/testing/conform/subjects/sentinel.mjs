// A sentinel that reports an event every 0.3 s, by the JavaScript package: PACKAGE URL TOKEN STORE.
import { pathToFileURL } from "node:url";

const [folder, url, token, store] = process.argv.slice(2);
const load = (name) => import(pathToFileURL(`${folder}/src/${name}.js`).href);
const [{ Sentinel }, { FileStorage }] = [await load("sentinel"), await load("node")];

const sentinel = new Sentinel(url.replace(/^ws/, "http"), token, {
  store: new FileStorage(`${store}/sentinel.log`),
  profile: "home",
  policy: { countdown: 0 },
});
const run = Date.now();
let n = 0;
setInterval(() => {
  sentinel.trigger("conform", `${run}-${n}`);
  sentinel.trigger("repeated", `${run}-same`);
  sentinel.trigger(`busy-${n++}`, `${run}-busy`);
}, 300);
