"""One trace goes through app, hub and device; without OpenTelemetry the hub passes it on as it came."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from duly.clients.app import App
from duly.clients.device import Command, Device
from duly.core.messages import Message, key_of
from duly.identity.accounts import Role
from duly.runtime import tracing
from duly.runtime.kept_traces import KeptTraces
from duly.runtime.tracing import CommandTraces, is_traceparent
from duly.server.hub import Hub
from duly.settings import Settings
from duly.storage.memory import MemoryLedger
from duly.wire import fd
from tests.end_to_end.raw import Ids, join
from tests.guard import GUARD
from tests.local_hub import LocalHub

FAR = 600_000
"""Milliseconds that a command has, from the moment it is sent: the run may have begun an hour ago."""
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """A process with OpenTelemetry, whose spans are kept here."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "tracer", lambda: provider.get_tracer("duly"))
    yield exporter
    provider.shutdown()


def by_name(spans: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    finished = spans.get_finished_spans()
    assert len({span.name for span in finished}) == len(finished), "each span once"
    return {span.name: span for span in finished}


def parent(span: ReadableSpan) -> int:
    return 0 if span.parent is None else span.parent.span_id


def number(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.span_id


async def test_one_trace_crosses_app_hub_and_device(local: LocalHub, spans: InMemorySpanExporter) -> None:
    device = Device(local.url, local.tokens["lock"])
    makes = tracing.tracer()
    assert makes is not None

    @device.on("lock_control")
    async def lock_control(command: Command) -> dict[str, bool]:
        with makes.start_as_current_span("motor"):
            return {"open": True}

    async with device, App(local.url, local.tokens["phone"]) as app:
        with makes.start_as_current_span("button"):
            ack = await app.send("lock", "lock_control", {"open": True})
    assert ack.state == "done"
    found = by_name(spans)
    assert set(found) == {
        "button", "duly.command", "duly.accept", "duly.commit", "duly.deliver", "duly.run", "duly.answer",
        "motor",
    }  # fmt: skip
    traces = {span.get_span_context().trace_id for span in spans.get_finished_spans()}  # type: ignore[union-attr] # a finished span has one
    assert len(traces) == 1
    for child, above in (
        ("duly.command", "button"), ("duly.accept", "duly.command"), ("duly.commit", "duly.accept"),
        ("duly.deliver", "duly.accept"), ("duly.run", "duly.deliver"), ("motor", "duly.run"),
        ("duly.answer", "duly.deliver"),
    ):  # fmt: skip
        assert parent(found[child]) == number(found[above]), child
    assert dict(found["duly.deliver"].attributes or {})["duly.state"] == "done"


async def test_a_repeat_with_another_trace_is_the_same_command(
    local: LocalHub, spans: InMemorySpanExporter
) -> None:
    async with join(local.url, local.tokens["lock"]) as lock, join(local.url, local.tokens["phone"]) as phone:
        seq_id = await phone.command("lock", seq_id=Ids()(), traceparent=PARENT)
        assert (await phone.hear())["code"] == 0
        passed_on = await lock.hear()
        assert is_traceparent(passed_on["traceparent"])
        assert passed_on["traceparent"] != PARENT
        assert passed_on["traceparent"][:35] == PARENT[:35], "the same trace"
        await phone.command("lock", seq_id=seq_id, traceparent=PARENT.replace("00f0", "11f0"))
        assert (await phone.hear())["code"] == 5
        await lock.ack(passed_on)
        assert (await phone.hear())["state"] == "done"
    assert set(by_name(spans)) == {"duly.accept", "duly.commit", "duly.deliver", "duly.answer"}


async def test_other_content_under_the_id_of_a_command_leaves_its_trace_alone(
    local: LocalHub, spans: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    async with join(local.url, local.tokens["lock"]) as lock, join(local.url, local.tokens["phone"]) as phone:
        seq_id = await phone.command("lock", seq_id=Ids()(), traceparent=PARENT)
        assert (await phone.hear())["code"] == 0
        passed_on = await lock.hear()
        await phone.command("lock", seq_id=seq_id, traceparent=PARENT, data={"other": True})
        assert (await phone.hear())["error"] == "id_conflict"
        await phone.command("lock", seq_id=seq_id, traceparent=PARENT)
        assert (await phone.hear())["code"] == 5
        await lock.ack(passed_on)
        assert (await phone.hear())["state"] == "done"
    found = by_name(spans)
    assert set(found) == {"duly.accept", "duly.commit", "duly.deliver", "duly.answer"}
    assert dict(found["duly.accept"].attributes or {})["duly.verdict"] == "fresh"
    assert dict(found["duly.deliver"].attributes or {})["duly.state"] == "done"
    assert "ended span" not in caplog.text, "a span that has ended is not changed"


@pytest.mark.parametrize("sent", [PARENT, "nonsense"])
async def test_without_opentelemetry_the_field_is_passed_on_if_it_is_one(
    local: LocalHub, monkeypatch: pytest.MonkeyPatch, sent: str
) -> None:
    monkeypatch.setattr(tracing, "tracer", lambda: None)
    async with join(local.url, local.tokens["lock"]) as lock, join(local.url, local.tokens["phone"]) as phone:
        await phone.command("lock", traceparent=sent)
        passed_on = await lock.hear()
        assert passed_on.get("traceparent") == (PARENT if sent == PARENT else None)
        await lock.ack(passed_on)
        assert (await phone.hear())["code"] == 0
        assert (await phone.hear())["state"] == "done"


async def test_a_refused_command_ends_its_spans(local: LocalHub, spans: InMemorySpanExporter) -> None:
    async with join(local.url, local.tokens["phone"]) as phone:
        await phone.command("lock", traceparent=PARENT)
        assert (await phone.hear())["error"] == "offline"
    found = by_name(spans)
    assert set(found) == {"duly.accept", "duly.commit"}
    assert dict(found["duly.accept"].attributes or {})["duly.verdict"] == "offline"
    assert not local.hub.gateway.traces.open


async def test_one_trace_crosses_app_hub_and_an_mqtt_device(
    tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    hub = Hub(Settings(data=str(tmp_path / "hub"), port=0, mqtt_port=0))
    await hub.start()
    try:
        phone, lock = await hub.accounts.add(Role.APP, "phone"), await hub.accounts.add(Role.DEVICE, "lock")
        await hub.accounts.grant("phone", "lock")
        device = Device(hub.mqtt_url.replace("//", f"//lock:{lock}@"))

        @device.on("lock_control")
        async def lock_control(command: Command) -> None:
            return None

        async with device, App(hub.url, phone) as app:
            async with asyncio.timeout(GUARD):
                while not hub.gateway.online("lock"):
                    await asyncio.sleep(0.01)
            assert (await app.send("lock", "lock_control")).state == "done"
    finally:
        await hub.stop()
    found = by_name(spans)
    assert parent(found["duly.run"]) == number(found["duly.deliver"])
    assert parent(found["duly.accept"]) == number(found["duly.command"])


@pytest.mark.parametrize("sent", [b"7", b'"nonsense"', b'{"x": 1}', b"null", b'"' + b"0" * 10_000 + b'"'])
def test_a_trace_that_is_none_makes_no_task_malformed(sent: bytes) -> None:
    task = fd.decode_pending(b'{"sender":"hub","msg_id":"1","action":"x","traceparent":%b}' % sent)
    assert (task.action, task.traceparent) == ("x", "")


def test_a_trace_is_no_part_of_a_task_but_goes_with_it() -> None:
    task = fd.FdPending("hub", "lock", "1", "x", traceparent=PARENT)
    assert fd.decode_pending(fd.encode(task)).traceparent == PARENT
    assert b"traceparent" not in fd.encode(fd.FdPending("hub", "lock", "1", "x"))


async def test_a_trace_goes_on_after_a_restart_of_the_hub(
    local: LocalHub, spans: InMemorySpanExporter
) -> None:
    async with join(local.url, local.tokens["phone"]) as phone:
        await phone.command("lock", queue=True, exp=round(time.time() * 1000) + FAR, traceparent=PARENT)
        assert (await phone.hear())["code"] == 0
    await local.stop()
    spans.clear()
    await local.start()
    async with join(local.url, local.tokens["lock"]) as lock:
        passed_on = await lock.hear()
        assert passed_on["traceparent"][:35] == PARENT[:35], "the same trace"
        await lock.ack(passed_on)
        async with asyncio.timeout(GUARD):
            while local.hub.gateway.traces.open:
                await asyncio.sleep(0.01)
    found = by_name(spans)
    assert set(found) == {"duly.deliver", "duly.answer"}
    assert f"{parent(found['duly.deliver']):016x}" == PARENT.split("-")[2]
    await local.hub.gateway.kept_traces.store()
    assert await local.hub.ledger.bucket(f"traces/{local.hub.name}") == {}


async def test_a_command_that_has_ended_meanwhile_leaves_no_trace(spans: InMemorySpanExporter) -> None:
    ledger, traces = MemoryLedger(), CommandTraces()
    kept = KeptTraces(ledger, traces, "hub")
    for id_ in ("1", "2"):
        traces.arrived(key_of("phone", id_), PARENT, "phone", id_, "query", "lock")
    await kept.store()
    again = CommandTraces()
    await KeptTraces(ledger, again, "hub").load([Message("phone", "2", "query", "lock")])
    assert list(again.open) == [key_of("phone", "2")]
    assert len(await ledger.bucket("traces/hub")) == 1


def test_traces_that_never_end_are_bounded(
    spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "TRACES_KEPT", 3)
    traces = CommandTraces()
    for n in range(5):
        traces.arrived(b"%d" % n, PARENT, "phone", str(n), "query", "lock")
    assert list(traces.open) == [b"2", b"3", b"4"]
    assert len(spans.get_finished_spans()) == 4


def test_a_process_that_has_not_loaded_opentelemetry_makes_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    assert tracing.tracer() is None


def test_duly_does_not_load_opentelemetry_by_itself() -> None:
    check = (
        "import sys, duly; duly.App, duly.Device; from duly.server.hub import Hub; "
        "print([name for name in sys.modules if 'opentelemetry' in name])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
