// The frame of the page: who is logged in, where we are, and what is shown there.
import { h, fill, say, icon } from "./dom.js";
import { t, language, setLanguage, word } from "./i18n.js";
import { session, refreshSession, checkSession, logOut, closeLive, on, may } from "./api.js";
import { toast, explain } from "./widgets.js";
import login from "./pages/login.js";
import overview from "./pages/overview.js";
import messages from "./pages/messages.js";
import message from "./pages/message.js";
import devices from "./pages/devices.js";
import device from "./pages/device.js";
import alerts from "./pages/alerts.js";
import alert from "./pages/alert.js";
import chat from "./pages/chat.js";
import api from "./pages/api.js";
import audit from "./pages/audit.js";

const PAGES = { "/": overview, "/messages": messages, "/message": message, "/devices": devices, "/device": device, "/alerts": alerts, "/alert": alert, "/chat": chat, "/api": api, "/audit": audit };
const NAV = [["/", "overview"], ["/messages", "messages"], ["/devices", "devices"], ["/alerts", "alerts"], ["/chat", "chat"], ["/api", "api"], ["/audit", "audit"]];
const SECTION = { "/message": "/messages", "/device": "/devices", "/alert": "/alerts" };

const app = document.getElementById("app");
const lost = h("div", { class: "offline-bar", role: "status", hidden: true });
let main = null;
let leave = null;

/** Goes to another page without loading the frame again. */
export function go(path, { replace = false } = {}) {
  history[replace ? "replaceState" : "pushState"](null, "", path);
  show();
}

function theme() {
  const set = document.documentElement.dataset.theme;
  return set ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

function switchTheme() {
  const next = theme() === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  try { localStorage.setItem("duly.theme", next); } catch { /* it holds for this page */ }
  show();
}

export function switches() {
  return h("div", { class: "switches" },
    h("button", { type: "button", class: "button small", onclick: switchTheme, "aria-label": t("theme.switch"), title: t("theme.switch") }, icon("sun")),
    h("button", { type: "button", class: "button small", lang: language === "zh" ? "en" : "zh-CN", onclick: () => { setLanguage(language === "zh" ? "en" : "zh"); frame(); show(); } }, language === "zh" ? "English" : "中文"));
}

function frame() {
  const here = SECTION[location.pathname] ?? location.pathname;
  const links = NAV.filter(([, name]) => name !== "audit" || may("admin"));
  main = h("main", { class: "main", id: "main", tabindex: "-1" });
  say(lost, t("link.lost"));
  fill(app,
    h("a", { class: "skip", href: "#main" }, t("skip")),
    h("div", { class: "frame" },
      h("header", { class: "side" }, h("div", { class: "side-inner" },
        h("a", { class: "brand", href: "/" }, h("img", { src: "/static/icon.svg", alt: "" }), "duly"),
        h("nav", { class: "nav", "aria-label": t("nav") }, links.map(([path, name]) =>
          h("a", { href: path, "aria-current": path === here ? "page" : null }, icon(name), t(`nav.${name}`)))),
        h("div", { class: "side-foot" },
          h("div", { class: "who" }, h("strong", {}, session.name), word("role", session.role)),
          h("div", { class: "row" }, switches(),
            h("button", { type: "button", class: "button small plain", onclick: async () => { try { await logOut(); } catch (problem) { toast(explain(problem), "bad"); } go("/login", { replace: true }); } }, t("log.out")))))),
      h("div", {}, lost, main)));
}

function mark() {
  const here = SECTION[location.pathname] ?? location.pathname;
  for (const link of app.querySelectorAll(".nav a")) {
    if (link.getAttribute("href") === here) { link.setAttribute("aria-current", "page"); link.scrollIntoView?.({ block: "nearest", inline: "center" }); }
    else link.removeAttribute("aria-current");
  }
}

async function show() {
  leave?.();
  leave = null;
  if (!session.name) {
    try {
      await refreshSession();
    } catch (problem) {
      main = null;
      closeLive();
      leave = login(app, { go, switches, problem: problem.status === 401 ? null : problem, again: show });
      return;
    }
  }
  if (location.pathname === "/login" && !location.hash) history.replaceState(null, "", "/");
  if (location.pathname === "/login") {
    leave = login(app, { go, switches });
    main = null;
    return;
  }
  if (!main || !app.contains(main)) frame();
  const page = PAGES[location.pathname] ?? overview;
  const place = h("div", { class: "page" });
  fill(main, place);
  mark();
  const query = Object.fromEntries(new URLSearchParams(location.search));
  leave = page(place, query, { go }) ?? null;
  const title = place.querySelector("h1")?.textContent;
  document.title = title ? `${title} · duly` : "duly";
  scrollTo(0, 0);
}

document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href]");
  if (!link || event.defaultPrevented || event.button || event.ctrlKey || event.metaKey || event.shiftKey || link.target || link.hasAttribute("download")) return;
  const url = new URL(link.href, location.href);
  if (url.origin !== location.origin || !(url.pathname in PAGES)) return;
  if (url.pathname === location.pathname && url.search === location.search && url.hash) return;
  event.preventDefault();
  go(url.pathname + url.search);
  main?.focus({ preventScroll: true });
});
document.addEventListener("visibilitychange", () => { if (document.visibilityState === "visible") checkSession(); });
addEventListener("popstate", show);
on("ended", () => { toast(t("session.ended")); closeLive(); show(); });
on("changed", () => { toast(t("session.other", { name: session.name })); closeLive(); frame(); show(); });
on("link", (up) => { lost.hidden = up === true; say(lost, t(up === "full" ? "pages.full" : "link.lost")); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (!document.documentElement.dataset.theme) show(); });
show();
