// Alerts, the status page: counters, events by episode, deliveries, sentinels, silences, recipients.
import { h, fill, keep } from "../dom.js";
import { t, word, number, sentence } from "../i18n.js";
import { act, watch, may, queryOf } from "../api.js";
import { badge, when, since, short, tile, count, table, segments, empty, doing, askFor, options } from "../widgets.js";

const VIEWS = ["active", "all", "dead", "open"];
const NOW = ["dead_letters", "critical_untold", "silent_sentinels", "in_doubt", "open_deliveries"]; // what may need a person; the others only ever grow

export default function alerts(page, query, { go }) {
  const view = VIEWS.includes(query.view) ? query.view : "active";
  const tiles = new Map();
  const now = h("div", { class: "tiles five" });
  const totals = h("div", { class: "counts" });
  const list = h("div", { class: "panel flush" });
  const next = h("div", { class: "row" });
  const sentinels = table([[t("name")], [t("presence")], [t("last.heard"), "time end"]], t("sentinels"), "compact");
  const noSentinels = h("div");
  const silences = table([[t("silence.what")], [t("until"), "time"], [t("by"), "actor"], ["", "actions"]], t("silences"));
  const noSilences = h("div");
  const recipients = table([[t("profile")], [t("recipient"), "address"], [t("step")], ["", "actions end"]], t("recipients"), "compact");
  const noRecipients = h("div");
  fill(page,
    h("div", { class: "page-head" }, h("div", {}, h("h1", {}, t("nav.alerts")), h("p", { class: "muted" }, t("alerts.about"))),
      h("div", { class: "row" }, may("operator") ? h("button", { type: "button", class: "button", onclick: (event) => silence(event.currentTarget, {}) }, t("silence")) : null,
        h("a", { class: "button small plain", href: "/alerts.json", target: "_blank", rel: "noopener" }, "JSON"))),
    h("section", { "aria-label": t("attention") }, now),
    h("section", { class: "panel", "aria-label": t("counters") }, totals),
    h("section", { class: "section" }, h("div", { class: "section-head" }, h("h2", {}, t("events")),
      segments(t("show"), VIEWS.map((name) => [name, t(`alerts.${name}`)]), view, (name) => go(`/alerts?${queryOf({ view: name })}`))), list, h("div", { class: "pager" }, h("span"), next)),
    h("div", { class: "columns" },
      h("section", { class: "section" }, h("h2", {}, t("recipients")), h("div", { class: "panel flush" }, recipients.wrap, noRecipients)),
      h("div", { class: "stack" },
        h("section", { class: "section" }, h("h2", {}, t("sentinels")), h("div", { class: "panel flush" }, sentinels.wrap, noSentinels)),
        h("section", { class: "section" }, h("h2", {}, t("silences")), h("div", { class: "panel flush" }, silences.wrap, noSilences)))));

  const stopStatus = watch("alerts-status", {}, (seen) => {
    if (!seen.counters) return;
    const byName = Object.fromEntries(seen.counters.map((one) => [one.name, one]));
    for (const one of [...NOW.map((name) => byName[name]), ...seen.counters.filter(({ name }) => !NOW.includes(name))]) {
      if (!tiles.has(one.name)) {
        const urgent = NOW.includes(one.name);
        const made = (urgent ? tile : count)(word("counter", one.name));
        tiles.set(one.name, made);
        (urgent ? now : totals).append(made.element);
      }
      const limit = one.bad ?? one.warning;
      tiles.get(one.name).set(number(one.value, 2), { level: one.level === "ok" ? "" : one.level, about: limit === null ? "" : t("red.from", { n: number(limit) }) });
    }
    keep(sentinels.body, seen.sentinels, (one) => one.name, (one) => sentinels.row(one.name, badge("presence", one.silent ? "silent" : one.online ? "online" : "offline"), since(one.last_heard)));
    shows(sentinels, noSentinels, seen.sentinels, () => empty(t("sentinels.none"), t("sentinels.none.hint"), "duly add sentinel watch"));
    keep(silences.body, seen.silences, (one) => one.silence, (one) => silences.row(["sentinel", "device", "reason", "profile"].filter((name) => one[name] && one[name] !== "*").map((name) => `${word("silence", name)} ${one[name]}`).join(", ") + (one.note ? ` (${one.note})` : ""), when(one.until), one.by,
      may("operator") ? h("button", { type: "button", class: "button small", onclick: (event) => doing(event.currentTarget, () => act("alert.unsilence", { silence: one.silence }), t("done.word")) }, t("end")) : null));
    shows(silences, noSilences, seen.silences, () => empty(t("silences.none"), may("operator") ? t("silences.none.hint") : ""));
    const to = seen.profiles.flatMap((profile) => profile.steps.flatMap((step) => step.to.map((label) => ({ profile: profile.name, label, after: step.after }))));
    keep(recipients.body, to, (one) => `${one.profile} ${one.label} ${one.after}`, (one) => recipients.row(one.profile, h("span", { class: "mono" }, one.label), one.after ? t("after", { n: number(one.after / 60, 1) }) : t("at.once"),
      may("operator") ? h("button", { type: "button", class: "button small", onclick: (event) => doing(event.currentTarget, () => act("channel.test", { recipient: one.label }), (said) => (said.fate === "arrived" ? t("test.arrived", { ms: number(said.ms) }) : `${t("test.failed")} ${sentence(said.detail)}`)) }, t("test")) : null));
    shows(recipients, noRecipients, to, () => empty(t("recipients.none"), t("recipients.none.hint"), "duly profile set default --send URL"));
  });
  const stopList = view === "dead" || view === "open" ? deliveries(list, next, view, query) : events(list, next, view, query);
  return () => { stopStatus(); stopList(); };
}

