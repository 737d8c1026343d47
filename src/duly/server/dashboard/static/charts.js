// Charts over time, drawn by uPlot. A chart has a text beside it that says the same: the newest values, or those
// at the pointer, which all charts of a page show for the same moment.
import { h, fill } from "./dom.js";
import { t, figure, number, span, time } from "./i18n.js";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** A chart of some columns: `lines` are [column, label, colour]; `whole`: what it shows is counted, so its axis has no fractions. Returns its element, `draw(data)` and `end()`. */
export function chart(title, lines, unit, whole = false) {
  const box = h("div", { class: "chart", role: "img", "aria-label": title });
  const summary = h("div", { class: "legend" });
  const about = h("span", { class: "small muted" }, unit);
  const element = h("figure", { class: "panel chart-box" }, h("figcaption", { class: "row spread" }, h("h3", {}, title), about), box, summary);
  let plot = null;
  let shown = "";
  let drawn = [[]];
  const size = () => ({ width: Math.max(200, box.clientWidth), height: 190 });

  function draw({ columns, rows, seconds }) {
    const at = lines.map(([column]) => columns.indexOf(column));
    const points = withHoles(rows, seconds);
    const data = [points.map((row) => row[0] / 1000), ...at.map((i) => points.map((row) => row[i] ?? null))];
    drawn = data;
    tell(plot?.cursor.idx ?? null);
    box.setAttribute("aria-label", `${title}: ${lines.map(([, label], i) => `${label} ${said(i, data[0].length - 1)}`).join(", ")}`);
    if (rows.length < 2) {
      plot?.destroy();
      plot = null;
      fill(box, h("p", { class: "empty small" }, t("chart.empty", { span: span(2 * seconds) })));
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

  const said = (line, at) => figure(drawn[line + 1]?.[at]);

  /** Says the values at a place of the chart, or the newest ones. */
  function tell(place) {
    const here = place !== null && place < drawn[0].length;
    const at = here ? place : drawn[0].length - 1;
    fill(summary, lines.map(([, label, c], i) => h("span", {}, h("span", { class: `swatch ${c}` }), `${label} `, h("strong", {}, said(i, at)))));
    about.textContent = [here ? time(drawn[0][at] * 1000) : "", unit].filter(Boolean).join(" · ");
  }

  function settings() {
    const grid = { stroke: colour("line"), width: 1 };
    const axis = { stroke: colour("muted"), grid, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    return {
      ...size(),
      padding: [8, 30, 0, 0],
      cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false }, sync: { key: "duly" } },
      hooks: { setCursor: [(one) => tell(one.cursor.idx ?? null)] },
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

/** The rows with a hole where the hub was not there: a line that goes on through it would tell what was not measured. */
export function withHoles(rows, seconds) {
  const found = [];
  for (const row of rows) {
    const before = found.at(-1);
    if (before && row[0] - before[0] > 5000 * seconds) found.push([before[0] + 1000 * seconds]);
    found.push(row);
  }
  return found;
}

function clock(at, step) {
  const date = new Date(at * 1000);
  const two = (n) => String(n).padStart(2, "0");
  if (step >= 86400) return `${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  if (step >= 60) return `${two(date.getHours())}:${two(date.getMinutes())}`;
  return `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}
