"""The FD dialect: both forms, both sets of names, and nothing but our own errors for anything else."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from duly.core.units import SECOND
from duly.errors import DulyError, Malformed, TooLarge
from duly.wire import fd
from duly.wire.fd import Content, FdAck, FdComplete, FdFailed, FdKind, FdPending, FdStatus, Form

TASK: dict[str, Any] = {"sender": "A", "receiver": "B", "msg_id": "msg001", "action": "test"}


def pending(**more: Any) -> FdPending:
    form = more.pop("form", None)
    return fd.decode_pending(json.dumps(TASK | more).encode(), form)


# ── the examples of the FD document ──────────────────────────────────────────────────────────────────────


def test_the_seeds_task() -> None:
    task = fd.decode_pending(
        b'{"sender":"A","receiver":"B","msg_id":"msg001","action":"test",'
        b'"time":1234567890,"exp":9999999999,"payload":{}}'
    )
    assert (task.sender, task.receiver, task.msg_id, task.action) == ("A", "B", "msg001", "test")
    assert (task.time, task.exp) == (1234567890 * SECOND, 9999999999 * SECOND)
    assert (task.payload.data, task.payload.value, task.form) == (b"{}", {}, Form.JSON)


def test_the_seeds_answer() -> None:
    done = fd.decode_complete(b'{"msg_id":"msg001","value":"task completed successfully"}')
    assert done.value.data == b"task completed successfully"
    assert done.value.value == "task completed successfully"
    assert done.value.form is Form.JSON


def test_what_go_writes() -> None:
    task = pending(payload=base64.b64encode(b'{"on":true}').decode())
    assert (task.payload.data, task.payload.value, task.form) == (b'{"on":true}', {"on": True}, Form.BASE64)
    assert pending(payload=None).payload == Content(b"", None, b"null")
    assert pending().payload == fd.NOTHING


def test_the_seeds_will() -> None:
    assert fd.decode_status(b'{"time": 1234567890, "online": false}') == FdStatus(1234567890 * SECOND, False)
    assert fd.decode_status(b"") is None


def test_what_goes_out() -> None:
    task = FdPending("A", "B", "1", "on", 5 * SECOND, 9 * SECOND, Content(b'{"a":1}'))
    assert json.loads(fd.encode(task)) == {
        "sender": "A", "receiver": "B", "msg_id": "1", "action": "on", "time": 5, "exp": 9,
        "payload": base64.b64encode(b'{"a":1}').decode(), "enc": "base64",
    }  # fmt: skip
    assert json.loads(fd.encode(task, Form.JSON))["payload"] == {"a": 1}
    assert json.loads(fd.encode(FdComplete("1"))) == {"msg_id": "1", "value": None}
    assert json.loads(fd.encode(FdAck("1", sig="s", kid="k"))) == {"msg_id": "1", "sig": "s", "kid": "k"}
    assert json.loads(fd.encode(FdFailed("1", Content(b"no")), Form.JSON)) == {"msg_id": "1", "error": "no"}
    assert json.loads(fd.encode(FdStatus(5 * SECOND, online=False, session="x"))) == {
        "time": 5, "online": False, "session": "x",
    }  # fmt: skip


def test_old_names_are_answered_in_kind() -> None:
    task = fd.decode_pending(
        b'{"sender_client_id":"A","receiver_client_id":"B","message_id":"1","action":"x",'
        b'"timestamp":5,"expiration":9,"payload":null}'
    )
    assert task == FdPending(
        "A", "B", "1", "x", 5 * SECOND, 9 * SECOND, Content(b"", None, b"null"), old_names=True
    )
    assert fd.decode_pending(fd.encode(task)) == task
    assert json.loads(fd.encode(FdAck("1", old_names=True))) == {"message_id": "1"}
    assert fd.decode_ack(b'{"message_id":"1"}').old_names
    assert fd.decode_status(b'{"timestamp":5}') == FdStatus(5 * SECOND, old_names=True)


# ── which form a string is in ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "word",
    ["test", "open", "door", "1234", "2024", "OPEN", "TEST", "done", "complete", "lock", "lamp-on!", "Zm9",
     "Zm9v=", "3f2504e04f8911d39a0c0305e82c3301", "DEADBEEFDEADBEEF", "20240131T0815000", "Zm9=", "a b c d ",
     "Zm9v\n"],
)  # fmt: skip
def test_words_are_not_base64(word: str) -> None:
    assert pending(payload=word).payload == Content(word.encode(), Form.JSON, json.dumps(word).encode())


@pytest.mark.parametrize(
    "data",
    [
        b"hello",
        b'{"a": 1}',
        b"[]",
        "开灯".encode(),
        bytes(range(13)),
        b"\xff" * 5 + b"0123456789" + b"\0\x07\x10",
    ],
)
def test_base64_is_base64(data: bytes) -> None:
    assert pending(payload=base64.b64encode(data).decode()).payload.data == data


def test_what_is_known_of_the_peer_decides() -> None:
    assert pending(payload="test", form=Form.BASE64).payload.data == base64.b64decode("test")
    assert pending(payload="aGVsbG8=", form=Form.JSON).payload.data == b"aGVsbG8="
    assert pending(payload="not base64!", form=Form.BASE64).payload.data == b"not base64!"
    assert pending(payload={"a": 1}, form=Form.BASE64).form is Form.JSON


@given(st.text())
def test_a_json_peers_text_is_never_changed(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    content = pending(payload=text, form=Form.JSON).payload
    assert content.data == text.encode()
    assert content.value == (text or None)
    assert json.loads(content.raw) == text


# ── round trips ──────────────────────────────────────────────────────────────────────────────────

names = st.text(st.characters(exclude_characters="/+#\0", exclude_categories=["Cs"]), min_size=1, max_size=40)
times = st.integers(0, 1 << 38).map(lambda s: s * SECOND)


@given(st.binary(), st.sampled_from(Form))
@example(b"null", Form.JSON)
@example(b'"q"', Form.JSON)
@example(b"[" * 100, Form.JSON)
def test_bytes_come_back(data: bytes, form: Form) -> None:
    back = fd.decode_complete(fd.encode(FdComplete("1", Content(data)), form), form)
    if form is Form.BASE64:
        assert back.value.data == data
    else:
        try:
            data.decode()
        except UnicodeDecodeError:
            assert base64.b64decode(back.value.data) == data, "no other way to write it"
        else:
            assert back.value.data in (data, data.strip(b" \t\r\n"))
    assert back.value.form is (form if data else None)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 53), 1 << 53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(values, st.sampled_from(Form))
def test_values_come_back(value: Any, form: Form) -> None:
    try:
        text = json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return
    back = fd.decode_complete(fd.encode(FdComplete("1", Content(text)), form), form)
    if isinstance(value, dict | list) or form is Form.BASE64:
        assert back.value.value == value


def test_a_tasks_place_comes_back_and_is_left_out_where_there_is_none() -> None:
    placed = pending(order={"key": "power", "after": 4})
    assert json.loads(placed.order) == {"key": "power", "after": 4}
    assert fd.decode_pending(fd.encode(placed)).order == placed.order
    assert b"order" not in fd.encode(pending())


@given(names, names, names, names, times, times, st.binary(max_size=50), st.booleans(), st.text(max_size=5))
def test_tasks_come_back(
    sender: str,
    receiver: str,
    msg_id: str,
    action: str,
    time: int,
    exp: int,
    data: bytes,
    old: bool,
    sig: str,
) -> None:
    try:
        sig.encode()
    except UnicodeEncodeError:
        return
    task = FdPending(sender, receiver, msg_id, action, time, exp, Content(data), sig, "", old)
    back = fd.decode_pending(fd.encode(task), Form.BASE64)
    assert (back.sender, back.receiver, back.msg_id, back.action) == (sender, receiver, msg_id, action)
    assert (back.time, back.exp, back.payload.data, back.sig, back.old_names) == (time, exp, data, sig, old)
    assert fd.decode(FdKind.PENDING, fd.encode(back), Form.BASE64) == back


statuses = st.builds(
    FdStatus,
    time=times,
    online=st.none() | st.booleans(),
    battery=st.none() | st.integers(0, 100),
    rssi=st.none() | st.integers(-200, 0),
    version=names,
    uptime=times,
    session=names,
    heartbeat=times,
    old_names=st.booleans(),
)


@given(statuses)
def test_statuses_come_back(status: FdStatus) -> None:
    assert fd.decode(FdKind.STATUS, fd.encode(status)) == status


# ── anything else ────────────────────────────────────────────────────────────────────────────────

fields = [
    *TASK,
    "message_id",
    "time",
    "exp",
    "payload",
    "value",
    "error",
    "data",
    "online",
    "uptime",
    "battery",
]
json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(fields) | st.text(max_size=3), inner, max_size=8)
    ),
)


@given(st.sampled_from(FdKind), st.binary(max_size=200) | json_like.map(lambda v: json.dumps(v).encode()),
       st.none() | st.sampled_from(Form))  # fmt: skip
@example(FdKind.PENDING, b'{"sender":"\\ud800","msg_id":"1","action":"a"}', None)
@example(FdKind.COMPLETE, b'{"msg_id":"1","value":"\\ud800"}', None)
@example(FdKind.COMPLETE, b'{"msg_id":"1","value":"\xff"}', None)
@example(FdKind.PENDING, b'{"sender":"a","msg_id":"1","action":"a","time":1e400,"exp":1e300}', None)
@example(
    FdKind.PENDING, b'{"sender":"a","msg_id":"1","action":"a","time":-5,"exp":99999999999999999999999}', None
)
def test_garbage_is_refused_by_name(kind: FdKind, text: bytes, form: Form | None) -> None:
    try:
        found = fd.decode(kind, text, form)
    except DulyError:
        return
    if found is None:
        return
    content = (
        getattr(found, "payload", None) or getattr(found, "value", None) or getattr(found, "error", None)
    )
    if content is not None:
        _ = content.value
    if not (isinstance(found, FdPending) and not found.receiver):
        fd.encode(found)
        fd.encode(found, Form.JSON)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"sender": ""}, "sender is missing"),
        ({"sender": "a/b"}, "sender 'a/b' contains /"),
        ({"sender": "#"}, "contains"),
        ({"receiver": "+"}, "receiver"),
        ({"msg_id": ""}, "msg_id is missing"),
        ({"msg_id": 7}, "msg_id"),
        ({"msg_id": "a\0b"}, "NUL"),
        ({"action": None}, "action"),
        ({"time": "now"}, "time"),
        ({"exp": -1}, "exp is before 1970"),
        ({"payload": json.loads("[" * 40 + "]" * 40)}, "nested deeper"),
    ],
)
def test_says_what_is_wrong(change: dict[str, Any], why: str) -> None:
    with pytest.raises(Malformed, match=why):
        pending(**change)


@pytest.mark.parametrize(
    "own",
    [{"version": 2}, {"battery": "low"}, {"online": "yes"}, {"session": 7}, {"uptime": [1]}, {"value": {}}],
)
def test_a_field_of_another_kind_is_a_peers_own(own: dict[str, Any]) -> None:
    """A task with a `version` that was a number was refused: a status has one that is text."""
    task = {"sender": "A", "receiver": "B", "msg_id": "1", "action": "x", "exp": 9_999_999_999}
    assert fd.decode(FdKind.PENDING, json.dumps(task | own).encode())
    assert fd.decode(FdKind.ACK, json.dumps({"msg_id": "1"} | own | {"sender": 1}).encode())
    assert fd.decode(FdKind.STATUS, json.dumps({"online": True, "msg_id": 1, "exp": "x"}).encode())


def test_limits() -> None:
    with pytest.raises(TooLarge, match="send it in parts"):
        fd.decode_pending(b" " * (fd.SIZE_LIMIT + 1))
    with pytest.raises(TooLarge, match="limit is 200"):
        pending(msg_id="x" * 201)
    with pytest.raises(TooLarge):
        fd.encode(FdComplete("1", Content(b"x" * fd.SIZE_LIMIT)))
    for bomb in (b"[" * 200_000, b'{"a":' * 50_000, b'{"payload":' + b"[" * 100_000):
        with pytest.raises(Malformed):
            fd.decode_pending(bomb)
    assert Content(b"[" * 200_000).value == "[" * 200_000


def test_wrong_clocks() -> None:
    assert pending(time=-5).time == 0
    assert pending(time=10**30).time == 0
    assert pending(time=1.5).time == 1_500_000
    assert pending(exp=10**30).exp > 0
    assert pending(exp=0).exp == pending(exp=None).exp == 0


@pytest.mark.parametrize("number", [b"1e400", b"-1e400", b"9" * 5_000])
def test_a_time_that_no_float_holds_is_a_wrong_time(number: bytes) -> None:
    task = b'{"sender":"a","receiver":"b","msg_id":"1","action":"do","time":%b,"exp":%b,"payload":{"x":%b}}'
    read = fd.decode_pending(task % (number, number.lstrip(b"-"), number))
    assert read.time == 0
    assert read.exp > 0
    assert read.payload.raw == b'{"x":%b}' % number
    status = fd.decode_status(b'{"username":"a","online":true,"time":%b,"uptime":%b}' % (number, number))
    assert status is not None
    assert (status.time, status.uptime, status.online) == (0, 0, True)
    with pytest.raises(Malformed):
        fd.decode_pending(task % (b"0", b"-1e400", b"0"))
    with pytest.raises(Malformed):
        fd.decode_pending(b'{"time":1e400')


# ── topics ───────────────────────────────────────────────────────────────────────────────────────


@given(
    names.filter(lambda n: len(n.encode()) <= 200),
    st.sampled_from(FdKind),
    st.sampled_from(["nodes", "acme/v1"]),
)
def test_topics_come_back(name: str, kind: FdKind, prefix: str) -> None:
    assert fd.parse_topic(prefix, fd.topic_of(prefix, name, kind)) == (name, kind)


@pytest.mark.parametrize("name", ["", "a/b", "+", "a#", "a\0", "x" * 201, "\ud800"])
def test_bad_usernames(name: str) -> None:
    with pytest.raises((Malformed, TooLarge)):
        fd.topic_of("nodes", name, FdKind.ACK)


@pytest.mark.parametrize(
    "topic", ["", "nodes", "nodes/a", "nodes//ack", "nodes/a/b/ack", "nodes/a/what", "x/a/ack"]
)
def test_strange_topics(topic: str) -> None:
    with pytest.raises(Malformed):
        fd.parse_topic("nodes", topic)


def test_prefixes() -> None:
    assert fd.check_prefix("acme/v1") == "acme/v1"
    for prefix in ("", "/", "a//b", "a/+"):
        with pytest.raises(Malformed):
            fd.check_prefix(prefix)


def test_a_message_that_says_how_it_is_written_is_read_so_whatever_its_peer_wrote_before() -> None:
    text = fd.encode(FdComplete("1", Content(b"hello")))
    assert fd.decode_complete(text, Form.JSON).value == Content(b"hello", Form.BASE64, b'"aGVsbG8="', True)
    plain = b'{"msg_id":"1","value":"aGVsbG8=","enc":"json"}'
    assert fd.decode_complete(plain).value.value == "aGVsbG8="
    assert fd.decode_complete(b'{"msg_id":"1","value":"aGVsbG8=","enc":"rot13"}').value.value == "hello"


@pytest.mark.parametrize("form", list(Form))
@pytest.mark.parametrize(
    "value",
    [None, True, 7, 1.5, "7", "on", "test", "null", '{"a":1}', "aGVsbG8=", "电灯", [1, "2"], {"a": None}],
)
def test_a_value_comes_back_as_it_went_out(value: object, form: Form) -> None:
    text = fd.encode(FdComplete("1", fd.content_of(value, form)), form)
    assert fd.decode_complete(text, form).value.value == value


def test_bytes_come_back_as_bytes_or_as_what_they_spell() -> None:
    text = fd.encode(FdComplete("1", fd.content_of(b"\xff\x00", Form.JSON)), Form.JSON)
    assert fd.decode_complete(text, Form.BASE64).value.value == b"\xff\x00"


def test_an_ack_may_tell_how_far_it_is() -> None:
    text = fd.encode(fd.FdAck("1", progress=fd.content_of({"half": True}, Form.JSON)), Form.JSON)
    assert json.loads(text) == {"msg_id": "1", "progress": {"half": True}}
    assert fd.decode_ack(text).progress.value == {"half": True}
