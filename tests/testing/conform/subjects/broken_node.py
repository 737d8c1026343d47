"""Nodes that break a rule of MQTT, with paho.

`sound` breaks none of these. `clean` lets the broker forget its session; `unseen` reports no status;
`strange` has another session in its will; `unconfirmed` publishes no `ack`, `terse` none for a repeat; `nosy`
takes tasks for others; `ancient` takes old tasks; `plain` answers in JSON, whatever it was asked in; `modern`
does not use older names of fields in answers; `unsure` answers with QoS 0. None of them sends a task again.
`gullible` takes any result for its own; `last` takes the last result of a task that it sent. `wildcard`
subscribes to all its topics with QoS 0; `renamed` has another client id at each connection; `unnamed` brings
no name and password; `resumed` has the same session at each connection; `dated` takes no task without `exp`;
`wordless` answers with nothing; `nameless` sends a task without an id; `recent` passes over tasks with
older names of fields, and `encoded` over those that are not in base64.
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
        if mode != "unnamed":
            self.client.username_pw_set("node", "conform")
        self.connections = 0
        self.client.on_pre_connect = self.connecting
        self.client.on_connect = self.connected
        self.client.on_message = self.heard
        self.client.reconnect_delay_set(0.05, 0.05)  # type: ignore[arg-type]  # parts of a second work, too
        self.client.connect(host, port)
        self.client.loop_start()

    def stop(self) -> None:
        self.client.disconnect()
        self.client.loop_stop()

    @property
    def session(self) -> str:
        return "same" if self.mode == "resumed" else f"s{self.connections}"

    def connecting(self, client: mqtt.Client, *_: Any) -> None:
        self.connections += 1
        session = "other" if self.mode == "strange" else self.session
        client.will_set(
            "nodes/node/status", json.dumps({"online": False, "session": session}), 1, retain=True
        )
        if self.mode == "renamed":
            client._client_id = f"node-{self.connections}".encode()

    def connected(self, client: mqtt.Client, *_: Any) -> None:
        if self.mode == "wildcard":
            client.subscribe("nodes/node/#", 0)
        else:
            client.subscribe([(f"nodes/node/{kind}", 1) for kind in ("pending", "complete", "failed")])
        if self.mode != "unseen":
            status = {"online": True, "session": self.session, "time": int(time.time())}
            client.publish("nodes/node/status", json.dumps(status), 1, retain=True)

    def heard(self, _client: mqtt.Client, _data: Any, message: mqtt.MQTTMessage) -> None:
        if message.topic.endswith(("/ack", "/status")):
            return
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
        if expired or other or (self.mode == "dated" and not exp):
            return
        if (self.mode == "recent" and "message_id" in task) or (
            self.mode == "encoded" and isinstance(task.get("payload"), dict)
        ):
            return
        field = "message_id" if "message_id" in task and self.mode != "modern" else "msg_id"
        if self.mode != "unconfirmed" and (self.mode != "terse" or (sender, id_) not in self.known):
            self.say(sender, "ack", {field: id_})
        if task["action"] == "relay":
            self.asked, self.ends = (sender, id_), []
            own = {"sender": "node", "receiver": "peer", "msg_id": f"own-{id_}", "action": "count"}
            if self.mode == "nameless":
                del own["msg_id"]
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
        text = "" if self.mode == "wordless" else json.dumps(message)
        self.client.publish(f"nodes/{to}/{kind}", text, 0 if self.mode == "unsure" else 1)
