// Plays scripts of signals, cancels, cuts and restarts to the monitor of the JavaScript package, in virtual time,
// and prints what it did after each step. The scripts come as JSON on stdin.
import { readFileSync } from "node:fs";
import { Monitor } from "../../../src/duly/clients/js/src/monitor.js";
import { policyOf } from "../../../src/duly/clients/js/src/policy.js";

class Watch {
  constructor({ policy, identity, start }) {
    Object.assign(this, { policy: policyOf(policy), identity, now: start, kept: new Map() });
    this.sent = [];
    this.events = [];
    this.begin();
  }

  begin() {
    this.monitor = new Monitor(this.policy, this.identity, () => 0);
    this.monitor.restore(this.kept, this.now);
  }

  settle() {
    const { changes, effects } = this.monitor.take();
    for (const [name, text] of changes) text === null ? this.kept.delete(name) : this.kept.set(name, text);
    return effects.map((effect) => this.seen(effect));
  }

  seen(effect) {
    const { device, reason, event } = effect;
    switch (effect.do) {
      case "ruled":
        if (effect.ruling === "pass" && !this.events.includes(event)) this.events.push(event);
        return ["ruled", device, reason, effect.ruling, effect.until, event, effect.due];
      case "transmit": {
        const { id, kind, data } = effect.message;
        if (!this.sent.includes(id)) this.sent.push(id);
        return ["transmit", id, kind, JSON.parse(JSON.stringify(data))];
      }
      case "ended":
        return ["ended", effect.id, effect.state];
      case "queued":
        return ["queued", event, device, reason];
      case "cancelled":
        return ["cancelled", device, effect.dropped, effect.corrected, effect.held];
      case "in vain":
        return ["in vain", event];
      default:
        return [effect.do];
    }
  }

  wait(seconds) {
    const end = this.now + Math.round(seconds * 1_000_000);
    const seen = [];
    for (let wake; (wake = this.monitor.nextWake()) <= end; ) {
      this.now = Math.max(wake, this.now);
      this.monitor.wake(this.now);
      seen.push(...this.settle());
    }
    this.now = end;
    return seen;
  }

  step([op, ...words]) {
    const { monitor, now } = this;
    if (op === "wait") return this.wait(words[0]);
    if (op === "signal") {
      const [device, reason, severity, countdown] = words;
      monitor.signal({ device, reason, severity, countdown, at: now }, now);
    } else if (op === "back") monitor.back(words[0], now);
    else if (op === "cancel") monitor.cancel(words[0], "", now, now);
    else if (op === "cancel one") monitor.cancel("", this.events[words[0]] ?? "none", now, now);
    else if (op === "change") monitor.change(this.events[words[0]] ?? "none", { location: words[1] }, now, now);
    else if (op === "cut") monitor.lost();
    else if (op === "reach") monitor.reached(now);
    else if (op === "offset") monitor.measured(words[0], now);
    else if (op === "shift") {
      this.now += words[0];
      monitor.shift(words[0]);
    } else if (op === "answer") {
      for (const id of this.sent.splice(0, words[1])) monitor.answered(id, words[0], "", now);
    } else if (op === "restart" || op === "reboot") {
      this.now += words[0] ?? 0;
      this.begin();
    }
    return this.settle();
  }
}

const { scripts, ...setting } = JSON.parse(readFileSync(0, "utf8"));
const traces = scripts.map((script) => {
  const watch = new Watch(setting);
  return script.map((step) => [...watch.wait(0.001), ...watch.step(step)]);
});
process.stdout.write(JSON.stringify(traces));
