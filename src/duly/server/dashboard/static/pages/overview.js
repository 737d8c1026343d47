// The overview: rates, latencies, what is pending, health, and charts.
import { h, fill, keep } from "../dom.js";
import { t, word, figure, milliseconds, span, number, bytes, sentence } from "../i18n.js";
import { watch } from "../api.js";
import { tile, segments, table, empty, tally } from "../widgets.js";
import { chart } from "../charts.js";

const REFUSED = ["refused", "conflict", "stale"];
const OUTCOMES = ["accepted", "done", "failed", "expired", "unknown", "superseded", "cancelled", "duplicate", "refused"];
const TODO = { duly_oldest_pending_seconds: "/messages?state=open", duly_dead_letters: "/alerts?view=dead" };
const TILES = ["accepted", "done", "latency", "p99", "pending", "devices", "duplicate", "retries", "superseded", "refused", "unknown", "commit"];

export default function overview(page) {
  const about = h("p", { class: "muted" });
  const tiles = Object.fromEntries(TILES.map((name) => [name, tile(t(`tile.${name}`))]));
  const health = h("div", { class: "health" });
  const attention = h("div", { class: "stack", role: "status", "aria-label": t("attention") });
  const outcomes = table([[t("kind"), "word"], ...OUTCOMES.map((name) => [word("state", name), "number"])], t("outcomes"));
  const nothing = h("div");
  const charts = [
    chart(t("chart.rates"), [["accepted", word("state", "accepted"), "c1"], ["done", word("state", "done"), "c2"], ["duplicate", word("state", "duplicate"), "c3"], ["refused", word("state", "refused"), "c4"], ["retries", word("state", "retries"), "c5"]], t("per.second")),
    chart(t("chart.latency"), [["p50_ms", "p50", "c1"], ["p99_ms", "p99", "c3"]], "ms"),
    chart(t("chart.pending"), [["pending", word("state", "pending"), "c1"], ["connections", word("state", "connections"), "c6"]], "", true),
    chart(t("chart.commit"), [["commit_p50_ms", "p50", "c2"], ["commit_p99_ms", "p99", "c3"]], "ms"),
  ];
  let stopChart = null;
  const watchChart = (name) => {
    stopChart?.();
    stopChart = watch("chart", { span: name }, (data) => { if (data.rows) charts.forEach((one) => one.draw(data)); });
  };
  fill(page,
    h("div", { class: "page-head" }, h("div", {}, h("h1", {}, t("nav.overview")), about), h("a", { class: "button small plain", href: "/overview.json", target: "_blank", rel: "noopener" }, "JSON")),
    attention,
    h("section", { class: "tiles", "aria-label": t("figures") }, TILES.map((name) => tiles[name].element)),
    h("section", { class: "section" }, h("h2", {}, t("health")), h("div", { class: "panel" }, health)),
    h("section", { class: "section" }, h("div", { class: "section-head" }, h("h2", {}, t("charts")),
      segments(t("chart.span"), [["minutes", t("span.minutes")], ["hours", t("span.hours")], ["days", t("span.days")]], "minutes", watchChart)),
    h("div", { class: "charts" }, charts.map((one) => one.element))),
    h("section", { class: "section" }, h("h2", {}, t("outcomes")), h("div", { class: "panel flush" }, nothing, outcomes.wrap)));

  const stop = watch("overview", {}, (seen) => {
    if (!seen.rates) return;
    about.textContent = t("hub.about", { hub: seen.hub, span: span((seen.time - seen.started) / 1000) });
    const rate = (name) => seen.rates[name] ?? 0;
    const counts = Object.entries(seen.metrics.duly_messages_total ?? {}).map(([key, value]) => {
      const at = key.lastIndexOf("/");
      return [key.slice(0, at) || "–", REFUSED.includes(key.slice(at + 1)) ? "refused" : key.slice(at + 1), value];
    });
    const total = (name) => counts.reduce((sum, [, outcome, value]) => (outcome === name ? sum + value : sum), 0);
    for (const name of ["accepted", "done", "duplicate", "superseded", "refused", "unknown"]) {
      tiles[name].set(figure(rate(name)), { unit: t("a.second"), about: t("total", { n: number(total(name)) }), level: name === "unknown" && rate(name) > 0 ? "warning" : "" });
    }
    tiles.retries.set(figure(rate("retries")), { unit: t("a.second"), about: t("total", { n: number(Object.values(seen.metrics.duly_retries_total ?? {})[0] ?? 0) }) });
    const lasted = (name) => milliseconds(seen.rates[name] || null); // 0: nothing was measured within the last seconds
    const [p50, u50] = lasted("p50_ms");
    const [p99, u99] = lasted("p99_ms");
    const all = seen.latencies["duly_end_to_end_seconds/total"];
    const overall = (seconds) => (all?.count ? t("since.start", { n: milliseconds(seconds * 1000).join(" ") }) : "");
    tiles.latency.set(p50, { unit: u50, about: overall(all?.p50) });
    tiles.p99.set(p99, { unit: u99, about: overall(all?.p99) });
    const pending = one(seen.metrics.duly_pending) + one(seen.metrics.duly_waiting);
    const oldest = one(seen.metrics.duly_oldest_pending_seconds);
    tiles.pending.set(number(pending), { about: pending ? t("oldest", { span: span(oldest) }) : "", level: pending && oldest > 300 ? "warning" : "" });
    tiles.devices.set(`${number(seen.devices.online)}/${number(seen.devices.total)}`, { about: seen.devices.nodes ? t("nodes.count", { online: number(seen.devices.nodes_online), total: number(seen.devices.nodes) }) : "" });
    const [c50, cu] = lasted("commit_p50_ms");
    tiles.commit.set(c50, { unit: cu, about: cu ? `p99 ${lasted("commit_p99_ms").join(" ")}` : "" });
    attention.hidden = !seen.thresholds.length;
    keep(attention, seen.thresholds, (one) => one.metric, (one) => h("div", { class: "notice warn" }, h("strong", {}, t("attention.line", { what: word("metric", one.metric), value: `${number(one.value, 1)} ${one.unit}`.trim() })), " · ", TODO[one.metric] ? h("a", { href: TODO[one.metric] }, word("advice", one.metric)) : word("advice", one.metric)));
    keep(health, parts(seen), (part) => part.name, (part) => h("div", { class: "part" }, h("span", { class: `dot ${part.level}` }), h("span", { class: "name" }, part.name, h("span", { class: "visually-hidden" }, `: ${part.level === "good" ? t("healthy") : part.level === "bad" ? t("in.trouble") : t("not.used")}`)), h("span", { class: "about" }, part.about)));
    const kinds = {};
    for (const [kind, outcome, value] of counts) (kinds[kind] ??= {})[outcome] = (kinds[kind][outcome] ?? 0) + value;
    const rows = Object.entries(kinds).sort(([a], [b]) => a.localeCompare(b));
    fill(nothing, rows.length ? null : empty(t("nothing.yet"), t("overview.hint"), "duly add device lock && duly device lock"));
    outcomes.wrap.hidden = !rows.length;
    keep(outcomes.body, rows, ([kind]) => kind, ([kind, of]) => outcomes.row(h("span", { class: "mono" }, kind), ...OUTCOMES.map((name) => tally(of[name]))));
  });
  watchChart("minutes");
  return () => { stop(); stopChart?.(); charts.forEach((each) => each.end()); };
}

