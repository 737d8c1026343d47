"""What a signature covers, and so stops. Everything goes over the wire: encoded and decoded."""

from __future__ import annotations

import binascii
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duly.core.signing import Algorithm, Key, Keyring, canonical
from duly.core.units import SECOND
from duly.errors import Forged, SenderError, UnknownKey, Unsigned
from duly.wire import fd
from duly.wire.fd import Content, FdKind, Form
from duly.wire.fd_signatures import FdSignatures

KEYS = {name: Key(Algorithm.ED25519, secret=bytes([n]) * 32) for n, name in enumerate("ABM", 1)}
SHARED = Key(Algorithm.HMAC, secret=b"s" * 32)


def seal(name: str, *, required: bool = True, prefix: str = "nodes") -> FdSignatures:
    ring = Keyring(name, own=KEYS[name])
    for peer, key in KEYS.items():
        ring = ring.trust(peer, key)
    return FdSignatures(ring, prefix=prefix, required=required)


A, B, MALLORY = seal("A"), seal("B"), seal("M")

TASK = fd.FdPending(
    "A", "B", "1", "turn_on", 1_700_000_000 * SECOND, 1_700_000_060 * SECOND, Content(b'{"lamp":1}')
)
STATUS = fd.FdStatus(
    1_700_000_000 * SECOND,
    True,
    80,
    -60,
    "10.0.0.1",
    "1.2",
    5 * SECOND,
    "s1",
    Content(b"more"),
    heartbeat=60 * SECOND,
)

CONTENTS = (
    st.binary(max_size=40)
    | st.text(max_size=20).map(str.encode)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=5,
    ).map(lambda value: json.dumps(value).encode())
)


def over_the_wire(
    message: fd.Fd, form: Form = Form.BASE64, kind: FdKind | None = None, **changed: Any
) -> fd.Fd:
    """As the other side reads it, after somebody in between has changed these fields."""
    text = fd.encode(message, form)
    if changed:
        text = json.dumps(json.loads(text) | changed).encode()
    read = fd.decode(kind or FdKind[type(message).__name__.removeprefix("Fd").upper()], text)
    assert read is not None
    return read


@given(CONTENTS, st.sampled_from(Form), st.booleans())
def test_every_content_in_every_form_and_under_old_names_passes(data: bytes, form: Form, old: bool) -> None:
    it = Content(data)
    tasks: list[tuple[FdKind, Any]] = [
        (FdKind.PENDING, fd.FdPending("A", "B", "1", "go", 5 * SECOND, 9 * SECOND, it, old_names=old)),
        (FdKind.COMPLETE, fd.FdComplete("1", it, old_names=old)),
        (FdKind.FAILED, fd.FdFailed("1", it, old_names=old)),
    ]
    for kind, message in tasks:
        text = fd.encode(A.sign(message, "B", form), form)
        for guess in (None, *Form):  # whatever the reader believes about how we write
            read = fd.decode(kind, text, guess)
            assert read
            assert B.check(read, by="A")


def test_acks_and_status_pass_too() -> None:
    assert A.check(over_the_wire(B.sign(fd.FdAck("1"), to="A")), by="B")
    for status in (STATUS, fd.FdStatus(5 * SECOND), fd.FdStatus(5 * SECOND, False, session="s")):
        assert A.check(over_the_wire(B.sign(status)), by="B")


@pytest.mark.parametrize(
    "changed",
    [
        {"msg_id": "2"},
        {"action": "turn_off"},
        {"time": 1_700_000_001},
        {"exp": 1_800_000_000},
        {"exp": 0},
        {"payload": "eyJsYW1wIjoyfQ=="},
        {"payload": None},
        {"enc": None},
        {"enc": "json"},
        {"payload": {"lamp": 1}},
        {"sender": "M"},
        {"receiver": "M"},
    ],
    ids=str,
)
def test_a_task_with_anything_changed_is_refused(changed: dict[str, Any]) -> None:
    forged = over_the_wire(A.sign(TASK, to="B"), **changed)
    with pytest.raises((Forged, UnknownKey)):
        B.check(forged, by=str(changed.get("sender", "A")))
    with pytest.raises((Forged, UnknownKey)):
        B.check(forged, by="A")


@pytest.mark.parametrize(
    "field", ["time", "online", "battery", "rssi", "ip", "version", "uptime", "session", "data", "heartbeat"]
)
def test_a_status_with_anything_changed_is_refused(field: str) -> None:
    other: Any = {"online": False, "ip": "x", "version": "x", "session": "x", "data": "eA=="}.get(field, 7)
    nothing: Any = None
    signed = B.sign(STATUS)
    with pytest.raises(Forged):
        A.check(over_the_wire(signed, **{field: other}), by="B")
    with pytest.raises(Forged):
        A.check(over_the_wire(signed, **{field: nothing}), by="B")
    with pytest.raises(UnknownKey):
        A.check(over_the_wire(signed), by="M")  # on M's topic


def test_a_task_for_another_node_is_refused_even_if_its_receiver_is_left_out() -> None:
    text = json.loads(fd.encode(A.sign(TASK, to="B")))
    del text["receiver"]
    read = fd.decode_pending(json.dumps(text).encode())
    assert B.check(read, by="A"), "where it was meant to be read it needs no receiver"
    with pytest.raises(Forged):
        MALLORY.check(read, by="A")
    with pytest.raises(Forged, match="other names"):
        MALLORY.check(over_the_wire(A.sign(TASK, to="M")), by="A")


