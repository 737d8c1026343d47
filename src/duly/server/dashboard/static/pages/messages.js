// Messages: finding them. The first page is live; older ones are pages.
import { h, fill, keep } from "../dom.js";
import { t, word, time, sentence } from "../i18n.js";
import { get, watch, queryOf } from "../api.js";
import { badge, when, short, field, options, table, empty, explain, fold } from "../widgets.js";

const STATES = ["open", "trouble", "accepted", "sent", "delivered", "done", "failed", "expired", "superseded", "cancelled", "unknown"];

export default function messages(page, query, { go }) {
  const input = (name, more = {}) => h("input", { name, value: query[name] ?? "", autocomplete: "off", spellcheck: "false", ...more });
  const local = (ms) => { if (!ms) return ""; const d = new Date(Number(ms)); return new Date(d.getTime() - d.getTimezoneOffset() * 60000).toISOString().slice(0, 16); };
  const controls = {
    id: input("id", { type: "search", placeholder: t("message.id.hint") }), scope: input("scope"), to: input("to"), kind: input("kind"),
    state: h("select", { name: "state" }, options([["", t("any")], ...STATES.map((state) => [state, word("state", state)])], query.state ?? "")),
    since: h("input", { type: "datetime-local", value: local(query.since) }), until: h("input", { type: "datetime-local", value: local(query.until) }),
  };
  const wanted = () => ({
    id: controls.id.value.trim(), scope: controls.scope.value.trim(), to: controls.to.value.trim(), kind: controls.kind.value.trim(), state: controls.state.value,
    since: controls.since.value ? new Date(controls.since.value).getTime() : "", until: controls.until.value ? new Date(controls.until.value).getTime() : "",
  });
  const form = h("form", { class: "filters", role: "search", "aria-label": t("find.messages"), onsubmit: (event) => { event.preventDefault(); go(`/messages?${queryOf(wanted())}`); } },
    field(t("id"), controls.id, "wide"), field(t("sender"), controls.scope), field(t("recipient"), controls.to), field(t("kind"), controls.kind), field(t("state"), controls.state),
    h("div", { class: "dates" }, field(t("since"), controls.since), field(t("until"), controls.until)),
    h("div", { class: "row" }, h("button", { type: "submit", class: "button primary" }, t("find")), h("a", { class: "button plain", href: "/messages" }, t("clear"))));
  controls.state.addEventListener("change", () => form.requestSubmit());
  const list = table([[t("accepted.at"), "time"], [t("state")], [t("kind"), "word"], [t("sender")], [t("recipient"), "to"], [t("id"), "tight"], [t("detail"), "wide"]], t("nav.messages"), "compact");
  const state = h("div");
  const searched = h("p", { class: "muted small", role: "status" });
  const next = h("div", { class: "row" });
  const json = h("a", { class: "button small plain", href: `/messages.json?${queryOf(query)}`, target: "_blank", rel: "noopener" }, "JSON");
  fill(page, h("div", { class: "page-head" }, h("div", {}, h("h1", {}, t("nav.messages")), h("p", { class: "muted" }, t("messages.about"))), json),
    h("section", { class: "panel" }, fold(form, Object.keys(query).length > 0)), h("section", { class: "panel flush" }, list.wrap, state), h("div", { class: "pager" }, searched, next));
  const filtered = Object.keys(query).some((name) => name !== "before");

  function show(seen) {
    if (seen.problem) { fill(state, h("p", { class: "notice bad" }, sentence(seen.problem))); return; }
    keep(list.body, seen.messages, (one) => `${one.scope}/${one.id}`, (one) => list.row(when(one.accepted_at), badge("state", one.state), h("span", { class: "mono" }, one.type), one.scope, one.to,
      h("a", { class: "mono", href: `/message?${queryOf({ scope: one.scope, id: one.id })}`, title: one.id }, short(one.id)), one.detail ? h("span", { class: "muted" }, sentence(one.detail)) : null));
    list.wrap.hidden = !seen.messages.length;
    fill(state, seen.messages.length ? null : filtered ? empty(t("found.none"), seen.next ? t("found.none.yet") : t("found.none.hint")) : empty(t("messages.none"), t("messages.none.hint"), "duly send lock lock_control '{\"open\":true}'"));
    fill(searched, seen.searched_to === null ? null : t("searched.to", { time: time(seen.searched_to) }));
    fill(next, query.before ? h("a", { class: "button", href: `/messages?${queryOf({ ...query, before: "" })}` }, t("newest")) : null,
      seen.next ? h("a", { class: "button", href: `/messages?${queryOf({ ...query, before: seen.next })}` }, seen.messages.length || !filtered ? t("older") : t("look.on")) : null);
  }
  if (query.before || query.id) {
    get("messages", query).then(show, (problem) => show({ problem: explain(problem) }));
    return null;
  }
  return watch("messages", query, show);
}
