"""Webhooks of Alertmanager and Grafana become frames of a sentinel; what is sent again, the same frames."""

from __future__ import annotations

import json
from typing import Any

import pytest

from duly.core.units import DAY, MS
from duly.errors import Malformed
from duly.wire import frames
from duly.wire.alertmanager import FiringAlert, event_frame, read_alert, resolved_frame, split_webhook

GRAFANA = {
    "receiver": "duly",
    "status": "firing",
    "orgId": 1,
    "alerts": [
        {
            "status": "firing",
            "labels": {"alertname": "Memory", "grafana_folder": "hosts", "team": "blue"},
            "annotations": {"summary": "little memory is left"},
            "startsAt": "2026-11-16T09:54:53.877+02:00",
            "endsAt": "0001-01-01T00:00:00Z",
            "generatorURL": "https://grafana.example.com/alerting/grafana/m1/view",
            "fingerprint": "c6eadffa33fcdf37",
            "silenceURL": "https://grafana.example.com/alerting/silence/new",
            "dashboardURL": "https://grafana.example.com/d/hosts",
            "panelURL": "",
            "values": {"B": 44.2, "C": 1},
            "valueString": "[ var='B' labels={} value=44.2 ]",
        },
        {
            "status": "resolved",
            "labels": {"alertname": "Load"},
            "annotations": {},
            "startsAt": "2026-11-16T06:00:00Z",
            "endsAt": "2026-11-16T07:00:00Z",
            "fingerprint": "bc97ff14869b13e3",
            "values": None,
        },
    ],
    "groupLabels": {},
    "commonLabels": {"team": "blue"},
    "commonAnnotations": {},
    "externalURL": "https://grafana.example.com/",
    "version": "1",
    "groupKey": '{}:{alertname="Memory"}',
    "truncatedAlerts": 0,
    "title": "[FIRING:1]",
    "state": "alerting",
    "message": "**Firing**",
}
"""A webhook with the fields that Grafana documents."""
STARTS = "2026-11-16T07:54:53.877123456Z"
AT = 1_794_815_693_877


def webhook(**alert: Any) -> bytes:
    one = {"status": "firing", "startsAt": STARTS, "labels": {"alertname": "DiskFull"}, "fingerprint": "abc"}
    return json.dumps({"version": "4", "status": "firing", "alerts": [one | alert]}).encode()


def read_webhook(body: bytes) -> list[FiringAlert]:
    parts = split_webhook(body)
    return [read_alert(part, f"alert {n} of {len(parts)}") for n, part in enumerate(parts, 1)]


def event(body: bytes, now: int = AT * MS) -> dict[str, Any]:
    (alert,) = read_webhook(body)
    frame = frames.decode(event_frame(alert, "ops", now))
    data: dict[str, Any] = json.loads(bytes(frame.data))
    return data | {"type": frame.type, "seq_id": frame.seq_id}


def test_the_id_is_the_fingerprint_and_the_moment_since_which_it_fires() -> None:
    assert event(webhook())["seq_id"] == f"abc-{AT}"
    assert event(webhook(startsAt="2026-11-16T08:54:53.877+01:00"))["seq_id"] == f"abc-{AT}"
    assert event(webhook(startsAt="2026-11-16T08:54:53.877Z"))["seq_id"] != f"abc-{AT}"
    assert event(webhook(annotations={"value": "97 %"}))["seq_id"] == f"abc-{AT}"


def test_without_a_fingerprint_the_labels_stand_for_it_in_any_order() -> None:
    one = event(webhook(fingerprint="", labels={"a": "1", "b": "2"}))["seq_id"]
    assert event(webhook(fingerprint="", labels={"b": "2", "a": "1"}))["seq_id"] == one
    assert event(webhook(fingerprint="", labels={"a": "1", "b": "3"}))["seq_id"] != one


@pytest.mark.parametrize(
    ("label", "severity"),
    [
        ("critical", "critical"), ("PAGE", "critical"), ("error", "critical"), ("warning", "warning"),
        ("info", "info"), ("none", "info"), ("", "warning"), ("strange", "warning"),
    ],
)  # fmt: skip
def test_the_label_severity_is_one_of_ours(label: str, severity: str) -> None:
    assert event(webhook(labels={"severity": label}))["severity"] == severity


def test_the_profile_is_the_label_or_that_of_the_address() -> None:
    assert event(webhook())["profile_id"] == "ops"
    assert event(webhook(labels={"duly_profile": "night"}))["profile_id"] == "night"


def test_names_labels_and_annotations_reach_people() -> None:
    said = event(
        webhook(
            labels={"alertname": "DiskFull", "instance": "db1:9100", "mountpoint": "/"},
            annotations={"summary": "97 % full"},
            generatorURL="http://prometheus/graph",
        )
    )
    assert (said["trigger_reason"], said["device_address"], said["timestamp"]) == ("DiskFull", "db1:9100", AT)
    links = {"generatorURL": "http://prometheus/graph"}
    assert said["device_meta"] == {"mountpoint": "/", "summary": "97 % full"} | links


def test_what_fires_for_longer_than_a_day_is_reported_as_of_now_and_says_since_when() -> None:
    now = AT * MS + 40 * DAY
    said = event(webhook(), now)
    assert said["timestamp"] == now // MS
    assert said["device_meta"]["startsAt"].startswith("2026-11-16T07:54:53")


def test_a_resolved_alert_names_the_event_that_it_ends() -> None:
    (alert,) = read_webhook(webhook(status="resolved", endsAt="2026-11-16T08:00:00Z"))
    frame = frames.decode(resolved_frame(alert))
    assert (frame.type, frame.seq_id) == ("alert_cancel", f"abc-{AT}-resolved")
    assert json.loads(bytes(frame.data))["event"] == f"abc-{AT}"


def test_grafana_sends_the_same_and_more() -> None:
    alerts = read_webhook(json.dumps(GRAFANA).encode())
    assert [alert.id for alert in alerts] == [f"c6eadffa33fcdf37-{AT}", "bc97ff14869b13e3-1794808800000"]
    assert [alert.status.value for alert in alerts] == ["firing", "resolved"]
    said = json.loads(bytes(frames.decode(event_frame(alerts[0], "ops", AT * MS)).data))
    assert said["device_meta"]["dashboardURL"].startswith("https://grafana.example.com/d/")
    assert "valueString" in said["device_meta"]
    assert said["device_meta"]["values"] == {"B": 44.2, "C": 1}


def test_grafana_may_leave_annotations_and_values_empty() -> None:
    (alert,) = read_webhook(webhook(annotations=None, values=None))
    assert json.loads(bytes(frames.decode(event_frame(alert, "ops", AT * MS)).data))["device_meta"] == {}


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{}", b"[]", b"null", b'{"alerts": 7}', b'{"alerts": [{}]}', b"\xff", b"{" * 100,
        b"[" * 100_000,
        webhook(status="strange"), webhook(startsAt="yesterday"), webhook(labels={"a": 1}),
    ],
)  # fmt: skip
def test_what_is_no_webhook_is_malformed(body: bytes) -> None:
    with pytest.raises(Malformed, match=r"webhook"):
        read_webhook(body)


def test_the_alert_of_a_webhook_that_is_wrong_is_named() -> None:
    alerts = [json.loads(webhook(**wrong))["alerts"][0] for wrong in ({}, {"startsAt": "yesterday"})]
    with pytest.raises(Malformed, match=r"alert 2 of 2: .*startsAt.*no alert of it was stored"):
        read_webhook(json.dumps({"alerts": alerts}).encode())
