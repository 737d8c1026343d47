// The stores of the JavaScript package: what was written is there after a crash at any moment, whole or not at all.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { copyFileSync, mkdtempSync, readFileSync, rmSync, statSync, truncateSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, test } from "node:test";
import { FileStorage } from "../../../src/duly/clients/js/src/node.js";
import { policyOf } from "../../../src/duly/clients/js/src/policy.js";
import { sha256 } from "../../../src/duly/clients/js/src/sha256.js";
import { KeyValueStore } from "../../../src/duly/clients/js/src/stores.js";
import { createHash } from "node:crypto";

const folder = mkdtempSync(join(tmpdir(), "duly-js-"));
after(() => rmSync(folder, { recursive: true }));

test("a file that is cut at any byte holds what was written before, whole or not at all", async () => {
  const path = join(folder, "whole");
  const store = new FileStorage(path);
  const sizes = [0];
  for (const [n, text] of ["å", "second", "锁"].entries()) {
    await store.write(new Map([["last", String(n)], [`text-${n}`, text], ["gone", n === 2 ? null : "here"]]));
    sizes.push(statSync(path).size);
  }
  await store.close();
  for (let size = 0; size <= sizes[3]; size++) {
    const cut = join(folder, "cut");
    copyFileSync(path, cut);
    truncateSync(cut, size);
    const again = new FileStorage(cut);
    const whole = sizes.findLastIndex((known) => known <= size);
    assert.equal(again.getItem("last"), whole ? String(whole - 1) : null);
    assert.equal(again.length, whole && 1 + whole + (whole < 3 ? 1 : 0));
    if (size % 25 === 0) again.setItem("more", "x"); // and it can be written to
    await again.close();
    const third = new FileStorage(cut);
    assert.equal(third.getItem("more"), size % 25 ? null : "x");
    await third.close();
    rmSync(cut);
  }
});

test("a file that is damaged in its middle is not used", async () => {
  const path = join(folder, "damaged");
  const store = new FileStorage(path);
  for (const n of ["0", "1", "2"]) store.setItem("n", n);
  await store.close();
  const bytes = readFileSync(path);
  bytes[25] ^= 1;
  writeFileSync(path, bytes);
  assert.throws(() => new FileStorage(path), /damaged in its middle/);
  assert.throws(() => new FileStorage(path), /damaged in its middle/, "and it is not left locked");
});

test("a file does not grow for ever", async () => {
  const path = join(folder, "long");
  const store = new FileStorage(path);
  const text = "x".repeat(50_000);
  for (let n = 0; n < 60; n++) store.setItem("n", text + n);
  await store.close();
  assert.ok(statSync(path).size < 1_200_000);
  const again = new FileStorage(path);
  assert.equal(again.getItem("n"), `${text}59`);
  await again.close();
});

test("two programs on one file are refused, and the file of a killed one is free", async () => {
  const path = join(folder, "shared");
  const code = (end) => `import { FileStorage } from ${JSON.stringify(
    new URL("../../../src/duly/clients/js/src/node.js", import.meta.url).href)};
    new FileStorage(${JSON.stringify(path)}).setItem("by", "child"); ${end}`;
  const run = (end) => execFileSync(process.execPath, ["--input-type=module", "-e", code(end)], { stdio: "pipe" });
  assert.throws(() => run("process.kill(process.pid, 'SIGKILL')"), { signal: "SIGKILL" });
  const store = new FileStorage(path);
  assert.equal(store.getItem("by"), "child");
  assert.throws(() => run(""), /is in use by process/);
  assert.throws(() => new FileStorage(path), /is in use/);
  await store.close();
  await store.close();
  run("");
});

test("a storage of single entries is written whole or not at all, wherever it dies", async () => {
  const first = new Map([["a", "1"], ["b", "1"]]);
  const second = new Map([["a", null], ["b", "2"], ["c", "2"]]);
  for (let deaths = 0; ; deaths++) {
    const items = new Map();
    let left = Infinity;
    const spend = () => { if (left-- <= 0) throw new Error("dead"); };
    const storage = {
      getItem: async (key) => items.get(key) ?? null,
      setItem: async (key, value) => { spend(); items.set(key, value); },
      removeItem: async (key) => { spend(); items.delete(key); },
    };
    const store = new KeyValueStore(storage);
    await store.load();
    await store.write(first);
    left = deaths;
    const died = await store.write(second).then(() => false, () => true);
    left = Infinity;
    const found = Object.fromEntries(await new KeyValueStore(storage).load());
    const before = { a: "1", b: "1" };
    assert.deepEqual(found, deaths === 0 ? before : { b: "2", c: "2" });
    if (!died) break;
    assert.ok(deaths < 20);
  }
});

test("the hash is that of the standard", () => {
  for (const text of ["", "abc", "x".repeat(55), "y".repeat(56), "z".repeat(64), "q".repeat(1_000), "锁"]) {
    assert.equal(sha256(text), createHash("sha256").update(text).digest("hex"));
  }
});

test("limits that make no sense are refused with a sentence", () => {
  const wrong = [
    { countdown: -1 }, { keep: 1, countdown: 2 }, { per_hour: 0 }, { tries: 1.5 }, { heartbeat: 0.5 },
    { retry_first: 0 }, { retry_first: 10, retry_most: 5 }, { summary: 0 }, { debounce: NaN }, { debounse: 1 },
  ];
  for (const limits of wrong) assert.throws(() => policyOf(limits), /\w+ .*\w+/);
  assert.equal(policyOf({ countdown: 10 }).per_hour, 10);
});
