// One device: how it is, what it told, and a command from here with its two acknowledgements.
import { h, fill, keep } from "../dom.js";
import { t, number, sentence } from "../i18n.js";
import { act, watch, may, mint, queryOf } from "../api.js";
import { badge, when, since, facts, field, checkbox, table, empty, explain } from "../widgets.js";
import { presence, battery, signal } from "./devices.js";

const ENDS = { done: "good", failed: "bad", expired: "bad", cancelled: "bad", superseded: "warn", unknown: "warn" };

export default function device(page, { name = "" }) {
  const head = h("div", { class: "row" });
  const about = h("div");
  const pushes = table([[t("time"), "time"], [t("kind"), "word"], [t("content"), "wide"]], t("pushes"));
  const none = h("div");
  const form = commandForm(name);
  const content = h("div", { class: "columns" },
    h("div", { class: "stack" }, may("operator") ? form : h("p", { class: "notice info" }, t("viewer.only")),
      h("section", { class: "section" }, h("h2", {}, t("pushes")), h("div", { class: "panel flush" }, pushes.wrap, none))),
    h("section", { class: "section" }, h("h2", {}, t("facts")), h("div", { class: "panel" }, about)));
  const body = h("div", { class: "stack" }, content);
  fill(page, h("p", {}, h("a", { href: "/devices" }, `← ${t("nav.devices")}`)), h("div", { class: "page-head" }, h("div", {}, h("h1", {}, name), head), h("a", { class: "button small plain", href: `/device.json?${queryOf({ name })}`, target: "_blank", rel: "noopener" }, "JSON")), body);
  const types = h("datalist", { id: "types" });
  page.append(types);
  const stop = watch("device", { name }, (seen) => {
    if (seen.problem) { fill(body, h("div", { class: "panel" }, empty(t("device.missing"), sentence(seen.problem)))); return; }
    fill(head, presence(seen), seen.role === "node" ? badge("account", "one") : null);
    if (seen.role === "node" && content.contains(form)) { form.querySelector("form").end(); form.replaceWith(h("p", { class: "notice info" }, t("node.tasks"), " ", h("code", { class: "command" }, `duly call ${name} turn_on`))); }
    if (!types.childElementCount) fill(types, seen.types.map((type) => h("option", { value: type })));
    fill(about, facts([[t("last.heard"), since(seen.last_heard)], [t("version"), seen.version || "–"], [t("battery"), battery(seen.battery)], [t("signal"), signal(seen.signal)], [t("queue"), number(seen.queue)], [t("commanded.by"), seen.apps.join(", ") || "–"],
      [t("nav.messages"), h("a", { href: `/messages?${queryOf({ to: name })}` }, t("messages.of"))]]));
    keep(pushes.body, seen.pushes, (one) => one.n, (one) => pushes.row(when(one.at), h("span", { class: "mono" }, one.type), h("span", { class: "mono" }, one.data)));
    pushes.wrap.hidden = !seen.pushes.length;
    fill(none, seen.pushes.length ? null : empty(t("pushes.none"), t("pushes.none.hint")));
  });
  return () => { stop(); content.querySelector("form")?.end?.(); };
}

/** The form of a command. Its id is minted with the form and kept with it, also over a reload: however often it is sent, it is one command. */
function commandForm(name) {
  const place = `duly.command.${name}`;
  const stored = () => { try { return JSON.parse(sessionStorage.getItem(place)) ?? {}; } catch { return {}; } };
  const store = (what) => { try { sessionStorage.setItem(place, JSON.stringify(what)); } catch { /* it holds for this page */ } };
  let now = { id: mint(), type: "lock_control", data: '{"open": true}', sent: false, ...stored() };
  const type = h("input", { value: now.type, list: "types", required: true, autocomplete: "off", spellcheck: "false", maxlength: "64" });
  const data = h("textarea", { rows: "4", spellcheck: "false" });
  data.value = now.data;
  const [queueField, queue] = checkbox(t("command.queue"), { checked: now.queue });
  const send = h("button", { type: "submit", class: "button primary" }, t("send"));
  const again = h("button", { type: "button", class: "button primary", hidden: true, onclick: () => { now = { ...now, id: mint(), sent: false }; store(now); stop?.(); stop = null; lock(false); fill(result); } }, t("command.new"));
  const result = h("div", { class: "stack", role: "status" });
  let stop = null;
  const lock = (on) => { // what was sent is one command; the next one has a button of its own
    type.disabled = data.disabled = queue.disabled = on;
    again.hidden = !on;
    send.textContent = t(on ? "command.repeat" : "send");
    send.className = on ? "button" : "button primary";
  };

  function follow() {
    stop?.();
    lock(true);
    stop = watch("message", { scope: "dashboard", id: now.id }, (seen) => {
      if (seen.problem) { fill(result, h("p", { class: "notice warn" }, t("command.not.stored"))); return; }
      const end = ENDS[seen.state];
      fill(result, h("div", { class: "acks" },
        h("div", { class: "ack good" }, h("span", { class: "step" }, t("ack.first")), h("strong", {}, t("ack.stored"))),
        h("div", { class: `ack ${end ?? ""}` }, h("span", { class: "step" }, t("ack.second")), h("strong", { "data-state": seen.state }, t(`ack.${seen.state}`)), seen.ack ? h("span", { class: "small" }, [sentence(seen.ack.detail ?? ""), seen.ack.data === undefined ? "" : JSON.stringify(seen.ack.data)].filter(Boolean).join(" · ")) : null)),
      h("p", { class: "small" }, h("a", { href: `/message?${queryOf({ scope: "dashboard", id: now.id })}` }, t("command.trace"))));
    });
  }

  const form = h("form", { class: "form", onsubmit: async (event) => {
    event.preventDefault();
    try { JSON.parse(data.value || "{}"); } catch (problem) { fill(result, h("p", { class: "notice bad" }, `${t("data.not.json")} ${problem.message}`)); return; }
    now = { ...now, type: type.value.trim(), data: data.value, queue: queue.checked, sent: true };
    store(now);
    try {
      const { server_ack: said } = await act("command.send", { id: now.id, device: name, type: now.type, data: now.data, ...(now.queue ? { queue: "yes" } : {}) });
      if (said.code === 0 || said.code === 5) { follow(); return; }
      now = { ...now, sent: false };
      store(now);
      fill(result, h("p", { class: "notice bad" }, `${t("command.refused")} ${said.error === "offline" && !now.queue ? t("command.offline") : sentence(said.detail ?? said.error ?? String(said.code))}`));
    } catch (problem) {
      fill(result, h("p", { class: "notice bad" }, explain(problem), " ", t("command.again")));
    }
  } }, h("div", { class: "filters" }, field(t("kind"), type)), field(t("command.data"), data), queueField, h("div", { class: "row" }, again, send), result);
  form.end = () => stop?.();
  if (now.sent) queueMicrotask(follow);
  return h("section", { class: "section" }, h("h2", {}, t("command.title")), h("div", { class: "panel" }, form));
}
