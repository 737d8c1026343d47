"""A ledger as JSON lines: for people, other programs, and `duly import`.

The first line is a header, each further line is one row, and the last line has the row count and the hash of
every table, so that a truncated file is noticed. Bytes that are printable text are written as text, other
bytes as `{"base64": …}`; the key of a message is written as its sender and its id.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Final

import msgspec

from duly.core.messages import key_of, names_in
from duly.errors import DulyError, LedgerTooNew, Malformed
from duly.storage import snapshot as tables
from duly.storage.snapshot import BATCH, TABLES, LedgerTable, Snapshot, StoredRow, Summaries, TableDigest

FORMAT: Final = 1
_ENCRYPTED: Final = b"sealed:1:"
_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder().decode


async def export_lines(
    snapshot: Snapshot, now: int, *, secrets: bool = True, progress: Callable[[int], None] = lambda rows: None
) -> AsyncIterator[bytes]:
    """Yield a ledger as lines. Secrets stay encrypted, as they are in the ledger; without `secrets` they are
    omitted."""
    kept = "sealed" if secrets else "left out"
    head = {"duly_export": FORMAT, "at": now, "engine": snapshot.engine, "secrets": kept}
    yield _encode(head) + b"\n"
    ends = {}
    for table in TABLES:
        digest = TableDigest()
        names = tuple(table.columns)
        async for found in snapshot.rows(table):
            batch = found
            if table is tables.ITEMS and not secrets:
                batch = [row for row in map(without_secrets, found) if row is not None]
            digest.add(batch)
            for row in batch:
                values = map(_written, names, row)
                yield _encode({"table": table.name, "row": dict(zip(names, values, strict=True))}) + b"\n"
            progress(len(batch))
        ends[table.name] = digest.summary()
    yield _encode({"end": ends}) + b"\n"


def without_secrets(row: StoredRow) -> StoredRow | None:
    """Return an item without its encrypted values; None if it has no other content.

    >>> without_secrets(("principals", "ann", b'{"role":"user","password":"sealed:1:ab:cd"}'))
    ('principals', 'ann', b'{"role":"user","password":""}')
    """
    bucket, name, body = row
    if _ENCRYPTED not in body:
        return row
    try:
        fields = _decode(body)
    except msgspec.DecodeError:
        return None
    if not isinstance(fields, dict):
        return None
    cleared = {
        key: "" if isinstance(value, str) and value.encode().startswith(_ENCRYPTED) else value
        for key, value in fields.items()
    }
    return bucket, name, _encode(cleared)


def _written(name: str, value: object) -> object:
    if not isinstance(value, bytes):
        return value
    if name == "key" and value:
        try:
            scope, id_ = names_in(value)
            if key_of(scope, id_) == value:
                return {"scope": scope, "id": id_}
        except (DulyError, ValueError):
            pass
    try:
        text = value.decode()
    except UnicodeDecodeError:
        text = "\0"
    return text if text.isprintable() else {"base64": base64.b64encode(value).decode()}


class ExportReader:
    """Reads exported lines, table by table, and compares them with the counts and hashes in the last line."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        self._lines = enumerate(lines, 1)
        self._next: tuple[int, dict[str, object]] | None = None
        self._digests = {table.name: TableDigest() for table in TABLES}
        _, head = self._read()
        self.secrets = str(head.get("secrets", ""))
        found = head.get("duly_export")
        if not isinstance(found, int):
            raise Malformed("this file is not an export of duly: its first line is not the header of one")
        if found > FORMAT:
            raise LedgerTooNew(
                f"this export has the format {found}, and this duly reads {FORMAT}; upgrade duly"
            )

    def _read(self) -> tuple[int, dict[str, object]]:
        try:
            n, line = next(self._lines)
        except StopIteration:
            raise Malformed("this export was cut off: it has no last line. Export it again") from None
        try:
            found = _decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as problem:
            raise Malformed(f"line {n} of this export is not JSON: {problem}") from None
        if not isinstance(found, dict):
            raise Malformed(f"line {n} of this export is not a JSON object")
        return n, found

    async def rows(self, table: LedgerTable) -> AsyncIterator[Sequence[StoredRow]]:
        """Yield the rows of a table; the caller must ask for tables in the order of the export."""
        batch: list[StoredRow] = []
        for row in self._of(table):
            batch.append(row)
            if len(batch) == BATCH:
                self._digests[table.name].add(batch)
                yield batch
                batch = []
        if batch:
            self._digests[table.name].add(batch)
            yield batch
        if table is TABLES[-1]:
            self._finish()

    def _of(self, table: LedgerTable) -> Iterator[StoredRow]:
        last: StoredRow | None = None
        while True:
            n, found = self._next or self._read()
            self._next = (n, found)
            if found.get("table") != table.name:
                return
            self._next = None
            row = _row(table, n, found.get("row"))
            key = table.key(row)
            if key and last is not None and key <= last:
                raise Malformed(f"line {n} of this export is out of order, or is there twice")
            last = key
            yield row

    def _finish(self) -> None:
        """Compare the rows that were read with the last line."""
        n, found = self._next or self._read()
        if "end" not in found:
            raise Malformed(f"line {n} of this export is out of order, or of a table that does not exist")
        try:
            ends = msgspec.convert(found["end"], Summaries)
        except msgspec.ValidationError as problem:
            raise Malformed(f"line {n} of this export cannot be read: {problem}") from None
        different = [name for name, one in self._digests.items() if ends.get(name) != one.summary()]
        if different:
            raise Malformed(
                f"this export was changed after it was made: {', '.join(different)} are not what its last "
                "line says. Nothing was stored"
            )
        if any(line.strip() for _, line in self._lines):
            raise Malformed("this export goes on after its last line; import one ledger at a time")


def _row(table: LedgerTable, n: int, found: object) -> StoredRow:
    if not isinstance(found, dict) or found.keys() != table.columns.keys():
        raise Malformed(f"line {n} of this export does not have the columns of {table.name}")
    return tuple(_value(n, kind, found[name]) for name, kind in table.columns.items())


_TYPES: Final = {"str": str, "int": int, "bool": bool}


def _value(n: int, kind: str, value: object) -> object:
    if value is None and kind.endswith("?"):
        return None
    if kind.startswith("bytes"):
        if isinstance(value, str):
            return value.encode(errors="surrogatepass")
        if isinstance(value, dict):
            try:
                if value.keys() == {"scope", "id"}:
                    return key_of(value["scope"], value["id"])
                return base64.b64decode(value["base64"], validate=True)
            except (DulyError, KeyError, ValueError, TypeError, AttributeError):
                pass
    elif type(value) is _TYPES[kind] and not (type(value) is int and abs(value) >= 1 << 63):
        return value
    raise Malformed(f"line {n} of this export has a value that is not {kind.rstrip('?')}")
