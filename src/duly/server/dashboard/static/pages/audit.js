// The audit chain and the sessions, for admins.
import { h, fill, keep } from "../dom.js";
import { t, word } from "../i18n.js";
import { act, watch, queryOf } from "../api.js";
import { badge, when, table, empty, doing } from "../widgets.js";

export default function audit(page, query) {
  const list = table([["n", "number"], [t("time"), "time"], [t("who")], [t("what")], [t("target")], [t("result")], [t("hash")]], t("nav.audit"));
  const none = h("div");
  const next = h("div", { class: "row" });
  const sessions = table([[t("name")], [t("role")], [t("since"), "time"], [t("expires"), "time"], ["", "actions"]], t("sessions"));
  fill(page, h("div", { class: "page-head" }, h("div", {}, h("h1", {}, t("nav.audit")), h("p", { class: "muted" }, t("audit.about"), " ", h("code", {}, "duly audit verify"))), h("a", { class: "button small plain", href: `/audit.json?${queryOf(query)}`, target: "_blank", rel: "noopener" }, "JSON")),
    h("section", { class: "panel flush" }, list.wrap, none), h("div", { class: "pager" }, h("span"), next),
    h("section", { class: "section" }, h("h2", {}, t("sessions")), h("div", { class: "panel flush" }, sessions.wrap)));
  const stopList = watch("audit", { before: query.before ?? "" }, (seen) => {
    if (!seen.entries) { list.wrap.hidden = true; fill(none, empty(t("not.allowed"), seen.problem)); return; }
    keep(list.body, seen.entries, (one) => one.n, (one) => list.row(String(one.n), when(one.at), h("div", {}, one.actor, h("div", { class: "small muted" }, word("role", one.role))), h("span", { class: "mono" }, one.action), h("div", {}, one.target, one.detail ? h("div", { class: "small muted" }, one.detail) : null), one.result === "done" ? badge("state", "done") : h("span", { class: "badge bad" }, one.result.slice(0, 60)), h("span", { class: "mono muted", title: one.hash }, one.hash?.slice(0, 10) ?? "")));
    list.wrap.hidden = !seen.entries.length;
    fill(none, seen.entries.length ? null : empty(t("audit.none")));
    fill(next, query.before ? h("a", { class: "button", href: "/audit" }, t("newest")) : null, seen.next ? h("a", { class: "button", href: `/audit?${queryOf({ before: seen.next })}` }, t("older")) : null);
  });
  const stopSessions = watch("sessions", {}, (seen) => {
    if (!seen.sessions) return;
    keep(sessions.body, seen.sessions, (one) => one.session, (one) => sessions.row(one.mine ? `${one.name} (${t("this.session")})` : one.name, word("role", one.role), when(one.created), when(one.expires),
      h("button", { type: "button", class: "button small", onclick: (event) => doing(event.currentTarget, () => act("session.end", { session: one.session }), t("done.word")) }, t("end"))));
  });
  return () => { stopList(); stopSessions(); };
}
