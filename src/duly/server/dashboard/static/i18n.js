// The words of the page in two languages; which one is remembered.
import en from "./i18n/en.js";
import zh from "./i18n/zh.js";
import sentences from "./i18n/sentences.js";

const TABLES = { en, zh };

function chosen() {
  let stored = null;
  try { stored = localStorage.getItem("duly.language"); } catch { /* storage is forbidden */ }
  if (stored in TABLES) return stored;
  return navigator.language?.toLowerCase().startsWith("zh") ? "zh" : "en";
}

export let language = chosen();

export function setLanguage(next) {
  language = next;
  try { localStorage.setItem("duly.language", next); } catch { /* it holds for this page */ }
  document.documentElement.lang = next === "zh" ? "zh-CN" : "en";
}

document.documentElement.lang = language === "zh" ? "zh-CN" : "en";

/** The words for a key, with {names} replaced. */
export function t(key, values = {}) {
  const words = TABLES[language][key] ?? TABLES.en[key] ?? key;
  return words.replace(/\{(\w+)\}/g, (_, name) => String(values[name] ?? ""));
}

/** The word for a state, an action or a counter; what has no word is shown as it is. */
export function word(group, name) {
  return TABLES[language][`${group}.${name}`] ?? TABLES.en[`${group}.${name}`] ?? String(name ?? "");
}

const LONGEST = 600;
let patterns = null;
const known = new Map();

/** A sentence of the hub in the language of the page, as far as the page knows it; see i18n/sentences.js. */
export function sentence(text, depth = 3) {
  const said = String(text ?? "");
  if (language !== "zh" || !said || said.length > LONGEST || !depth) return said;
  const before = known.get(said);
  if (before !== undefined) return before;
  patterns ??= sentences.map(([english, chinese]) => [
    new RegExp(`^${english.split(/\{\w+\}/).map((part) => part.replace(/[.*+?^$()|[\]\\{}]/g, "\\$&")).join("(.*?)")}$`, "s"), [...english.matchAll(/\{(\w+)\}/g)].map(([, name]) => name), chinese]);
  const found = translated(said, depth);
  if (known.size > 2000) known.clear();
  known.set(said, found);
  return found;
}

function translated(said, depth) {
  for (const [pattern, names, chinese] of patterns) {
    const values = said.match(pattern)?.slice(1);
    if (!values) continue;
    return chinese.replace(/\{(\w+)\}/g, (_, name) => {
      const value = values[names.indexOf(name)];
      const group = name.replace(/\d$/, "");
      return group === "state" || group === "role" ? word(group, value) : group === "name" ? value : sentence(value, depth - 1);
    });
  }
  return said;
}

const locale = () => (language === "zh" ? "zh-CN" : "en-GB");

export function number(value, digits = 0) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return new Intl.NumberFormat(locale(), { maximumFractionDigits: digits }).format(value);
}

/** A rate or a length with as many digits as tell something. */
export function figure(value) {
  if (value === null || value === undefined) return "–";
  return number(value, value !== 0 && Math.abs(value) < 10 ? 1 : 0);
}

export function milliseconds(ms) {
  if (ms === null || ms === undefined) return ["–", ""];
  if (ms < 1000) return [number(ms, ms < 10 ? 1 : 0), "ms"];
  return [number(ms / 1000, 1), "s"];
}

export function span(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const s = Math.max(0, seconds);
  if (s < 60) return t("span.s", { n: number(s, s < 10 && s % 1 ? 1 : 0) });
  if (s < 3600) return t("span.min", { n: number(Math.floor(s / 60)) });
  if (s < 2 * 86400) return t("span.h", { n: number(Math.floor(s / 3600)) });
  return t("span.d", { n: number(Math.floor(s / 86400)) });
}

export function ago(ms) {
  if (!ms) return t("never");
  const seconds = (Date.now() - ms) / 1000;
  return seconds < 2 && seconds > -5 ? t("now") : seconds < 0 ? time(ms) : t("ago", { span: span(Math.floor(seconds)) });
}

export function time(ms, { fine = false } = {}) {
  if (!ms) return "–";
  const date = new Date(ms);
  const today = date.toDateString() === new Date().toDateString();
  const clock = new Intl.DateTimeFormat(locale(), { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23", ...(fine ? { fractionalSecondDigits: 3 } : {}) }).format(date);
  if (today) return clock;
  return `${new Intl.DateTimeFormat(locale(), { year: "numeric", month: "2-digit", day: "2-digit" }).format(date)} ${clock}`;
}

/** How long after something: "+3 ms", "+1.2 s"; nothing if it was at the same moment. */
export function distance(ms) {
  if (!ms) return "";
  const sign = ms < 0 ? "−" : "+";
  return sign + (Math.abs(ms) < 60_000 ? milliseconds(Math.abs(ms)).join(" ") : span(Math.abs(ms) / 1000));
}

export function bytes(size) {
  if (size === null || size === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  let left = size;
  while (left >= 1000 && at < units.length - 1) { left /= 1000; at += 1; }
  return `${number(left, left < 10 && at ? 1 : 0)} ${units[at]}`;
}
