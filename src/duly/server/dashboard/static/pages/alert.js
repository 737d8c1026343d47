// One alert: what happened, who was told, how that went, and what people did.
import { h, fill, keep } from "../dom.js";
import { t, number, sentence } from "../i18n.js";
import { watch, may, queryOf } from "../api.js";
import { badge, when, facts, table, empty } from "../widgets.js";
import { actions, letterActions, silence } from "./alerts.js";

const OVER = ["done", "failed", "expired", "superseded", "cancelled", "unknown"]; // before, some of its deliveries are under way

export default function alert(page, { sentinel = "", event = "" }) {
  const title = h("h1");
  const head = h("div", { class: "row" });
  const doing = h("div", { class: "row" });
  const about = h("div");
  const list = table([[t("recipient"), "address"], [t("state")], [t("attempts"), "number"], [t("next.try"), "time"], [t("detail"), "wide"], ["", "actions"]], t("deliveries"));
  const none = h("div");
  const episode = table([[t("time"), "time"], [t("status")], [t("id")]], t("episode.events"));
  const episodeBox = h("section", { class: "section", hidden: true }, h("h2", {}, t("episode.events")), h("div", { class: "panel flush" }, episode.wrap));
  const body = h("div", { class: "stack" });
  const whole = h("div", { class: "stack" },
    h("section", { class: "section" }, h("h2", {}, t("deliveries")), h("div", { class: "panel flush" }, list.wrap, none)),
    h("section", { class: "section" }, h("h2", {}, t("facts")), h("div", { class: "panel" }, about)), episodeBox);
  fill(page, h("p", {}, h("a", { href: "/alerts" }, `← ${t("nav.alerts")}`)), h("div", { class: "page-head" }, h("div", {}, title, head), h("div", { class: "row" }, doing, h("a", { class: "button small plain", href: `/alert.json?${queryOf({ sentinel, event })}`, target: "_blank", rel: "noopener" }, "JSON"))), body);
  title.textContent = event;
  let said = "";
  return watch("alert", { sentinel, event }, (seen) => {
    if (seen.problem) { fill(body, h("div", { class: "panel" }, empty(t("alert.missing"), sentence(seen.problem)))); return; }
    if (!body.contains(whole)) fill(body, whole);
    title.textContent = seen.reason;
    document.title = `${seen.reason} · duly`;
    fill(head, badge("severity", seen.severity), badge("status", seen.status), h("span", { class: "muted" }, seen.by ? t("by.at", { by: seen.by }) : ""));
    if (said !== seen.status) {
      said = seen.status;
      fill(doing, actions(seen, false), may("operator") ? h("button", { type: "button", class: "button", onclick: (click) => silence(click.currentTarget, { sentinel, device: seen.device, reason: seen.reason }) }, t("silence")) : null);
    }
    fill(about, facts([[t("happened"), when(seen.time)], [t("received"), when(seen.accepted_at)], [t("sentinel"), seen.sentinel], [t("device"), seen.device || "–"], [t("profile"), seen.profile], [t("session"), seen.session || "–"],
      [t("notifying"), OVER.includes(seen.state) ? badge("state", seen.state) : h("span", { class: "badge info" }, t("alerts.open"))], seen.detail ? [t("detail"), sentence(seen.detail)] : null, seen.location ? [t("location"), h("code", {}, JSON.stringify(seen.location))] : null, seen.device_meta ? [t("device.meta"), h("code", {}, JSON.stringify(seen.device_meta))] : null, seen.summary ? [t("held.back"), h("code", {}, JSON.stringify(seen.summary))] : null,
      seen.note ? [t("note"), seen.note] : null, seen.offset_ms ? [t("offset"), `${seen.offset_ms} ms`] : null, [t("id"), h("a", { class: "mono", href: `/message?${queryOf({ scope: sentinel, id: event })}`, title: t("timeline") }, seen.event)]]));
    keep(list.body, seen.deliveries, (one) => `${one.recipient}/${one.round}`, (one) => list.row(h("span", { class: "mono" }, one.recipient), badge("state", one.state), number(one.attempts), one.due ? when(one.due) : "–", one.error ? h("span", { class: "muted" }, sentence(one.error)) : null, letterActions(seen, one)));
    list.wrap.hidden = !seen.deliveries.length;
    fill(none, seen.deliveries.length ? null : empty(t("deliveries.none"), t("deliveries.none.hint")));
    episodeBox.hidden = seen.events.length < 2;
    keep(episode.body, seen.events, (one) => one.event, (one) => episode.row(when(one.time), badge("status", one.status), h("a", { class: "mono", href: `/alert?${queryOf({ sentinel: one.sentinel, event: one.event })}` }, one.event.slice(0, 12))));
  });
}
