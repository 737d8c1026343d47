// Builds the page. Text only ever becomes text: there is no way here to turn a string into markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element: `h("a", {href: "/", class: "x", onclick: f}, "text", child)`. Null children are left out. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name === "value") element.value = value;
    else if (name === "checked" || name === "disabled" || name === "hidden" || name === "selected" || name === "required") element[name] = Boolean(value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  put(element, ...children);
  return element;
}

/** Appends children: elements, texts, or lists of them. */
export function put(element, ...children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

/** Replaces what is in an element. */
export function fill(element, ...children) {
  element.replaceChildren();
  return put(element, ...children);
}

/** Sets a text, if it differs: what is selected stays selected. */
export function say(element, text) {
  if (element.textContent !== String(text)) element.textContent = String(text);
}

const FOCUSABLE = "a[href], button, input, select, textarea, [tabindex]";

/** Brings a list up to date: a row whose item has not changed keeps its element, and with it focus and selection. */
export function keep(parent, items, keyOf, render) {
  const before = parent.kept ?? new Map();
  const after = new Map();
  const rows = [];
  for (const item of items) {
    const key = keyOf(item);
    const said = JSON.stringify(item);
    const old = before.get(key);
    if (old && old.said === said) {
      after.set(key, old);
      rows.push(old.row);
      continue;
    }
    const row = render(item);
    if (old && old.row.contains(document.activeElement)) {
      const at = [...old.row.querySelectorAll(FOCUSABLE)].indexOf(document.activeElement);
      queueMicrotask(() => row.querySelectorAll(FOCUSABLE)[at]?.focus());
    }
    after.set(key, { said, row });
    rows.push(row);
  }
  parent.kept = after;
  const same = rows.length === parent.childNodes.length && rows.every((row, i) => parent.childNodes[i] === row);
  if (!same) parent.replaceChildren(...rows);
}

const PATHS = {
  overview: "M3 3h7v9H3zM14 3h7v5h-7zM14 12h7v9h-7zM3 16h7v5H3z",
  messages: "M4 5h16v11H8l-4 4z",
  devices: "M7 3h10v18H7zM11 17h2",
  alerts: "M12 3a6 6 0 0 0-6 6v4l-2 3h16l-2-3V9a6 6 0 0 0-6-6M10 19a2 2 0 0 0 4 0",
  chat: "M3 6h12v8H8l-5 4zM15 9h6v11l-4-3h-6v-3",
  api: "M8 7l-5 5 5 5M16 7l5 5-5 5M13 5l-2 14",
  audit: "M6 3h9l4 4v14H6zM9 10h7M9 14h7M9 18h4",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8M12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.4 1.4M17.6 17.6L19 19M5 19l1.4-1.4M17.6 6.4L19 5",
};

/** A small picture that stands beside a text. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  for (const [key, value] of Object.entries({ viewBox: "0 0 24 24", fill: "none", stroke: "currentColor", "stroke-width": "1.8", "stroke-linecap": "round", "stroke-linejoin": "round", "aria-hidden": "true" })) svg.setAttribute(key, value);
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", PATHS[name]);
  svg.append(path);
  return svg;
}
