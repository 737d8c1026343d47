"""Throws hostile bytes at every decoder: `python -m proof.hostile KIND CASES [SEED]`.

A case is a sound message that was cut, stretched, spliced with another, or had bytes and bits changed. The
law: a decoder takes it or refuses it with an error of ours, at once, and keeps nothing of it. Anything else
ends the program with the case and how to replay it. A decoder that does not come back at all is ended by the
operating system, in whatever language it was written. What was tried is counted, and after how much of it the
process held neither more memory nor more descriptors than before; the first thousand cases warm it up.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Final

from duly.errors import DulyError
from duly.storage.sqlite.journal_format import entries_of, flushes_in
from duly.storage.sqlite.table_rows import TableChanges
from duly.transports.mqtt import packets, properties
from duly.wire import alertmanager, cloud_events, fd, frames
from duly.wire.fd import FdKind
from proof.counts import count
from proof.leaks import held, leaked

AT_ONCE: Final = 1_000
"""Cases that are made and tried together."""
SLOW: Final = 1.0
"""Seconds that no case may take."""
STUCK: Final = 60.0
"""Seconds of processor time after which cases that are tried together are stuck; a thirtieth is usual."""

FRAMES: Final = [
    b'{"type":"lock_control","seq_id":"1700000000000_1","to":"lock","data":{"open":true},"exp":1700000060000}',
    b'{"type":"dev_control","seq_id":"1700000000000_2","to":"lamp","data":1,"order":{"key":"power","mode":"latest"}}',
    b'{"type":"ack","seq_id":"1700000000000_1","to":"phone","code":0,"data":{"a":[1,2,{"b":null}]},"state":"done"}',
    b'{"type":"auth","token":"abc","cursors":{"lock":12,"lamp":0}}',
    b'{"type":"chat_message","seq_id":"1_1","to":"#team","data":"hi \\ud83d\\ude00","conv":"#team","n":7}',
    b'{"type":"alert_event","seq_id":"e1","data":{"profile_id":"home","trigger_reason":"fall","timestamp":1}}',
]
TASKS: Final = [
    b'{"sender":"A","receiver":"B","msg_id":"m1","action":"open","time":1700000000,"exp":1700000060,"payload":{"a":1}}',
    b'{"sender_client_id":"A","receiver_client_id":"B","message_id":"m1","action":"x","timestamp":1,"expiration":0}',
    b'{"msg_id":"m1","value":"eyJhIjoxfQ==","sig":"AAAA","kid":"k"}',
    b'{"msg_id":"m1","code":3,"reason":"busy"}',
    b'{"online":true,"time":1700000000,"session":"s1","metadata":{"battery":80}}',
]
PACKETS: Final = [
    b"\x20\x02\x00\x00", b"\x90\x03\x00\x01\x01", b"\x40\x02\x00\x05", b"\xd0\x00", b"\xb0\x02\x00\x01",
    packets.publish(b"nodes/hub/ack", 7, b'{"msg_id":"m1"}'), packets.publish(b"a/b", 1, b"x" * 300),
]  # fmt: skip


PROPERTIES: Final = [
    b"\x0a\x21\x00\x0a\x27\x00\x01\x00\x00\x2a\x01",
    b"\x13\x1f\x00\x03why\x26\x00\x01a\x00\x02bc\x0b\x80\x01\x24\x01\x22",
]
EVENTS: Final = [
    b'{"specversion":"1.0","id":"e1","source":"urn:lock","type":"lock.open","time":"2026-11-19T10:00:00Z","data":{"a":1}}',
    b'{"specversion":"1.0","id":"e2","source":"/a?b","type":"t","datacontenttype":"text/plain","data_base64":"aGk="}',
]
ALERTS: Final = [
    b'{"version":"4","status":"firing","alerts":[{"status":"firing","labels":{"alertname":"Hot","severity":"critical"},'
    b'"annotations":{"summary":"so"},"startsAt":"2026-11-19T10:00:00Z","fingerprint":"ab12"}]}',
    b'{"alerts":[{"status":"resolved","labels":{"alertname":"Hot"},"startsAt":"2026-11-19T09:00:00Z","endsAt":"2026-11-19T10:00:00Z"}]}',
]


def _rows() -> list[bytes]:
    changes = TableChanges()
    changes.states[b"key"] = (10, 1_700_000_000_000_000, b"answer")
    changes.lasts["stream"] = 1
    changes.entries["stream", 1] = (b"body", 1_700_000_000_000_000, b"key")
    changes.items["bucket", "name"] = None
    return entries_of(changes.pack())


def _topics(raw: bytes) -> None:
    fd.parse_topic("nodes", raw.decode(errors="replace"))


def _any_fd(raw: bytes) -> None:
    fd.decode(tuple(FdKind)[raw[0] % len(FdKind)] if raw else FdKind.ACK, raw)


def _any_event(raw: bytes) -> None:
    one = {"content-type": "application/cloudevents+json"}
    for headers, body in (
        (one, raw),
        ({"content-type": "application/cloudevents-batch+json"}, b"[%b]" % raw),
    ):
        found = cloud_events.read_events(headers, body)
        for event in found if isinstance(found, list) else [found]:
            cloud_events.frame_of(event)


def _any_alert(raw: bytes) -> None:
    for part in alertmanager.split_webhook(raw):
        alertmanager.event_frame(alertmanager.read_alert(part, "this"), "home", 1)


KINDS: Final[dict[str, tuple[Sequence[bytes], Callable[[bytes], object]]]] = {
    "frames": (FRAMES, frames.decode),
    "batches": ([b"[" + b",".join(FRAMES[:3]) + b"]", *FRAMES], frames.decode_batch),
    "fd": (TASKS, _any_fd),
    "topics": ([b"nodes/hub/ack", b"nodes/A/pending", b"nodes/A/status"], _topics),
    "mqtt": (PACKETS, packets.split),
    "properties": (PROPERTIES, lambda raw: properties.read(raw, 0, len(raw))),
    "events": (EVENTS, _any_event),
    "alertmanager": (ALERTS, _any_alert),
    "journal": (_rows(), lambda raw: list(flushes_in([(1, raw)]))),
}
"""Sound messages of each kind, and what reads them."""
INTERESTING: Final = (
    b"\x00",
    b"\xff",
    b"\x7f",
    b"\x80",
    b'"',
    b"{",
    b"[",
    b"\\",
    b"1e999",
    b"\xed\xa0\x80",
    b"null",
    b"-0",
)


def spoil(rng: Random, sound: Sequence[bytes]) -> bytes:
    """Return a message of these that is no longer sound, or only by chance."""
    raw = bytearray(rng.choice(sound))
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(raw) + 1)
        match rng.randrange(7):
            case 0:
                del raw[at:]
            case 1:
                raw[at:at] = rng.choice(INTERESTING)
            case 2:
                raw[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 3 if at < len(raw):
                raw[at] ^= 1 << rng.randrange(8)
            case 4:
                raw[at:] = rng.choice(sound)[rng.randrange(40) :]
            case 5:
                raw[at:at] = raw[at : at + rng.randrange(1, 60)] * rng.choice((1, 2, 40))
            case _ if at < len(raw):
                raw[at] = rng.randrange(256)
        if not raw:
            break
    return bytes(raw)


def attack(kind: str, cases: int, seed: int) -> None:
    """Try so many cases of a kind."""
    try:
        _attack(kind, cases, seed)
    finally:  # the timer would end whatever the process does next
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    replay = f"python -m proof.hostile {kind} {cases} {seed}"
    count("hostile input", cases, replay)
    count("watched for leaks", max(0, cases - AT_ONCE), replay)


def _attack(kind: str, cases: int, seed: int) -> None:
    sound, read = KINDS[kind]
    replay = f"replay: python -m proof.hostile {kind} {cases} {seed}"
    before = None
    for part in range(0, cases, AT_ONCE):
        if part == AT_ONCE:
            before = held()
        signal.setitimer(signal.ITIMER_VIRTUAL, STUCK)
        rng = Random(f"{kind} {seed} {part}")
        for _ in range(min(AT_ONCE, cases - part)):
            raw = spoil(rng, sound)
            began = time.process_time()
            try:
                read(raw)
            except DulyError:
                pass
            except Exception as problem:
                sys.exit(f"{kind}: {raw!r} raised {problem!r}; {replay}")
            if time.process_time() - began > SLOW:
                sys.exit(f"{kind}: {raw!r} took more than {SLOW} s; {replay}")
    if before is not None and (more := leaked(before)):
        sys.exit(f"{kind}: {more} after {cases:,} cases; {replay}")


if __name__ == "__main__":
    attack(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 1)
