// One message: what it is, everything that happened to it, and what can be done with it.
import { h, fill, keep } from "../dom.js";
import { t, word, distance, sentence, time } from "../i18n.js";
import { act, watch, may, mint, queryOf } from "../api.js";
import { badge, when, facts, levelOf, doing, askFor, options, empty, table } from "../widgets.js";

export default function message(page, query, { go }) {
  const { scope = "", id = "" } = query;
  const head = h("div", { class: "row" });
  const actions = h("div", { class: "row" });
  const about = h("div");
  const timeline = h("ol", { class: "timeline" });
  const body = h("div", { class: "stack" });
  const json = h("a", { class: "button small plain", href: `/message.json?${queryOf({ scope, id })}`, target: "_blank", rel: "noopener" }, "JSON");
  fill(page, h("p", {}, h("a", { href: "/messages" }, `← ${t("nav.messages")}`)),
    h("div", { class: "page-head" }, h("div", {}, h("h1", { class: "mono" }, id), head), h("div", { class: "row" }, actions, json)),
    body);
  const whole = [h("div", { class: "columns" },
    h("section", { class: "section" }, h("h2", {}, t("timeline")), h("div", { class: "panel" }, timeline)),
    h("div", { class: "stack" }, h("section", { class: "section" }, h("h2", {}, t("facts")), h("div", { class: "panel" }, about)), h("section", { class: "section", id: "data" })))];
  let resendId = mint();

  function buttons(seen) {
    const found = [];
    if (!may("operator")) return found;
    if (seen.may.resend) found.push(h("button", { type: "button", class: "button", onclick: async (event) => {
      const button = event.currentTarget;
      const values = await askFor(t("resend.title"), t("resend.text"), [], t("resend"));
      if (!values) return;
      const sent = await doing(button, () => act("message.resend", { scope, id, new_id: resendId, queue: "yes" }));
      if (sent) { resendId = mint(); go(`/message?${queryOf({ scope: sent.scope, id: sent.id })}`); }
    } }, t("resend")));
    if (seen.may.cancel) found.push(h("button", { type: "button", class: "button danger", onclick: async (event) => {
      const button = event.currentTarget;
      const values = await askFor(t("cancel.title"), t("cancel.text"), [["why", t("why"), h("input", { maxlength: "300" })]], t("cancel"), true);
      if (values) await doing(button, () => act("message.cancel", { scope, id, why: values.why }), t("cancelled"));
    } }, t("cancel")));
    if (seen.may.settle) found.push(h("button", { type: "button", class: "button primary", onclick: async (event) => {
      const button = event.currentTarget;
      const values = await askFor(t("settle.title"), t("settle.text"), [["as", t("settle.as"), h("select", {}, options([["done", word("state", "done")], ["failed", word("state", "failed")]], "done"))], ["why", t("why"), h("input", { required: true, maxlength: "300" })]], t("settle"));
      if (values) await doing(button, () => act("message.settle", { scope, id, as: values.as, why: values.why }), t("settled"));
    } }, t("settle")));
    return found;
  }

  let said = "";
  return watch("message", { scope, id }, (seen) => {
    if (seen.problem) {
      fill(body, h("div", { class: "panel" }, empty(t("message.missing"), sentence(seen.problem))));
      return;
    }
    if (!body.contains(timeline)) fill(body, whole);
    fill(head, badge("state", seen.state), h("span", { class: "muted" }, `${seen.type} · ${seen.scope} → ${seen.to}`));
    const may_ = JSON.stringify(seen.may);
    if (may_ !== said) { said = may_; fill(actions, buttons(seen)); }
    keep(timeline, steps(seen), (step, i) => step.key, (step) => h("li", {}, h("span", { class: `mark ${step.level}` }), h("div", {}, h("div", { class: "what" }, step.what), step.why ? h("div", { class: "why" }, step.why) : null), h("div", { class: "times" }, step.at ? when(step.at, true) : null, step.after ? h("span", { class: "after" }, step.after) : null)));
    fill(about, facts([[t("sender"), seen.scope], [t("recipient"), seen.to], [t("kind"), h("span", { class: "mono" }, seen.type)], [t("accepted.at"), when(seen.accepted_at, true)], [t("moved.at"), when(seen.moved_at, true)],
      seen.exp ? [t("expires"), when(seen.exp)] : null, [t("remembered"), when(seen.until)], seen.ack ? [t("answer"), `${seen.ack.code} · ${sentence(seen.ack.detail ?? "") || word("state", seen.state)}`] : null, seen.line ? [t("receipts"), h("code", {}, JSON.stringify(seen.line))] : null]));
    const data = page.querySelector("#data");
    const content = JSON.stringify([seen.data, seen.ack?.data, seen.deliveries]);
    if (data.dataset.said !== content) {
      data.dataset.said = content;
      const sent = table([[t("recipient"), "wide"], [t("state")], [t("attempts"), "number"]], t("deliveries"));
      sent.body.append(...seen.deliveries.map((one) => {
        const said = one.error ? sentence(one.error) : one.next_at ? t("next.at", { at: time(one.next_at) }) : "";
        return sent.row(h("div", {}, one.recipient, said ? h("div", { class: "small muted" }, said) : null), badge("state", one.state), String(one.attempts));
      }));
      fill(data, seen.deliveries.length ? [h("h2", {}, t("deliveries")), h("div", { class: "panel flush" }, sent.wrap)] : null,
        h("h2", {}, t("content")), seen.private ? h("p", { class: "muted" }, t("content.private")) : h("pre", { tabindex: "0", "aria-label": t("content") }, seen.data ?? ""),
        seen.ack?.data !== undefined && !seen.private ? [h("h2", {}, t("answer")), h("pre", { tabindex: "0", "aria-label": t("answer") }, JSON.stringify(seen.ack.data, null, 2))] : null);
    }
  });
}

const ENDS = ["done", "failed", "expired", "superseded", "cancelled", "unknown"];
const INFO = ["stored", "fresh", "sent", "delivered", "arrived", "told"];
const WARN = ["duplicate", "in doubt", "at work"];

const level = (what) => (INFO.includes(what) ? "info" : WARN.includes(what) ? "warn" : ["not sent", "refused", "conflict", "stale", "offline"].includes(what) ? "bad" : levelOf(what));

/** What happened, in the order that the hub gives it, and that it still waits. */
function steps(seen) {
  const found = seen.timeline.map((step, i) => ({
    key: `${i}`, at: step.at, level: level(step.what), after: step.what === "made" ? "" : distance(step.at - seen.accepted_at),
    what: word("hop", step.what) + (step.attempt ? ` · ${t("attempt", { n: step.attempt })}` : ""), why: [step.what === "told" || step.what === "not told" ? word("state", step.detail) : sentence(step.detail ?? ""), step.hub].filter(Boolean).join(" · "),
  }));
  if (!ENDS.includes(seen.state)) found.push({ key: "waits", at: 0, level: "", after: "", what: t("waiting"), why: t("waiting.why") });
  return found;
}
