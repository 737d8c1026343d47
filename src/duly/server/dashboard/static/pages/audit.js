// The audit chain and the sessions, for admins.
import { h, fill, keep } from "../dom.js";
import { t, word, sentence } from "../i18n.js";
import { act, watch, queryOf } from "../api.js";
import { badge, when, table, empty, doing } from "../widgets.js";

export default function audit(page, query) {
  const list = table([["#", "number aside"], [t("time"), "time"], [t("result"), "result"], [t("who"), "actor"], [t("what"), "tight"], [t("target"), "wide"], [t("hash"), "aside tight"]], t("nav.audit"), "compact");
  const none = h("div");
  const next = h("div", { class: "row" });
  const sessions = table([[t("name")], [t("role")], [t("since"), "time"], [t("expires"), "time"], ["", "actions"]], t("sessions"));
  const open = h("section", { class: "section", hidden: true }, h("h2", {}, t("sessions")), h("div", { class: "panel flush" }, sessions.wrap));
  fill(page, h("div", { class: "page-head" }, h("div", {}, h("h1", {}, t("nav.audit")), h("p", { class: "muted" }, t("audit.about"), " ", h("code", { class: "command" }, "duly audit verify"))), h("a", { class: "button small plain", href: `/audit.json?${queryOf(query)}`, target: "_blank", rel: "noopener" }, "JSON")),
    h("section", { class: "panel flush" }, list.wrap, none), h("div", { class: "pager" }, h("span"), next),
    open);
  const stopList = watch("audit", { before: query.before ?? "" }, (seen) => {
    if (!seen.entries) { list.wrap.hidden = true; fill(none, empty(t("not.allowed"), sentence(seen.problem))); return; }
    keep(list.body, seen.entries, (one) => one.n, (one) => list.row(String(one.n), when(one.at), one.result === "done" ? badge("state", "done") : h("span", { class: "badge bad" }, t(one.result.startsWith("refused") ? "state.refused" : "state.failed")), h("div", {}, one.actor, h("div", { class: "small muted" }, word("role", one.role))), h("span", { class: "mono" }, one.action), h("div", {}, one.target, one.detail ? h("div", { class: "small muted" }, sentence(one.detail)) : null, one.result === "done" ? null : h("div", { class: "small muted" }, sentence(one.result.replace(/^refused: /, "")))), h("span", { class: "mono muted", title: one.hash }, one.hash?.slice(0, 10) ?? "")));
    list.wrap.hidden = !seen.entries.length;
    fill(none, seen.entries.length ? null : empty(t("audit.none"), t("audit.none.hint")));
    fill(next, query.before ? h("a", { class: "button", href: "/audit" }, t("newest")) : null, seen.next ? h("a", { class: "button", href: `/audit?${queryOf({ before: seen.next })}` }, t("older")) : null);
  });
  const stopSessions = watch("sessions", {}, (seen) => {
    open.hidden = !seen.sessions;
    if (!seen.sessions) return;
    keep(sessions.body, seen.sessions, (one) => one.session, (one) => sessions.row(one.mine ? t("this.session", { name: one.name }) : one.name, word("role", one.role), when(one.created), when(one.expires),
      h("button", { type: "button", class: "button small", onclick: (event) => doing(event.currentTarget, () => act("session.end", { session: one.session }), t("done.word")) }, t("end"))));
  });
  return () => { stopList(); stopSessions(); };
}
