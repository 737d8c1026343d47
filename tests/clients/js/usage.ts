// What a program in TypeScript writes: checked by `tsc --strict`, never run.
import { App, Chat, IndexedDbStore, KeyValueStore, Refused, Sentinel, StoreTaken } from "duly";
import * as small from "duly/app";
import * as people from "duly/chat";
import { FileStorage } from "duly/node";
import type { Store } from "duly/stores";

export async function use(url: string, token: string): Promise<void> {
  const app = new App(url, token, { keep: true, storage: new FileStorage("phone.log") });
  const stop: () => void = app.on("push", ({ device, cursor }) => console.log(device.length + cursor));
  app.on("end", ({ ack }) => console.log(ack?.state === "done"));
  // @ts-expect-error there is no such event
  app.on("pushes", () => undefined);
  try {
    const { state, code } = await app.send("lock-1", "lock_control", { open: true }, { expires: 10 });
    const known: "done" | "failed" | "expired" | "superseded" | "cancelled" | "unknown" = state;
    console.log(known, code + 1);
  } catch (problem) {
    if (problem instanceof Refused) console.log(problem.code, problem.detail.length);
  }
  const picture: Uint8Array = await app.download("cam-1", "cam.jpg", { progress: (done, all) => done / all });
  // @ts-expect-error a device is named by a text
  await app.send(7, "lock_control");
  stop();
  app.close();
  console.log(picture.length, new small.App(url, token).online.size);
  for (const error of [small.Refused, small.Closed, small.MediaError, people.Refused, people.Closed]) error.name;

  const chat = new Chat(url, token);
  chat.on("line", ({ sender, n }) => console.log(sender.length + n));
  const { conv, n } = await chat.send("bob", "hello");
  console.log(conv.length + n);

  const own: Store = { load: async () => new Map(), write: async (changes) => void changes.size };
  const phone = { getItem: async (_: string) => null, setItem: async () => {}, removeItem: async () => {} };
  const stores: Store[] = [own, new KeyValueStore(phone), new IndexedDbStore(), new FileStorage("s.log")];
  const sentinel = new Sentinel(url, token, { store: stores[0], profile: "home", policy: { countdown: 1 } });
  const alert = sentinel.trigger("fall", "watch-1", { severity: "critical", location: { lat: 31.2 } });
  const ruling: string = await alert.stored;
  // @ts-expect-error a severity that there is not
  sentinel.trigger("fall", "watch-1", { severity: "fatal" });
  // @ts-expect-error a limit that there is not
  new Sentinel(url, token, { policy: { debounse: 1 } });
  alert.update({ location: { lat: 31.3 } });
  const { state, event } = await alert.sent;
  console.log(ruling, state, event, sentinel.counts.resent + 1, StoreTaken.name);
  await sentinel.close();
}
