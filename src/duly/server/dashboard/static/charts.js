// Charts over time, drawn by uPlot. A chart has a text beside it that says the same.
import { h, fill } from "./dom.js";
import { t, figure, number } from "./i18n.js";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** A chart of some columns: `lines` are [column, label, colour]; `whole`: what it shows is counted, so its axis has no fractions. Returns its element, `draw(data)` and `end()`. */
export function chart(title, lines, unit, whole = false) {
  const box = h("div", { class: "chart", role: "img", "aria-label": title });
  const summary = h("div", { class: "legend" });
  const element = h("figure", { class: "panel chart-box" }, h("figcaption", { class: "row spread" }, h("h3", {}, title), h("span", { class: "small muted" }, unit)), box, summary);
  let plot = null;
  let shown = "";
  const size = () => ({ width: Math.max(200, box.clientWidth), height: 190 });

  function draw({ columns, rows, seconds }) {
    const at = lines.map(([column]) => columns.indexOf(column));
    const times = rows.map((row) => row[0] / 1000);
    const data = [times, ...at.map((i) => rows.map((row) => row[i]))];
    const last = rows.at(-1);
    fill(summary, lines.map(([, label, c], i) => h("span", {}, h("span", { class: `swatch ${c}` }), `${label} `, h("strong", {}, last ? figure(last[at[i]]) : "–"))));
    box.setAttribute("aria-label", `${title}: ${lines.map(([, label], i) => `${label} ${last ? figure(last[at[i]]) : "–"}`).join(", ")}`);
    if (rows.length < 2) {
      plot?.destroy();
      plot = null;
      fill(box, h("p", { class: "empty small" }, t("chart.empty")));
      return;
    }
    const kind = `${seconds}`;
    if (!plot || shown !== kind) {
      plot?.destroy();
      box.replaceChildren();
      shown = kind;
      plot = new globalThis.uPlot(settings(), data, box);
    } else {
      plot.setData(data);
    }
  }

  function settings() {
    const grid = { stroke: colour("line"), width: 1 };
    const axis = { stroke: colour("muted"), grid, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    return {
      ...size(),
      padding: [8, 18, 0, 0],
      cursor: { y: false, points: { size: 6 } },
      legend: { show: false },
      scales: { x: { time: true }, y: { range: (_, low, high) => [0, Math.max(high * 1.15, 1)] } },
      axes: [
        { ...axis, space: 70, size: 28, values: (_, splits, __, ___, step) => splits.map((at) => clock(at, step)) },
        { ...axis, size: 46, ...(whole ? { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5] } : {}), values: (_, splits) => splits.map((value) => number(value, value < 10 ? 1 : 0)) },
      ],
      series: [{}, ...lines.map(([, label, c]) => ({ label, stroke: colour(c), width: 1.75, points: { show: false } }))],
    };
  }

  const resized = new ResizeObserver(() => plot?.setSize(size()));
  resized.observe(box);
  return { element, draw, end: () => { resized.disconnect(); plot?.destroy(); plot = null; } };
}

function clock(at, step) {
  const date = new Date(at * 1000);
  const two = (n) => String(n).padStart(2, "0");
  if (step >= 86400) return `${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  if (step >= 60) return `${two(date.getHours())}:${two(date.getMinutes())}`;
  return `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}
