"""Content: the bytes in an FD message, and the two forms in which peers encode them.

`payload`, `value`, `error` and `data` are bytes. The original (Go) writes them as base64 strings, its own
examples as objects and plain strings; both are read, and each peer is answered in the `Form` it used. How a
*string* is read:

- the message says so itself (`enc`, "base64" or "json", as duly's own do): that counts;
- the peer is known to write JSON: it is that text, always;
- the peer is known to write base64: it is base64 if it strictly is, else that text (the evidence wins);
- nothing is known: it is base64 if it strictly is (whole groups of four, correct padding) **and** either
  decodes to text (UTF-8 without control characters), which hardly any word does ("test" does not), or has
  at least 16 characters with capitals, small letters and a digit, + or / among them: no word and no hex
  number has. Everything else is that text.

Nothing is lost by a wrong guess: `Content.raw` is what stood on the wire.
"""

from __future__ import annotations

import binascii
import re
from enum import Enum
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from duly.errors import Malformed
from duly.wire import any_json
from duly.wire.limits import check_depth

_read_text: Final = msgspec.json.Decoder(str).decode
_MIXED: Final = re.compile(rb"(?=.*[A-Z])(?=.*[a-z])(?=.*[0-9+/=]).{16,}", re.DOTALL)
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


class Form(Enum):
    """How a peer encodes bytes."""

    BASE64 = "base64"
    JSON = "json"


class Content(Struct, frozen=True, gc=False):
    """The bytes of one field of a message.

    >>> Content(b'{"on": true}').value
    {'on': True}
    """

    data: bytes = b""
    """the decoded bytes: what the base64 holds, the text of a string, the JSON text of anything else"""
    form: Form | None = None
    """how the peer encoded them; None if they do not show it (null, an empty string, created here)"""
    raw: bytes = b""
    """the JSON text as it was on the wire; empty if created here"""
    sure: bool = False
    """whether the message itself states its form"""

    @property
    def value(self) -> Any:
        """The meaning of the bytes: None if there are none, else a JSON value, else text, else the bytes."""
        if self.form is Form.JSON and is_string(self.raw):
            return self.data.decode()
        if not self.data:
            return None
        try:
            check_depth(self.data, "a value")
            return any_json.read(self.data)
        except (msgspec.DecodeError, RecursionError, ValueError):
            pass
        try:
            return self.data.decode()
        except UnicodeDecodeError:
            return self.data

    @property
    def json(self) -> bytes:
        """Its JSON text, with every number as it was written; empty if there are no bytes."""
        value = self.value
        if value is None:
            return b""
        if isinstance(value, str | bytes):
            return any_json.write(value)
        return msgspec.json.format(self.data, indent=-1)


NOTHING: Final = Content()
_BASE64: Final = Form.BASE64.value


def is_string(raw: bytes) -> bool:
    """Return whether a JSON text is a string: its first byte says so, and no other value begins with it.

    >>> is_string(b'"on"'), is_string(b'{"on": true}')
    (True, False)
    """
    return raw[:1] == b'"'


def content_of(value: object, form: Form) -> Content:
    """Return a value as content in this form. Bytes are sent as they are; in base64, text that could be
    mistaken for JSON is sent as a JSON string, so that a number and its digits stay distinct.

    >>> content_of("7", Form.JSON).raw, content_of("7", Form.BASE64).data, content_of("on", Form.BASE64).data
    (b'"7"', b'"7"', b'on')
    """
    match value:
        case None:
            return NOTHING
        case bytes():
            data = value
        case str() if form is Form.JSON:
            return Content(value.encode(), form, any_json.write(value))
        case str():
            data = any_json.write(value) if _spells_json(value.encode()) else value.encode()
        case _:
            data = any_json.write(value)
    return Content(data, form, write_content(Content(data), form))


def _spells_json(text: bytes) -> bool:
    try:
        any_json.read(text or b'""')
        return True
    except (msgspec.DecodeError, RecursionError, ValueError):
        return False


def form_mark(raw: bytes, form: Form) -> str | None:
    """Return the `enc` field for a content: "base64" for a base64 string that could be mistaken for text."""
    return _BASE64 if form is Form.BASE64 and raw[:1] == b'"' else None


def write_content(content: Content, form: Form) -> bytes:
    """Return bytes as JSON. In the JSON form bytes that are JSON are written as that value, other text as a
    string; bytes that are not text have to be base64 anyway. Content that came in this form is written
    unchanged."""
    if content.form is form and content.raw:
        return content.raw
    data = content.data
    if not data:
        return b"null"
    if form is Form.JSON:
        spelled = data.strip(b" \t\r\n")
        # A string or null would be decoded as something else than these bytes, so they are written as text.
        if spelled[:1] not in (b'"', b"n", b""):
            try:
                check_depth(spelled, "a value")
                any_json.read(spelled)
                return spelled
            except (msgspec.DecodeError, RecursionError, ValueError):
                pass
        try:
            return any_json.write(data.decode())
        except UnicodeDecodeError:
            pass
    return any_json.write(data)  # bytes are written as base64


def read_content(raw: bytes | Raw, form: Form | None, *, sure: bool = False) -> Content:
    """Return the content of a field's JSON text from a peer with this known form."""
    text = bytes(raw)
    if not text:
        return NOTHING
    if text[:1] != b'"':
        return Content(b"", None, text) if text == b"null" else Content(text, Form.JSON, text, sure)
    # the most common case, which needs no escapes
    if form is Form.BASE64 and (decoded := _read_base64(text[1:-1])):
        return Content(decoded, form, text, sure)
    try:
        data = _read_text(text).encode()
    except (msgspec.DecodeError, ValueError):
        raise Malformed("a string that UTF-8 cannot carry") from None
    if not data:
        return Content(b"", None, text)
    decoded = None if form is Form.JSON else _read_base64(data)
    if decoded is not None and (form is Form.BASE64 or _seems_base64(data, decoded)):
        return Content(decoded, Form.BASE64, text, sure)
    return Content(data, Form.JSON, text, sure)


def _read_base64(data: bytes) -> bytes | None:
    """Return the content of this string if it is strictly base64."""
    try:
        decoded = binascii.a2b_base64(data)
    except binascii.Error:
        return None
    # Other characters in between, or leftover bits: no encoder writes that.
    return decoded if binascii.b2a_base64(decoded, newline=False) == data else None


def _seems_base64(data: bytes, decoded: bytes) -> bool:
    """Return whether a string that could be base64 is more likely base64 than a word."""
    if _MIXED.fullmatch(data):
        return True
    try:
        return not _CONTROL.search(decoded.decode())
    except UnicodeDecodeError:
        return False