function shows(list, place, items, none) {
  list.wrap.hidden = !items.length;
  fill(place, items.length ? null : none());
}

function pager(next, query, seen, found) {
  fill(next, query.before ? h("a", { class: "button", href: `/alerts?${queryOf({ ...query, before: "" })}` }, t("newest")) : null,
    seen.next ? h("a", { class: "button", href: `/alerts?${queryOf({ ...query, before: seen.next })}` }, found ? t("older") : t("look.on")) : null);
}

function events(place, next, view, query) {
  const list = table([[t("time"), "time"], [t("severity")], [t("status")], [t("reason"), "wide"], [t("sentinel")], [t("device")], [t("notified"), "end"], ["", "actions"]], t("events"), "compact");
  const none = h("div");
  fill(place, list.wrap, none);
  return watch("alerts", { status: view === "active" ? "active" : "", before: query.before ?? "" }, (seen) => {
    if (!seen.alerts) { fill(none, h("p", { class: "notice bad" }, sentence(seen.problem))); return; }
    const size = {};
    for (const one of seen.alerts) size[one.episode] = (size[one.episode] ?? 0) + 1;
    keep(list.body, seen.alerts.map((one) => ({ ...one, together: size[one.episode] })), (one) => `${one.sentinel}/${one.event}`, (one) => {
      const done = one.deliveries.filter((each) => each.state === "done").length;
      return list.row(when(one.time), badge("severity", one.severity), badge("status", one.status), h("div", {}, h("a", { href: `/alert?${queryOf({ sentinel: one.sentinel, event: one.event })}` }, one.reason), one.together > 1 ? h("div", { class: "small muted" }, t("episode", { n: one.together })) : null),
        one.sentinel, one.device || "–", one.deliveries.length ? h("span", { class: "muted" }, h("span", { class: "only-narrow" }, `${t("notified")} `), t("notified.of", { n: number(done), total: number(one.deliveries.length) })) : "–", actions(one));
    });
    shows(list, none, seen.alerts, () => (seen.next ? empty(t("found.none"), t("found.none.alerts")) : view === "active" ? empty(t("alerts.none.active"), t("alerts.none.active.hint")) : empty(t("alerts.none"), t("alerts.none.hint"), "duly profile set default --send console: && duly alert trigger smoke")));
    pager(next, query, seen, seen.alerts.length);
  });
}

