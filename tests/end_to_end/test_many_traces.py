"""One trace goes through app, hub, another hub and device, by a hint between the hubs or by the ledger."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from duly.clients.app import App
from duly.clients.device import Command, Device
from duly.runtime import tracing
from tests.end_to_end.many import LocalCluster, until
from tests.servers import Postgres

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
FAR = 600_000
"""Milliseconds that a command has."""


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """A process with OpenTelemetry, whose spans are kept here."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "tracer", lambda: provider.get_tracer("duly"))
    yield exporter
    provider.shutdown()


@pytest.fixture
async def two_hubs(tmp_path: Path, postgres_server: Postgres) -> AsyncIterator[LocalCluster]:
    cluster = LocalCluster(tmp_path, postgres_server)
    await cluster.start(2)
    yield cluster
    await cluster.stop()


def tree(spans: InMemorySpanExporter) -> dict[str, str]:
    """The names of the spans that have ended, each with that of the span above it; all of one trace."""
    finished = spans.get_finished_spans()
    assert len({span.name for span in finished}) == len(finished), "each span once"
    assert len({_context(span)[0] for span in finished}) == 1, "one trace"
    names = {_context(span)[1]: span.name for span in finished}
    above = {span.name: 0 if span.parent is None else span.parent.span_id for span in finished}
    return {name: names.get(id_, f"{id_:016x}" if id_ else "") for name, id_ in above.items()}


def _context(span: ReadableSpan) -> tuple[int, int]:
    context = span.get_span_context()
    assert context is not None
    return context.trace_id, context.span_id


def untraced(cluster: LocalCluster) -> bool:
    """Whether every trace has ended, at each hub."""
    return not any(hub.gateway.traces.open for hub in cluster.hubs)


async def test_one_trace_crosses_app_two_hubs_and_device(
    two_hubs: LocalCluster, spans: InMemorySpanExporter
) -> None:
    device = Device(two_hubs.hubs[1].url, two_hubs.tokens["lock"])

    @device.on("lock_control")
    async def lock_control(command: Command) -> dict[str, bool]:
        return {"open": True}

    async with device, App(two_hubs.hubs[0].url, two_hubs.tokens["phone"]) as app:
        await two_hubs.known("lock")
        assert (await app.send("lock", "lock_control", {"open": True})).state == "done"
        await until(lambda: untraced(two_hubs))
    assert tree(spans) == {
        "duly.command": "",
        "duly.accept": "duly.command",
        "duly.commit": "duly.accept",
        "duly.deliver": "duly.accept",
        "duly.run": "duly.deliver",
        "duly.answer": "duly.accept",
    }


async def test_a_command_that_waits_is_traced_at_the_hub_its_device_comes_to(
    two_hubs: LocalCluster, spans: InMemorySpanExporter
) -> None:
    async with two_hubs.join(0, "phone") as phone:
        exp = round(time.time() * 1000) + FAR
        await phone.command("lock", queue=True, exp=exp, traceparent=PARENT)
        assert (await phone.hear())["code"] == 0
        await two_hubs.hubs[0].gateway.kept_traces.store()
        async with two_hubs.join(1, "lock") as lock:
            passed_on = await lock.hear()
            assert passed_on["traceparent"][:35] == PARENT[:35], "the same trace"
            await lock.ack(passed_on)
            while (await phone.hear()).get("state") != "done":
                pass
        await until(lambda: untraced(two_hubs))
    sent = PARENT.split("-")[2]
    assert tree(spans) == {
        "duly.accept": sent,
        "duly.commit": "duly.accept",
        "duly.deliver": sent,
        "duly.answer": "duly.accept",
    }


async def test_without_opentelemetry_the_other_hub_passes_the_field_on_as_it_came(
    two_hubs: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "tracer", lambda: None)
    async with two_hubs.join(1, "lock") as lock, two_hubs.join(0, "phone") as phone:
        await two_hubs.known("lock")
        await phone.command("lock", traceparent=PARENT)
        passed_on = await lock.hear()
        assert passed_on["traceparent"] == PARENT
        await lock.ack(passed_on)
        await until(lambda: untraced(two_hubs))