def test_one_kind_is_not_another() -> None:
    ack = B.sign(fd.FdAck("1"), to="A")
    for kind in (FdKind.COMPLETE, FdKind.FAILED):
        with pytest.raises(Forged):
            A.check(over_the_wire(ack, kind=kind), by="B")
    failed = over_the_wire(B.sign(fd.FdFailed("1", Content(b"no")), to="A"), kind=FdKind.COMPLETE)
    with pytest.raises(Forged):
        A.check(failed, by="B")


def test_an_answer_counts_only_from_the_tasks_receiver_and_for_its_sender() -> None:
    done = fd.FdComplete("1", Content(b"ok"))
    with pytest.raises(UnknownKey):
        A.check(over_the_wire(MALLORY.sign(done, to="A")), by="B")
    with pytest.raises(Forged):  # B's own answer to somebody else
        A.check(over_the_wire(B.sign(done, to="M")), by="B")
    lied = over_the_wire(MALLORY.sign(done, to="A"), kid=KEYS["B"].kid)
    with pytest.raises(Forged):
        A.check(lied, by="B")


def test_another_prefix_is_another_place() -> None:
    with pytest.raises(Forged):
        seal("B", prefix="plant").check(over_the_wire(A.sign(TASK, to="B")), by="A")


@pytest.mark.parametrize("sig", ["?", "é", "A", "AAAA", "A" * 88, "=" * 88])
def test_what_is_no_signature_is_refused(sig: str) -> None:
    with pytest.raises(Forged):
        B.check(over_the_wire(A.sign(TASK, to="B"), sig=sig), by="A")


def test_unsigned_is_refused_where_signing_is_required_and_only_there() -> None:
    with pytest.raises(Unsigned):
        B.check(over_the_wire(TASK), by="A")
    easy = seal("B", required=False)
    assert easy.check(over_the_wire(TASK), by="A") is False
    assert easy.check(over_the_wire(A.sign(TASK, to="B")), by="A") is True
    with pytest.raises(Forged):
        easy.check(over_the_wire(A.sign(TASK, to="B"), action="turn_off"), by="A")
    assert easy.check(over_the_wire(A.sign(TASK, to="B"), kid="somebody's"), by="A") is False


def test_a_shared_secret_works_both_ways_and_cannot_be_reflected() -> None:
    a = FdSignatures(Keyring("A").trust("B", SHARED), required=True)
    b = FdSignatures(Keyring("B").trust("A", SHARED), required=True)
    assert b.check(over_the_wire(a.sign(TASK, to="B")), by="A")
    done = b.sign(fd.FdComplete("1"), to="A")
    assert a.check(over_the_wire(done), by="B")
    with pytest.raises(Forged):  # to whom it came from, as if the other had said it
        b.check(over_the_wire(done), by="A")
    with pytest.raises(UnknownKey, match="no key to sign with for C"):
        a.sign(fd.FdPending("A", "C", "1", "go"), to="C")
    assert a.sign(STATUS).sig == "", "a secret of two proves nothing to everybody"


def test_without_a_key_for_a_reader_a_message_is_unsigned_unless_signing_is_required() -> None:
    assert FdSignatures(Keyring("A")).sign(TASK, to="B") == TASK


def test_old_peers_read_a_signed_message_as_before() -> None:
    signed = json.loads(fd.encode(A.sign(TASK, to="B")))
    assert {key: signed[key] for key in signed if key not in ("sig", "kid")} == json.loads(fd.encode(TASK))


def test_the_format_is_as_documented() -> None:
    """Written out by hand, as a client in another language would: it must never change by accident."""
    text = b"".join(
        len(field).to_bytes(4, "big") + field
        for field in (
            b"duly-fd-1", b"nodes", b"pending", b"A", b"B", b"1", b"turn_on", b"1700000000", b"1700000060",
            b"b" + binascii.b2a_base64(b'{"lamp":1}', newline=False),
        )
    )  # fmt: skip
    assert A.sign(TASK, to="B").sig == binascii.b2a_base64(KEYS["A"].signer(text), newline=False).decode()
    shown = (b"duly-fd-1", b"nodes", b"status", b"B", b"", b"5", b"", b"", b"", b"", b"", b"0", b"", b"n")
    signed = B.sign(fd.FdStatus(5 * SECOND))
    assert signed.sig == binascii.b2a_base64(KEYS["B"].signer(canonical(shown)), newline=False).decode()


def test_the_guides_small_device_is_believed() -> None:
    guide = (Path(__file__).parents[2] / "docs/security.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(import base64.*?)```", guide, re.DOTALL)
    assert code
    space: dict[str, Any] = {}
    exec(code[1], space)
    text = space["signed_task"](SHARED.secret, SHARED.kid, "tiny", "B", "1", "turn_on", 0, 9999999999, b"{}")
    node = FdSignatures(Keyring("B", own=KEYS["B"]).trust("tiny", SHARED), required=True)
    assert node.check(fd.decode_pending(text.encode()), by="tiny")


SEALED = {form: fd.encode(A.sign(TASK, "B", form), form) for form in Form}


@given(st.sampled_from(Form), st.integers(0, 400), st.binary(max_size=3), st.integers(0, 3))
def test_whatever_is_done_to_the_bytes_the_meaning_stays_or_it_is_refused(
    form: Form, place: int, put: bytes, cut: int
) -> None:
    text = SEALED[form]
    text = text[:place] + put + text[place + cut :]
    try:
        task = fd.decode_pending(text)
        proven = B.check(task, by=task.sender)
    except SenderError:
        return
    assert proven
    was = fd.decode_pending(SEALED[form])
    assert (task.sender, task.receiver or "B", task.msg_id, task.action) == ("A", "B", "1", "turn_on")
    assert (task.time // SECOND, task.exp // SECOND) == (was.time // SECOND, was.exp // SECOND)
    assert (task.payload.value, task.payload.data) == (was.payload.value, was.payload.data)
