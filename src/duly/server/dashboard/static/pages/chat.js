// Chat, with the same client that other pages may use (/duly.js). A tab is one person: open two to talk.
import { h, fill } from "../dom.js";
import { t, time } from "../i18n.js";
import { field, empty, explain, toast } from "../widgets.js";

const PLACE = "duly.chat";
const narrow = () => matchMedia("(max-width: 52rem)").matches;
const stored = () => { try { return JSON.parse(sessionStorage.getItem(PLACE)); } catch { return null; } };

export default function chatPage(page) {
  const body = h("div", { class: "panel flush" });
  fill(page, h("div", { class: "page-head" }, h("div", {}, h("h1", {}, t("nav.chat")), h("p", { class: "muted" }, t("chat.about")))), body);
  let client = null;
  let gone = false;
  const start = async () => {
    const { Chat } = await import("/duly.js");
    if (gone) return;
    const who = stored();
    if (who) client = talk(body, Chat, who, () => { sessionStorage.removeItem(PLACE); start(); });
    else enter(body, Chat, (next) => { sessionStorage.setItem(PLACE, JSON.stringify(next)); start(); });
  };
  start();
  return () => { gone = true; client?.close(); };
}

function enter(body, Chat, entered) {
  const name = h("input", { autocomplete: "off", required: true, maxlength: "64", spellcheck: "false" });
  const password = h("input", { type: "password", autocomplete: "off", required: true, minlength: "8" });
  const told = h("p", { class: "notice bad", role: "alert", hidden: true });
  const run = async (register) => {
    told.hidden = true;
    try {
      if (register) await Chat.register(location.origin, name.value.trim(), password.value);
      const token = await Chat.logIn(location.origin, name.value.trim(), password.value, "dashboard");
      entered({ name: name.value.trim(), token });
    } catch (problem) {
      told.textContent = explain(problem);
      told.hidden = false;
    }
  };
  const form = h("form", { class: "form", onsubmit: (event) => { event.preventDefault(); run(event.submitter?.value === "register"); } },
    h("h2", {}, t("chat.enter")), h("p", { class: "muted" }, t("chat.enter.hint")), told, field(t("name"), name), field(t("password"), password),
    h("div", { class: "row" }, h("button", { type: "submit", class: "button primary", value: "login" }, t("log.in")), h("button", { type: "submit", class: "button", value: "register" }, t("register"))));
  fill(body, h("div", { class: "chat-enter" }, form));
  body.className = "panel";
  name.focus();
}

