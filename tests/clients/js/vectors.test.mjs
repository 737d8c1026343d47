// The JavaScript package passes the conformance vectors: ids and media.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { nextId } from "../../../src/duly/clients/js/src/ids.js";
import { download } from "../../../src/duly/clients/js/src/media.js";
import { eventId } from "../../../src/duly/clients/js/src/monitor.js";

const read = (name) => {
  const file = new URL(`../../../src/duly/testing/vectors/${name}.json`, import.meta.url);
  return JSON.parse(readFileSync(file, "utf8")).cases;
};

test("ids follow on", () => {
  const { mint } = read("ids");
  assert.ok(mint.length);
  for (const { last, now, next } of mint) assert.equal(nextId(last, now), next);
});

test("events have their ids", () => {
  const { event } = read("ids");
  assert.ok(event.length);
  for (const { fields, id } of event) {
    const { reason, device, window_start: at, ...identity } = fields;
    assert.equal(eventId(identity, reason, device, at), id);
  }
});

test("chunks are put together, and a damaged file is not", async () => {
  const { files } = read("media");
  assert.ok(files.length);
  for (const { content, media, chunks } of files) {
    const answer = (chunk) => ({ state: "done", code: 0, data: chunk });
    const app = { send: async (_, type, { n }) => answer(type === "media_download" ? media : chunks[n]) };
    const whole = await download(app, "cam", media.name);
    assert.equal(Buffer.from(whole).toString("base64"), content);
    const damaged = { send: async (_, type, { n }) => answer(
      type === "media_download" ? { ...media, sha256: "0".repeat(64) } : chunks[n]) };
    await assert.rejects(download(damaged, "cam", media.name), /arrived damaged/);
  }
});
