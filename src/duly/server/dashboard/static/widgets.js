// Pieces that several pages use.
import { h, fill, say } from "./dom.js";
import { t, word, time, ago, number, sentence } from "./i18n.js";

const LEVELS = {
  done: "good", acknowledged: "info", resolved: "good", arrived: "good", online: "good",
  failed: "bad", expired: "bad", open: "bad", critical: "bad", silent: "bad", dead: "bad",
  unknown: "warn", stale: "warn", warning: "warn", in_doubt: "warn",
  accepted: "info", sent: "info", delivered: "info", info: "info",
};

export const levelOf = (state) => LEVELS[state] ?? "";

export const badge = (group, state) => h("span", { class: `badge ${levelOf(state)}` }, word(group, state));

const FORMS = { clock: time, fine: (ms) => time(ms, { fine: true }), ago };

const moment = (ms, form) => h("time", { datetime: ms ? new Date(ms).toISOString() : "", title: ms ? new Date(ms).toLocaleString() : "", "data-ms": ms || null, "data-form": form }, FORMS[form](ms));

export const when = (ms, fine = false) => moment(ms, fine ? "fine" : "clock");

export const since = (ms) => moment(ms, "ago");

/** Says all times of the page anew: an unchanged row keeps its element, while a minute becomes an hour, and today yesterday. */
function retell() {
  for (const element of document.querySelectorAll("time[data-ms]")) say(element, FORMS[element.dataset.form](Number(element.dataset.ms)));
}

setInterval(() => { if (!document.hidden) retell(); }, 1000);
document.addEventListener("visibilitychange", () => { if (!document.hidden) retell(); });

/** What is not there, or zero: a narrow screen leaves it out. */
export const nil = (text = "–") => h("span", { class: "nil" }, text);

/** A count; zero steps back behind the others. */
export const tally = (n) => (n ? number(n) : nil("0"));

export const short = (id) => (id.length > 22 ? `${id.slice(0, 10)}…${id.slice(-8)}` : id);

export function empty(title, hint, command) {
  return h("div", { class: "empty" }, h("strong", {}, title), hint ? h("p", {}, hint) : null, command ? h("code", { class: "command" }, command) : null);
}

export function field(label, control, extra = "") {
  const id = control.id || `f${(field.next = (field.next ?? 0) + 1)}`;
  control.id = id;
  return h("div", { class: `field ${extra}` }, h("label", { for: id }, label), control);
}

export function checkbox(label, props = {}) {
  const control = h("input", { type: "checkbox", ...props });
  control.id = `c${(checkbox.next = (checkbox.next ?? 0) + 1)}`;
  return [h("div", { class: "field check" }, control, h("label", { for: control.id }, label)), control];
}

/** A form that is folded away on a narrow screen, unless it is in use. */
export function fold(form, used) {
  const box = h("details", { class: "fold" }, h("summary", {}, t("filter")), form);
  box.open = used || !matchMedia("(max-width: 52rem)").matches;
  return box;
}

export function options(pairs, chosen) {
  return pairs.map(([value, label]) => h("option", { value, selected: value === chosen }, label));
}

export function segments(label, pairs, chosen, pick) {
  const box = h("div", { class: "segments", role: "group", "aria-label": label });
  const show = (now) => {
    for (const button of box.children) button.setAttribute("aria-pressed", String(button.dataset.value === now));
  };
  for (const [value, text] of pairs) {
    box.append(h("button", { type: "button", "data-value": value, onclick: () => { show(value); pick(value); } }, text));
  }
  show(chosen);
  return box;
}

/** A table with a heading for each column; on a narrow screen every row becomes a card, or with `compact` a line or two. */
export function table(columns, caption, more = "") {
  const body = h("tbody");
  const element = h("table", { class: `cards ${more}` },
    h("caption", { class: "visually-hidden" }, caption),
    h("thead", {}, h("tr", {}, columns.map(([label, kind]) => h("th", { scope: "col", class: kind ?? null }, label || h("span", { class: "visually-hidden" }, t("actions")))))), body);
  const row = (...cells) => h("tr", {}, cells.map((cell, i) => h("td", { "data-label": columns[i][0], class: columns[i][1] ?? null }, cell === "" ? null : cell === "–" ? nil() : cell)));
  return { wrap: h("div", { class: "table-wrap", tabindex: "0", role: "region", "aria-label": caption }, element), body, row };
}

export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter(Boolean).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value ?? "–")]));
}

export function tile(label) {
  const value = h("span", { class: "value" }, "–");
  const note = h("span", { class: "note" });
  const element = h("div", { class: "tile" }, h("span", { class: "label" }, label), value, note);
  const set = (text, { unit = "", about = "", level = "" } = {}) => {
    const said = `${text} ${unit}`;
    if (value.dataset.said !== said) {
      value.dataset.said = said;
      fill(value, String(text), unit ? h("span", { class: "unit" }, unit) : null);
    }
    if (note.textContent !== about) note.textContent = about;
    element.className = `tile ${level}`;
  };
  return { element, set };
}

/** A count on a line of its own, beside its name; it is set like a tile. */
export function count(label) {
  const value = h("span", { class: "value" }, "–");
  const note = h("span", { class: "note" });
  const element = h("div", { class: "count" }, h("span", { class: "label" }, label), h("span", {}, note, value));
  const set = (text, { about = "", level = "" } = {}) => {
    say(value, text);
    say(note, about);
    element.className = `count ${level}`;
  };
  return { element, set };
}

// ── telling ──────────────────────────────────────────────────────────────────────────────────────

const toasts = h("div", { class: "toasts", role: "status", "aria-live": "polite" });
document.body.append(toasts);

export function toast(text, level = "") {
  const element = h("div", { class: `toast ${level}` }, text);
  toasts.append(element);
  setTimeout(() => element.remove(), level === "bad" ? 9000 : 4500);
}

export function explain(problem) {
  if (problem.status === 0) return t("unreachable");
  if (problem.status === 403 && problem.word === "not_allowed") return `${t("not.allowed")} ${sentence(problem.message)}`;
  return sentence(problem.message) || t("failed");
}

/** Runs an action of a button: once at a time, telling how it went. */
export async function doing(button, work, done) {
  if (button.dataset.busy) return undefined;
  button.dataset.busy = "yes";
  button.setAttribute("aria-busy", "true");
  try {
    const result = await work();
    if (done) toast(typeof done === "function" ? done(result) : done);
    return result;
  } catch (problem) {
    toast(explain(problem), "bad");
    return undefined;
  } finally {
    delete button.dataset.busy;
    button.removeAttribute("aria-busy");
  }
}

/** Asks for a few fields in a dialog; resolves to their values, or null. */
export function askFor(title, text, fields, confirm, danger = false) {
  return new Promise((resolve) => {
    const controls = fields.map(([name, label, control]) => { control.name = name; return field(label, control); });
    const heading = h("h2", { id: "dialog-title" }, title);
    const form = h("form", { method: "dialog" }, heading, text ? h("p", { class: "muted" }, text) : null, controls,
      h("div", { class: "row" }, h("button", { type: "button", class: "button", onclick: () => dialog.close("") }, t("back")),
        h("button", { type: "submit", class: `button ${danger ? "danger" : "primary"}`, value: "yes" }, confirm)));
    const dialog = h("dialog", { "aria-labelledby": "dialog-title" }, form);
    dialog.addEventListener("close", () => {
      const values = Object.fromEntries(new FormData(form));
      dialog.remove();
      resolve(dialog.returnValue === "yes" ? values : null);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}
