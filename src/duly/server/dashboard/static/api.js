// Talks to the hub: questions, actions, and one WebSocket for everything that changes.

export class Problem extends Error {
  constructor(status, word, detail) {
    super(detail);
    this.status = status;
    this.word = word;
  }
}

export const session = { name: "", role: "", csrf: "", hub: "", expires: 0 };
const listeners = { ended: new Set(), changed: new Set(), link: new Set() };

/** Calls back when the session has ended ("ended") or is another one ("changed"), or the hub is reachable again or not ("link"). */
export function on(event, callback) {
  listeners[event].add(callback);
  return () => listeners[event].delete(callback);
}

function tell(event, what) {
  for (const callback of listeners[event]) callback(what);
}

async function ask(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, { credentials: "same-origin", cache: "no-store", ...options });
  } catch {
    throw new Problem(0, "unreachable", "");
  }
  let body = null;
  try { body = await answer.json(); } catch { /* not JSON */ }
  if (answer.ok) return body;
  if (answer.status === 401 && !path.startsWith("/page/login") && session.name) {
    session.name = "";
    tell("ended");
  }
  throw new Problem(answer.status, body?.error ?? "", body?.detail ?? `HTTP ${answer.status}`);
}

export const queryOf = (query) => new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "" && value !== undefined && value !== null)).toString();

export const get = (view, query = {}) => ask(`/${view}.json?${queryOf(query)}`);

export async function act(action, body) {
  try {
    const done = await ask(`/page/do/${action}`, { method: "POST", headers: { "Content-Type": "application/json", "X-CSRF-Token": session.csrf }, body: JSON.stringify(body) });
    askAgain();
    return done;
  } catch (problem) {
    if (problem.status === 403) await checkSession();
    throw problem;
  }
}

export async function refreshSession() {
  Object.assign(session, await ask("/page/session"));
  return session;
}

/** Looks whether the session is still that of this page: another tab may have logged in, and the cookie is the browser's. */
export async function checkSession() {
  const { csrf } = session;
  if (!session.name) return;
  try { await refreshSession(); } catch { return; } // one that has ended tells so itself
  if (session.csrf !== csrf) tell("changed");
}

export async function logIn(body) {
  await ask("/page/login", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  session.name = ""; // who was logged in before is not any more; the hub is asked who is
}

export async function logOut() {
  await ask("/page/logout", { method: "POST", headers: { "X-CSRF-Token": session.csrf } });
  session.name = "";
  closeLive();
}

export const may = (role) => ["viewer", "operator", "admin"].indexOf(session.role) >= ["viewer", "operator", "admin"].indexOf(role);

/** A UUID of version 7: unique, and it tells its own age. Minted once for each form. */
export function mint() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  let ms = Date.now();
  for (let i = 5; i >= 0; i -= 1) { bytes[i] = ms % 256; ms = Math.floor(ms / 256); }
  bytes[6] = (bytes[6] & 0x0f) | 0x70;
  bytes[8] = (bytes[8] & 0x3f) | 0x80;
  const hex = [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  return `${hex.slice(0, 8)}-${hex.slice(8, 12)}-${hex.slice(12, 16)}-${hex.slice(16, 20)}-${hex.slice(20)}`;
}

// ── live ─────────────────────────────────────────────────────────────────────────────────────────

let socket = null;
let tries = 0;
let timer = null;
let ids = 0;
const watched = new Map();
const SESSION_ENDED = 4401;
const TOO_MANY = 1013;

/** Shows a view as it changes: calls back now, and again with every change, until the returned function is called. */
export function watch(view, query, callback) {
  const id = (ids += 1);
  const wanted = { id, view, query: Object.fromEntries(Object.entries(query).filter(([, value]) => value !== "" && value !== undefined && value !== null).map(([name, value]) => [name, String(value)])) };
  watched.set(id, { wanted, callback });
  if (socket?.readyState === WebSocket.OPEN) socket.send(JSON.stringify(wanted));
  else connect();
  return () => {
    watched.delete(id);
    if (socket?.readyState === WebSocket.OPEN) socket.send(JSON.stringify({ id }));
  };
}

/** Asks for everything that is shown once more: a busy hub sends a view now and then, and who has done something looks for it at once. */
function askAgain() {
  if (socket?.readyState !== WebSocket.OPEN) return;
  for (const { wanted } of watched.values()) socket.send(JSON.stringify(wanted));
}

function connect() {
  if (socket || timer || !session.name) return;
  const scheme = location.protocol === "https:" ? "wss" : "ws";
  const mine = (socket = new WebSocket(`${scheme}://${location.host}/page/live`));
  mine.onopen = () => {
    if (!watched.size) tell("link", true); // else the first answer tells it: a hub with too many pages closes this one at once
    askAgain();
  };
  mine.onmessage = ({ data }) => {
    tries = 0;
    tell("link", true);
    const { id, is } = JSON.parse(data);
    watched.get(id)?.callback(is);
  };
  mine.onclose = ({ code }) => {
    if (socket !== mine) return;
    socket = null;
    if (code === SESSION_ENDED) {
      session.name = "";
      tell("ended");
      return;
    }
    if (!watched.size || !session.name) return;
    tell("link", code === TOO_MANY ? "full" : false);
    retry();
  };
}

/** Comes back by itself: soon at first, then every few seconds, at once when the browser is online again. */
function retry() {
  clearTimeout(timer);
  timer = setTimeout(async () => {
    timer = null;
    try {
      await refreshSession(); // tells a session that has ended from a hub that is away
    } catch (problem) {
      if (problem.status !== 401) retry();
      return;
    }
    connect();
  }, Math.min(250 * 2 ** tries, 4000));
  tries += 1;
}

addEventListener("online", () => { if (!socket && session.name && watched.size) { tries = 0; clearTimeout(timer); timer = null; retry(); } });

export function closeLive() {
  const old = socket;
  socket = null;
  clearTimeout(timer);
  timer = null;
  watched.clear();
  old?.close();
}
