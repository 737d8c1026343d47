"""OpenTelemetry: the spans of commands at an app, a hub and a device, as one trace.

The laws. A trace travels in a command's field `traceparent` (W3C) and is not part of the command's meaning: a
repeat may have another one. Only the API of OpenTelemetry is used, and only in a process that has loaded it;
otherwise nothing is recorded, and a hub passes the field on unchanged. An invalid `traceparent` is ignored.
The traces of commands that take longer are stored in the ledger and continue after a restart of the hub
(`duly.runtime.kept_traces`). Where another hub hands a command over, the spans `deliver` and `run` are below
the span `accept` of the hub that accepted it, and that hub makes the span `answer`.
"""

from __future__ import annotations

import re
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from duly.core.messages import Message

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

TRACES_KEPT: Final = 10_000
"""How many commands under way have their traces remembered."""
_TRACEPARENT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def is_traceparent(text: str) -> bool:
    """Return whether a text is a W3C traceparent.

    >>> is_traceparent("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"), is_traceparent("00-0-0-01")
    (True, False)
    """
    return _TRACEPARENT.fullmatch(text) is not None


def tracer() -> Tracer | None:
    """Return the tracer, if this process has loaded OpenTelemetry."""
    if "opentelemetry.trace" not in sys.modules:
        return None
    from opentelemetry import trace

    return trace.get_tracer("duly")


def _context(traceparent: str) -> Context:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": traceparent})


def traceparent_of(span: Span) -> str:
    """Return the traceparent for children of a span; empty if it belongs to no trace."""
    context = span.get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags & 0xFF:02x}"


def _about(scope: str, id_: str, kind: str, to: str) -> dict[str, str]:
    return {
        "messaging.system": "duly",
        "messaging.message.id": id_,
        "messaging.destination.name": to,
        "duly.scope": scope,
        "duly.kind": kind,
    }


class _HubTrace(Struct, eq=False):
    """The trace of one command at a hub: its parent, and its open spans."""

    traceparent: str
    about: dict[str, str]
    accept: Span | None = None
    commit: Span | None = None
    deliver: Span | None = None
    accepted_here: bool = True
    told: bool = False
    """the sender was told that the command is stored, and `accept` has ended"""


