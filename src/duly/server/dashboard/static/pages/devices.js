// Devices and nodes: who is there, and how they are.
import { h, fill, keep } from "../dom.js";
import { t, word, number, sentence } from "../i18n.js";
import { watch, queryOf } from "../api.js";
import { badge, since, field, options, table, empty, fold, nil } from "../widgets.js";

export default function devices(page, query, { go }) {
  const name = h("input", { type: "search", value: query.name ?? "", autocomplete: "off", spellcheck: "false" });
  const only = h("select", {}, options([["", t("all")], ["online", word("presence", "online")], ["offline", word("presence", "offline")], ["device", word("account", "device")], ["node", word("account", "node")]], query.only ?? ""));
  const form = h("form", { class: "filters", role: "search", "aria-label": t("find.devices"), onsubmit: (event) => { event.preventDefault(); go(`/devices?${queryOf({ name: name.value.trim(), only: only.value })}`); } },
    field(t("name"), name), field(t("show"), only), h("div", { class: "row" }, h("button", { type: "submit", class: "button primary" }, t("find"))));
  only.addEventListener("change", () => form.requestSubmit());
  const about = h("p", { class: "muted" });
  const list = table([[t("name")], [t("presence")], [t("last.heard"), "time end"], [t("version")], [t("battery"), "number"], [t("signal"), "number"], [t("queue"), "number"], [t("commanded.by"), "aside"]], t("nav.devices"), "compact two");
  const state = h("div");
  const next = h("div", { class: "row" });
  fill(page, h("div", { class: "page-head" }, h("div", {}, h("h1", {}, t("nav.devices")), about), h("a", { class: "button small plain", href: `/devices.json?${queryOf(query)}`, target: "_blank", rel: "noopener" }, "JSON")),
    h("section", { class: "panel" }, fold(form, Object.keys(query).length > 0)), h("section", { class: "panel flush" }, list.wrap, state), h("div", { class: "pager" }, h("span"), next));
  return watch("devices", query, (seen) => {
    if (!seen.devices) { fill(state, h("p", { class: "notice bad" }, sentence(seen.problem))); return; }
    about.textContent = t("devices.about", { online: number(seen.online), total: number(seen.total) });
    keep(list.body, seen.devices, (one) => one.name, (one) => list.row(
      h("a", { href: `/device?${queryOf({ name: one.name })}` }, one.name), h("div", { class: "row" }, presence(one), one.role === "node" ? badge("account", "one") : null), since(one.last_heard), one.version || "–",
      battery(one.battery), signal(one.signal), one.queue ? h("span", {}, h("span", { class: "only-narrow" }, `${t("queue")} `), number(one.queue)) : nil("0"), one.apps.join(", ") || "–"));
    list.wrap.hidden = !seen.devices.length;
    fill(state, seen.devices.length ? null : seen.total ? empty(t("found.none"), t("found.none.hint")) : empty(t("devices.none"), t("devices.none.hint"), "duly add device lock && duly device lock"));
    fill(next, query.after ? h("a", { class: "button", href: `/devices?${queryOf({ ...query, after: "" })}` }, t("first.page")) : null, seen.next ? h("a", { class: "button", href: `/devices?${queryOf({ ...query, after: seen.next })}` }, t("next.page")) : null);
  });
}

export function presence(one) {
  if (one.stale) return badge("presence", "stale");
  return badge("presence", one.online ? "online" : "offline");
}

export const signal = (level) => (level === null || level === undefined ? "–" : `${String(level).replace("-", "\u2212")} dBm`);

export function battery(level) {
  if (level === null || level === undefined) return "–";
  return typeof level === "number" ? h("span", { class: level < 15 ? "badge bad" : null }, `${level} %`) : String(level);
}
