"""Nodes that break a rule of MQTT, with paho.

`sound` breaks none of these. `clean` lets the broker forget its session; `unseen` reports no status;
`strange` has another session in its will; `unconfirmed` publishes no `ack`; `nosy` takes tasks for others;
`ancient` takes old tasks; `plain` answers in JSON, whatever it was asked in; `modern` does not use older
names of fields in answers; `unsure` answers with QoS 0. None of them sends a task again. `gullible` takes any
result for its own; `last` takes the last result of a task that it sent.
"""

import base64
import json
import time
from typing import Any

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion

Json = dict[str, Any]


class BrokenNode:
    def __init__(self, mode: str, host: str, port: int) -> None:
        self.mode = mode
        self.count = 0
        self.known: dict[tuple[str, str], Json] = {}
        self.asked: tuple[str, str] | None = None
        """who asked to relay the task that is under way"""
        self.ends: list[str] = []
        self.client = mqtt.Client(CallbackAPIVersion.VERSION2, "node", clean_session=mode == "clean")
        self.client.username_pw_set("node", "conform")
        session = "other" if mode == "strange" else "s1"
        self.client.will_set(
            "nodes/node/status", json.dumps({"online": False, "session": session}), 1, retain=True
        )
        self.client.on_connect = self.connected
        self.client.on_message = self.heard
        self.client.reconnect_delay_set(0.05, 0.05)  # type: ignore[arg-type]  # parts of a second work, too
        self.client.connect(host, port)
        self.client.loop_start()

    def stop(self) -> None:
        self.client.disconnect()
        self.client.loop_stop()

    def connected(self, client: mqtt.Client, *_: Any) -> None:
        client.subscribe([(f"nodes/node/{kind}", 1) for kind in ("pending", "complete", "failed")])
        if self.mode != "unseen":
            status = {"online": True, "session": "s1", "time": int(time.time())}
            client.publish("nodes/node/status", json.dumps(status), 1, retain=True)

    def heard(self, _client: mqtt.Client, _data: Any, message: mqtt.MQTTMessage) -> None:
        if not message.topic.endswith("/pending"):
            self.ended(json.loads(message.payload), message.topic.endswith("/complete"))
            return
        try:
            task = json.loads(message.payload)
            sender = task.get("sender") or task["sender_client_id"]
            id_ = task.get("msg_id") or task["message_id"]
        except (ValueError, KeyError, AttributeError):
            return
        exp, at = task.get("exp", task.get("expiration", 0)), task.get("time", task.get("timestamp", 0))
        expired = 0 < exp < time.time() or (not exp and at < time.time() - 86_400 and self.mode != "ancient")
        other = task.get("receiver", task.get("receiver_client_id")) != "node" and self.mode != "nosy"
        if expired or other:
            return
        field = "message_id" if "message_id" in task and self.mode != "modern" else "msg_id"
        if self.mode != "unconfirmed":
            self.say(sender, "ack", {field: id_})
        if task["action"] == "relay":
            self.asked, self.ends = (sender, id_), []
            own = {"sender": "node", "receiver": "peer", "msg_id": f"own-{id_}", "action": "count"}
            self.say("peer", "pending", own | {"exp": int(time.time()) + 60, "time": int(time.time())})
            return
        if (sender, id_) not in self.known:
            self.count += 1
            self.known[sender, id_] = self.result(task)
        self.say(sender, "complete", {field: id_} | self.known[sender, id_])

    def ended(self, answer: Json, done: bool) -> None:
        """The end of a task that was sent."""
        if self.asked is None or (answer["msg_id"] != f"own-{self.asked[1]}" and self.mode != "gullible"):
            return
        self.ends.append("done" if done else "failed")
        if self.mode == "last" and len(self.ends) < 2:
            return
        (sender, id_), self.asked = self.asked, None
        self.say(sender, "complete", {"msg_id": id_, "value": {"state": self.ends[-1]}})

    def result(self, task: Json) -> Json:
        value = {"count": self.count}
        if isinstance(task.get("payload"), dict) or self.mode == "plain":
            return {"value": value}
        return {"value": base64.b64encode(json.dumps(value).encode()).decode(), "enc": "base64"}

    def say(self, to: str, kind: str, message: Json) -> None:
        self.client.publish(f"nodes/{to}/{kind}", json.dumps(message), 0 if self.mode == "unsure" else 1)