const one = (values) => Object.values(values ?? {})[0] ?? 0;

function parts(seen) {
  const { ledger: looked, notifier, disk, broker, problems, down } = seen.health;
  const ledger = down ? { problem: down } : looked; // the hub knows at once that nothing can be stored
  const found = [];
  found.push({ name: t("part.ledger"), level: ledger?.problem ? "bad" : "good", about: ledger?.problem ? sentence(ledger.problem) : `${ledger?.engine ?? ""} · ${number(ledger?.messages)} ${t(ledger?.messages === 1 ? "messages.one" : "messages.word")} · ${bytes(ledger?.bytes)}` });
  found.push(broker ? { name: t("part.broker"), level: broker.problem ? "bad" : "good", about: broker.problem ? sentence(broker.problem) : `${broker.embedded ? t("embedded") : t("outside")} · ${broker.url}` } : { name: t("part.broker"), level: "", about: t("broker.off") });
  found.push(notifier ? { name: t("part.notifier"), level: notifier.problem ? "bad" : "good", about: notifier.problem ? sentence(notifier.problem) : `${number(notifier.ms, 1)} ms` } : { name: t("part.notifier"), level: "", about: t("notifier.off") });
  found.push({ name: t("part.hubs"), level: "good", about: `${seen.hubs.length > 1 ? `${seen.hubs.length} · ` : ""}${seen.hubs.map((hub) => hub.name).join(", ")}` });
  if (disk) found.push({ name: t("part.disk"), level: disk.free / disk.total < 0.05 ? "bad" : "good", about: t("disk.free", { free: bytes(disk.free), total: bytes(disk.total) }) });
  const broken = Object.entries(problems ?? {});
  found.push({ name: t("part.tasks"), level: broken.length ? "bad" : "good", about: broken.length ? broken.map(([name, why]) => `${name}: ${sentence(why)}`).join("; ") : t("tasks.fine") });
  return found;
}