function talk(body, Chat, who, leave) {
  body.className = "panel flush";
  const chat = new Chat(location.origin, who.token);
  const convs = new Map(); // by conversation: its label, its lines, how far others have it
  let open = null;
  const list = h("ul");
  const title = h("h2");
  const state = h("span", { class: "muted small", role: "status" });
  const bubbles = h("div", { class: "bubbles", role: "log", "aria-label": t("chat.lines"), tabindex: "0" });
  const text = h("input", { placeholder: t("chat.say"), "aria-label": t("chat.say"), autocomplete: "off", maxlength: "4000" });
  const composer = h("form", { class: "composer", hidden: true, onsubmit: (event) => { event.preventDefault(); say(); } }, text, h("button", { type: "submit", class: "button primary" }, t("send")));
  const to = h("input", { autocomplete: "off", spellcheck: "false", required: true });
  const members = h("input", { autocomplete: "off", spellcheck: "false" });
  const fresh = h("form", { class: "chat-new", onsubmit: (event) => { event.preventDefault(); begin(); } }, field(t("chat.to"), to), field(t("chat.members"), members), h("button", { type: "submit", class: "button small" }, t("chat.begin")));
  const folded = h("details", { class: "fold chat-fold" }, h("summary", {}, t("chat.new")), fresh);
  folded.open = true;
  fill(body, h("div", { class: "chat" }, h("div", { class: "chat-list" }, h("div", { class: "thread-head" }, h("strong", {}, who.name), h("button", { type: "button", class: "button small plain", onclick: () => { chat.close(); leave(); } }, t("chat.leave"))), list, folded),
    h("div", { class: "thread" }, h("div", { class: "thread-head" }, title, state), bubbles, composer)));

  const conv = (id, label) => {
    if (!convs.has(id)) convs.set(id, { id, label: label ?? id, to: label, lines: new Map(), reached: new Map(), unread: 0, loaded: false });
    const found = convs.get(id);
    if (label) { found.label = label; found.to = label; }
    return found;
  };

  function showList() {
    fill(list, [...convs.values()].map((one) => h("li", {}, h("button", { type: "button", "aria-current": open === one ? "true" : null, onclick: () => choose(one) }, one.name ?? one.label, one.unread ? h("span", { class: "badge info" }, one.unread) : null))));
  }

  function showLines() {
    if (!open) { title.textContent = ""; fill(bubbles, empty(t("chat.none"), t("chat.none.hint"))); composer.hidden = true; return; }
    composer.hidden = false;
    title.textContent = open.name ?? open.label;
    const lines = [...open.lines.values()].sort((a, b) => a.n - b.n);
    const near = bubbles.scrollHeight - bubbles.scrollTop - bubbles.clientHeight < 60;
    fill(bubbles, lines.filter((line) => line.type === "one_chat" || line.type === "group_chat" || line.pending).map((line) => {
      const mine = line.sender === who.name;
      const reached = mine ? receipt(open, line) : "";
      return h("div", { class: `bubble ${mine ? "mine" : ""}` }, mine ? null : h("span", { class: "from" }, line.sender), typeof line.data === "object" && line.data !== null && "text" in line.data ? String(line.data.text) : JSON.stringify(line.data), h("span", { class: "meta" }, [line.time ? time(line.time) : "", reached].filter(Boolean).join(" · ")));
    }));
    if (near || !open.loaded) bubbles.scrollTop = bubbles.scrollHeight;
  }

  function receipt(one, line) {
    if (line.pending) return t("receipt.sending");
    const states = [...one.reached].filter(([reader]) => reader !== who.name).map(([, each]) => each);
    if (states.some((each) => (each.read ?? 0) >= line.n)) return t("receipt.read");
    return states.some((each) => (each.delivered ?? 0) >= line.n) ? t("receipt.delivered") : t("receipt.stored");
  }

  function note(one, reader, how, n) {
    const reached = one.reached.get(reader) ?? {};
    reached[how] = Math.max(reached[how] ?? 0, n);
    one.reached.set(reader, reached);
  }

  // Receipts are told as they happen. How far earlier lines came is asked: a line that was read means that
  // all before it were, so a few questions find the last one.
  async function askReceipts(one) {
    const mine = [...one.lines.values()].filter((line) => line.sender === who.name && !line.pending).map((line) => line.n).sort((a, b) => a - b);
    for (const how of ["read", "delivered"]) {
      let reached = 0, beyond = mine.length;
      while (reached < beyond) {
        const middle = (reached + beyond) >> 1;
        if ((await chat.receipts(one.id, mine[middle]))[how] > 0) reached = middle + 1;
        else beyond = middle;
      }
      if (reached) note(one, "", how, mine[reached - 1]);
    }
  }

  async function choose(one) {
    open = one;
    one.unread = 0;
    showList();
    showLines();
    text.focus();
    if (!one.loaded) {
      try {
        for (const line of await chat.history(one.id, { limit: 100 })) one.lines.set(line.n, line);
        one.loaded = true;
        showLines();
        await askReceipts(one);
      } catch { /* a conversation that has not begun */ }
      showLines();
    }
    const last = Math.max(0, ...[...one.lines.values()].filter((line) => !line.pending).map((line) => line.n));
    if (last) chat.read(one.id, last);
  }

  async function say() {
    const words = text.value.trim();
    if (!words || !open) return;
    text.value = "";
    const one = open;
    const key = `p${Date.now()}${Math.random()}`;
    one.lines.set(key, { n: Number.MAX_SAFE_INTEGER, sender: who.name, data: { text: words }, pending: true });
    showLines();
    try {
      const { conv: id, n } = await chat.send(one.to, words);
      one.lines.delete(key);
      let now = one;
      if (id !== one.id) { convs.delete(one.id); now = conv(id, one.to); now.loaded = true; if (open === one) open = now; for (const [at, line] of one.lines) now.lines.set(at, line); }
      now.lines.set(n, { n, type: one.to.startsWith("#") ? "group_chat" : "one_chat", sender: who.name, data: { text: words }, time: Date.now() });
    } catch (problem) {
      one.lines.delete(key);
      toast(explain(problem), "bad");
      text.value = words;
    }
    showList();
    showLines();
  }

  async function begin() {
    const label = to.value.trim();
    const names = members.value.split(/[\s,，]+/).filter(Boolean);
    if (!label) return;
    if (names.length) {
      try {
        const group = await chat.createGroup(label, names);
        await load();
        const found = [...convs.values()].find((one) => one.to === group) ?? conv(group, group);
        found.name = label;
        choose(found);
      } catch (problem) { toast(explain(problem), "bad"); return; }
    } else {
      choose([...convs.values()].find((one) => one.to === label) ?? conv(`new:${label}`, label));
    }
    to.value = members.value = "";
    if (narrow()) folded.open = false;
  }

  async function load() {
    for (const one of await chat.conversations()) {
      const group = one.group ?? (one.conv.startsWith("#") ? one.conv : "");
      const other = group || one.with || one.user || one.conv.split("|").find((name) => name !== who.name) || one.conv;
      const found = conv(one.conv, other);
      if (group && one.name) found.name = one.name;
      if (open !== found) found.unread = Math.max(0, (one.last ?? 0) - (one.read ?? 0));
    }
    showList();
    if (!open && convs.size) {
      if (narrow()) folded.open = false; // what is said comes first on a narrow screen
      choose([...convs.values()][0]);
    }
  }

  chat.on("line", (line) => {
    const known = convs.get(line.conv);
    const one = known ?? conv(line.conv, line.type === "group_chat" ? undefined : line.sender);
    one.lines.set(line.n, line);
    if (!known) { const begun = convs.get(`new:${line.sender}`); if (begun) { convs.delete(begun.id); if (open === begun) open = one; } load().catch(() => {}); }
    if (open === one && document.visibilityState === "visible") chat.read(line.conv, line.n);
    else if (line.sender !== who.name) one.unread += 1;
    showList();
    if (open === one) showLines();
  });
  chat.on("receipt", ({ conv: id, n, reader, state: how }) => {
    const one = convs.get(id);
    if (!one) return;
    note(one, reader, how, n);
    if (open === one) showLines();
  });
  chat.on("up", () => { state.textContent = t("chat.up"); load().catch(() => {}); });
  chat.on("down", () => { state.textContent = t("chat.down"); });
  chat.on("denied", () => { chat.close(); leave(); });
  showLines();
  chat.ready.then(() => load().catch(() => {}), () => { chat.close(); leave(); });
  return chat;
}
