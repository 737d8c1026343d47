// The OpenAPI document of the hub, to read.
import { h, fill } from "../dom.js";
import { t } from "../i18n.js";
import { facts, table } from "../widgets.js";

export default function api(page) {
  const body = h("div", { class: "stack" });
  fill(page, h("div", { class: "page-head" }, h("div", {}, h("h1", {}, t("nav.api")), h("p", { class: "muted" }, t("api.about"))), h("a", { class: "button small plain", href: "/v1/openapi.json", target: "_blank", rel: "noopener" }, "openapi.json")), body);
  fetch("/v1/openapi.json").then((answer) => answer.json()).then((doc) => fill(body, ...render(doc)), () => fill(body, h("p", { class: "notice bad" }, t("unreachable"))));
  return null;
}

function render(doc) {
  const operations = Object.entries(doc.paths).flatMap(([path, methods]) => Object.entries(methods).filter(([, one]) => typeof one === "object" && !Array.isArray(one)).map(([method, one]) => operation(path, method, one)));
  const schemas = Object.entries(doc.components?.schemas ?? {});
  return [
    h("section", { class: "section" }, h("h2", {}, `${doc.info.title} ${doc.info.version}`), doc.info.description ? h("p", { class: "muted" }, doc.info.description) : null, h("div", { class: "panel flush" }, operations)),
    h("section", { class: "section" }, h("h2", {}, t("api.schemas")), h("div", { class: "panel flush" }, schemas.map(([name, schema]) => h("details", { class: "operation", id: `schema-${name}` }, h("summary", {}, h("strong", { class: "mono" }, name), h("span", { class: "muted" }, prose(schema.description))), h("div", {}, properties(schema)))))),
  ];
}

function operation(path, method, one) {
  const parameters = one.parameters ?? [];
  const given = table([[t("name")], [t("api.where")], [t("api.type")], [t("api.meaning")]], t("api.parameters"));
  given.body.append(...parameters.map((p) => given.row(h("span", { class: "mono" }, p.name + (p.required ? " *" : "")), p.in, type(p.schema), p.description ? h("span", {}, prose(p.description)) : "")));
  const schema = one.requestBody?.content?.["application/json"]?.schema;
  return h("details", { class: "operation" },
    h("summary", {}, h("span", { class: `method ${method}` }, method.toUpperCase()), h("code", {}, path), h("span", { class: "muted" }, prose(one.summary))),
    h("div", {}, one.description ? h("p", {}, prose(one.description)) : null,
      parameters.length ? [h("h3", {}, t("api.parameters")), given.wrap] : null,
      schema ? [h("h3", {}, t("api.body")), h("p", {}, type(schema))] : null,
      h("h3", {}, t("api.answers")), facts(Object.entries(one.responses ?? {}).map(([status, said]) => [status, [prose(said.description), " ", type(said.content?.["application/json"]?.schema)]]))));
}

function properties(schema) {
  if (!schema.properties) return h("pre", { tabindex: "0" }, JSON.stringify(schema, null, 2));
  const list = table([[t("name")], [t("api.type")], [t("api.meaning")]], t("api.schemas"));
  const required = new Set(schema.required ?? []);
  list.body.append(...Object.entries(schema.properties).map(([name, one]) => list.row(h("span", { class: "mono" }, name + (required.has(name) ? " *" : "")), type(one), one.description ? h("span", {}, prose(one.description)) : "")));
  return list.wrap;
}

/** A text in which `names` stand between backticks. */
const prose = (text) => (text ?? "").split("`").map((part, i) => (i % 2 ? h("code", {}, part) : part));

/** A type in words, with links to the schemas it names. */
function type(schema) {
  if (!schema) return "";
  if (schema.$ref) { const name = schema.$ref.split("/").at(-1); return h("a", { class: "mono", href: `#schema-${name}`, onclick: () => { document.getElementById(`schema-${name}`).open = true; } }, name); }
  const several = schema.anyOf ?? schema.oneOf;
  if (several) return several.flatMap((one, i) => (i ? [" | ", type(one)] : [type(one)]));
  if (schema.type === "array") return ["[", type(schema.items), "]"];
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  return [schema.type].flat().filter(Boolean).join(" | ");
}
