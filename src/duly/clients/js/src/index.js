/** duly for JavaScript: what a browser, Node and React Native use. In Node, `node.js` adds files. */

export { App } from "./app.js";
export { Chat } from "./chat.js";
export { Closed, Refused } from "./errors.js";