/** What can be done about an alert. */
export function actions(one, plain = true) {
  if (!may("operator")) return null;
  const size = plain ? "small" : "";
  const body = { sentinel: one.sentinel, event: one.event };
  const found = [];
  if (one.status === "open") found.push(h("button", { type: "button", class: `button ${size}`, onclick: (event) => doing(event.currentTarget, () => act("alert.ack", body), t("acknowledged")) }, t("acknowledge")));
  if (one.status === "open" || one.status === "acknowledged") found.push(h("button", { type: "button", class: `button ${size}`, onclick: (event) => doing(event.currentTarget, () => act("alert.resolve", body), t("resolved")) }, t("resolve")));
  return h("div", { class: "row" }, found);
}

function deliveries(place, next, view, query) {
  const dead = view === "dead"; // no next try, so no column for it
  const list = table([[t("time"), "time"], [t("reason")], [t("recipient"), "address"], [t("state")], [t("attempts"), "number"], ...(dead ? [] : [[t("next.try"), "time"]]), [t("detail"), "wide"], ["", "actions"]], t("deliveries"));
  const none = h("div");
  fill(place, list.wrap, none);
  return watch("alerts-deliveries", { state: view, before: query.before ?? "" }, (seen) => {
    if (!seen.deliveries) { fill(none, h("p", { class: "notice bad" }, sentence(seen.problem))); return; }
    keep(list.body, seen.deliveries, (one) => `${one.sentinel}/${one.event}/${one.delivery.recipient}/${one.delivery.round}`, (one) => list.row(when(one.time),
      h("a", { href: `/alert?${queryOf({ sentinel: one.sentinel, event: one.event })}` }, one.reason), h("span", { class: "mono" }, one.delivery.recipient), badge("state", one.delivery.state), number(one.delivery.attempts), ...(dead ? [] : [one.delivery.due ? when(one.delivery.due) : "–"]), one.delivery.error ? h("span", { class: "muted" }, sentence(one.delivery.error)) : null, letterActions(one, one.delivery)));
    shows(list, none, seen.deliveries, () => (seen.next ? empty(t("found.none"), t("found.none.alerts")) : empty(t(`deliveries.none.${view}`), t(`deliveries.none.${view}.hint`))));
    pager(next, query, seen, seen.deliveries.length);
  });
}

/** What can be done with a delivery: try it again, or send it to another address. */
export function letterActions(alert, delivery) {
  if (!may("operator")) return null;
  const body = { sentinel: alert.sentinel, event: alert.event };
  const to = delivery.recipient === "none" ? {} : { recipient: delivery.recipient };
  return h("div", { class: "row" },
    h("button", { type: "button", class: "button small", onclick: (event) => doing(event.currentTarget, () => act("deliveries.retry", { ...body, ...to }), t("retry.begun")) }, t(delivery.state === "done" ? "retry.done" : delivery.state === "accepted" && !delivery.attempts ? "retry.now" : "retry")),
    to.recipient ? h("button", { type: "button", class: "button small", onclick: async (event) => {
      const button = event.currentTarget;
      const values = await askFor(t("edit.title"), t("edit.text", { recipient: delivery.recipient }), [["url", t("address"), h("input", { required: true, placeholder: "https://… mailto://…", spellcheck: "false", autocomplete: "off" })]], t("edit.send"));
      if (values) await doing(button, () => act("deliveries.edit", { ...body, ...to, url: values.url.trim() }), t("retry.begun"));
    } }, t("edit")) : null);
}

/** Asks what to silence, and for how long. */
export async function silence(button, { sentinel = "", device = "", reason = "" }) {
  const values = await askFor(t("silence"), t("silence.text"), [
    ["sentinel", t("sentinel"), h("input", { value: sentinel, placeholder: "*" })], ["device", t("device"), h("input", { value: device, placeholder: "*" })], ["reason", t("reason"), h("input", { value: reason, placeholder: "*" })],
    ["lasts", t("silence.lasts"), h("select", {}, options([["900", t("span.min", { n: 15 })], ["3600", t("span.h", { n: 1 })], ["14400", t("span.h", { n: 4 })], ["86400", t("span.h", { n: 24 })], ["604800", t("span.d", { n: 7 })]], "3600"))],
    ["note", t("note"), h("input", { maxlength: "300" })]], t("silence"));
  if (!values) return;
  const wanted = Object.fromEntries(Object.entries(values).filter(([, value]) => value));
  await doing(button, () => act("alert.silence", wanted), t("silenced"));
}
