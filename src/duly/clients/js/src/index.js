/** duly for JavaScript: what a browser, Node and React Native use. In Node, `node.js` adds files. */

export { Alert } from "./alerts.js";
export { App } from "./app.js";
export { Chat } from "./chat.js";
export { Closed, Refused } from "./errors.js";
export { MediaError } from "./media.js";
export { Sentinel } from "./sentinel.js";
export { IndexedDbStore, KeyValueStore, MemoryStore, StoreTaken } from "./stores.js";