class CommandTraces:
    """The traces of commands at one hub. `open` is empty if no command is traced."""

    def __init__(self) -> None:
        self.open: OrderedDict[bytes, _HubTrace] = OrderedDict()
        self.hinted: OrderedDict[bytes, str] = OrderedDict()
        """the traceparents of commands that other hubs have stored for devices here"""

    def arrived(self, key: bytes, traceparent: str, scope: str, id_: str, kind: str, to: str) -> bool:
        """Begin the spans `accept` and `commit` of an arriving command. Returns whether they begin: not for a
        repeat, nor for an invalid traceparent."""
        if key in self.open or not is_traceparent(traceparent):
            return False
        one = self.open[key] = _HubTrace(traceparent, _about(scope, id_, kind, to))
        makes = tracer()
        if makes is not None:
            from opentelemetry.trace import SpanKind, set_span_in_context

            context = _context(traceparent)
            one.accept = makes.start_span("duly.accept", context, SpanKind.SERVER, one.about)
            one.commit = makes.start_span("duly.commit", set_span_in_context(one.accept, context))
        self._drop_oldest()
        return True

    def _drop_oldest(self) -> None:
        while len(self.open) > TRACES_KEPT:
            _, oldest = self.open.popitem(last=False)
            _end(oldest.commit, oldest.accept, oldest.deliver)

    def resume(self, key: bytes, traceparent: str, scope: str, id_: str, kind: str, to: str) -> None:
        """Continue the trace of a command that was under way before a restart, below its parent span."""
        self.open[key] = _HubTrace(traceparent, _about(scope, id_, kind, to), told=True)

    def handed_on(self, key: bytes) -> str:
        """Return the traceparent for the hub that hands a command over; empty if the command is not
        traced."""
        one = self.open.get(key)
        if one is None:
            return ""
        return one.traceparent if one.accept is None else traceparent_of(one.accept) or one.traceparent

    def hint(self, key: bytes, traceparent: str) -> None:
        """Note the trace of a command that another hub has stored for a device here."""
        if key in self.open or not is_traceparent(traceparent):
            return
        self.hinted[key] = traceparent
        if len(self.hinted) > TRACES_KEPT:
            self.hinted.popitem(last=False)

    def resume_hinted(self, message: Message) -> None:
        """Continue the trace of another hub's command that is handed over here, if a hint brought it."""
        traceparent = self.hinted.pop(message.key, "")
        if traceparent:
            self.resume_remote(message, traceparent)

    def resume_remote(self, message: Message, traceparent: str) -> None:
        """Continue the trace of another hub's command that is handed over here, below that hub's span."""
        if message.key not in self.open:
            about = _about(message.scope, message.id, message.kind, message.recipient)
            self.open[message.key] = _HubTrace(traceparent, about, accepted_here=False, told=True)
            self._drop_oldest()

    def said(self, key: bytes, word: str, *, taken: bool) -> None:
        """End `commit` and `accept`: the command is stored or refused, and its sender is told. The reply to a
        repeat, or to other content under the same id, changes nothing."""
        one = self.open.get(key)
        if one is None or one.told:
            return
        one.told = True
        if one.accept is not None:
            one.accept.set_attribute("duly.verdict", word)
        _end(one.commit, one.accept)
        one.commit = None
        if not taken:
            del self.open[key]

    def sent(self, key: bytes, attempt: int) -> str:
        """Begin `deliver`: the command is handed to its device. Returns the traceparent for the device; empty
        if the command is not traced."""
        one = self.open.get(key)
        if one is None:
            return ""
        makes = tracer()
        if makes is None:
            return one.traceparent
        if one.deliver is None:
            from opentelemetry.trace import SpanKind, set_span_in_context

            parent = _context(one.traceparent)
            context = parent if one.accept is None else set_span_in_context(one.accept, parent)
            one.deliver = makes.start_span("duly.deliver", context, SpanKind.PRODUCER, one.about)
        one.deliver.set_attribute("duly.attempts", attempt)
        return traceparent_of(one.deliver) or one.traceparent

    def ended(self, key: bytes, state: str) -> None:
        """End `deliver`: the command has ended. The hub that tells the app makes the span `answer`."""
        one = self.open.pop(key, None)
        makes = tracer()
        if one is None or makes is None:
            return
        from opentelemetry.trace import set_span_in_context

        above = one.deliver or one.accept
        if one.deliver is not None:
            one.deliver.set_attribute("duly.state", state)
        parent = _context(one.traceparent)
        context = parent if above is None else set_span_in_context(above, parent)
        if one.accepted_here:
            makes.start_span("duly.answer", context, attributes={"duly.state": state}).end()
        _end(one.deliver)


class ClientTraces:
    """The traces of commands at one app or device."""

    def __init__(self) -> None:
        self._spans: OrderedDict[bytes, Span] = OrderedDict()
        self._parents: OrderedDict[bytes, str] = OrderedDict()

    def begin(self, key: bytes, scope: str, id_: str, kind: str, to: str) -> None:
        """Begin the span `command` of an app's command, below the current span."""
        makes = tracer()
        if makes is None or key in self._spans:
            return
        from opentelemetry.trace import SpanKind

        about = _about(scope, id_, kind, to)
        self._spans[key] = makes.start_span("duly.command", kind=SpanKind.CLIENT, attributes=about)
        if len(self._spans) > TRACES_KEPT:
            _end(self._spans.popitem(last=False)[1])

    def traceparent(self, key: bytes) -> str:
        """Return the traceparent of a command that is sent; empty if it is not traced."""
        span = self._spans.get(key) if self._spans else None
        return "" if span is None else traceparent_of(span)

    def end(self, key: bytes, state: str) -> None:
        """End the span of a command."""
        span = self._spans.pop(key, None) if self._spans else None
        if span is not None:
            span.set_attribute("duly.state", state)
            span.end()

    def heard(self, key: bytes, traceparent: str | None) -> None:
        """Note that a device has received a command with this traceparent, or without one."""
        if traceparent is not None and is_traceparent(traceparent):
            self._parents[key] = traceparent
            if len(self._parents) > TRACES_KEPT:
                self._parents.popitem(last=False)

    @contextmanager
    def running(self, key: bytes, scope: str, id_: str, kind: str, to: str) -> Iterator[None]:
        """Run a handler in its span `run`; spans that it makes itself are below that."""
        parent = self._parents.pop(key, "") if self._parents else ""
        makes = tracer() if parent else None
        if makes is None:
            yield
            return
        from opentelemetry.trace import SpanKind

        with makes.start_as_current_span(
            "duly.run", _context(parent), SpanKind.CONSUMER, _about(scope, id_, kind, to)
        ):
            yield


def _end(*spans: Span | None) -> None:
    for span in spans:
        if span is not None:
            span.end()
