// Logging in: by a link, which carries its token behind the #, or by a password.
import { h, fill } from "../dom.js";
import { t } from "../i18n.js";
import { logIn, session, refreshSession } from "../api.js";
import { field, explain } from "../widgets.js";

const AGAIN_MS = 2000;

export default function login(app, { go, switches, problem, again }) {
  const told = h("p", { class: "notice bad", role: "alert", hidden: true });
  const tell = (text) => { told.textContent = text; told.hidden = !text; };
  const name = h("input", { name: "name", autocomplete: "username", required: true, maxlength: "64" });
  const password = h("input", { name: "password", type: "password", autocomplete: "current-password", required: true });
  const button = h("button", { type: "submit", class: "button primary large" }, t("log.in"));
  const wanted = location.pathname === "/login" ? "/" : location.pathname + location.search;

  async function enter(body) {
    tell("");
    button.disabled = true;
    try {
      await logIn(body);
      clearInterval(asking);
      history.replaceState(null, "", wanted);
      go(wanted, { replace: true });
    } catch (trouble) {
      tell(explain(trouble));
    } finally {
      button.disabled = false;
    }
  }

  const form = h("form", { class: "form", onsubmit: (event) => { event.preventDefault(); enter({ name: name.value, password: password.value }); } },
    field(t("name"), name), field(t("password"), password), button);
  fill(app, h("div", { class: "card-page" }, h("main", { class: "card" },
    h("div", { class: "row spread" }, h("span", { class: "brand" }, h("img", { src: "/static/icon.svg", alt: "" }), "duly"), switches()),
    h("h1", {}, t("login.title")), told, form,
    h("p", { class: "muted small" }, t("login.hint"), " ", h("code", { class: "command" }, "duly dashboard link")))));
  document.title = `${t("login.title")} · duly`;
  let asking = null;
  if (problem) {
    tell(explain(problem));
    if (problem.status === 0 || problem.status >= 500) asking = setInterval(back, AGAIN_MS);
  }

  /** The hub could not say who is logged in; when it can, the page that was asked for comes back by itself. */
  async function back() {
    try { await refreshSession(); } catch (trouble) { if (trouble.status === 0 || trouble.status >= 500) return; tell(""); }
    clearInterval(asking);
    if (session.name) again();
  }
  const token = location.pathname === "/login" ? location.hash.slice(1) : "";
  if (token) {
    history.replaceState(null, "", "/login"); // the token must not stay in the address
    enter({ link: token });
  } else {
    name.focus();
  }
  return () => clearInterval(asking);
}
