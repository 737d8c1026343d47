"""A file from a device, through a real hub."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from duly.clients import media
from duly.clients.app import Ack, App
from duly.clients.device import Device
from duly.errors import MediaError
from tests.guard import GUARD
from tests.local_hub import LocalHub


@pytest.fixture
def film(tmp_path: Path) -> Path:
    path = tmp_path / "visit.mp4"
    path.write_bytes(os.urandom(media.CHUNK_BYTES * 7 + 123))
    return path


async def test_a_file_arrives_whole(local: LocalHub, film: Path, tmp_path: Path) -> None:
    device = Device(local.url, local.tokens["lock"])
    device.serve("visit", film)
    seen: list[tuple[int, int]] = []
    async with device, App(local.url, local.tokens["phone"]) as app:
        got = await app.download("lock", "visit", tmp_path / "got.mp4", lambda n, of: seen.append((n, of)))
    assert got.read_bytes() == film.read_bytes()
    assert seen[-1] == (8, 8)
    assert list(tmp_path.glob("*.part")) == []


async def test_a_download_goes_on_where_it_was_cut(
    local: LocalHub, film: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = hashlib.sha256(film.read_bytes()).hexdigest()
    part = tmp_path / f"got.mp4.{digest[:12]}.part"
    part.write_bytes(film.read_bytes()[: media.CHUNK_BYTES * 5 + 99])
    device = Device(local.url, local.tokens["lock"])
    device.serve("visit", film)
    asked: list[int] = []
    async with device, App(local.url, local.tokens["phone"]) as app:
        send = app.send

        async def listen(device: str, type: str, data: object = None, **more: Any) -> Ack:
            if isinstance(data, dict) and "n" in data:
                asked.append(data["n"])
            return await send(device, type, data, **more)

        monkeypatch.setattr(app, "send", listen)
        got = await app.download("lock", "visit", tmp_path / "got.mp4")
    assert got.read_bytes() == film.read_bytes()
    assert sorted(asked) == [5, 6, 7]


async def test_a_damaged_file_is_noticed_and_thrown_away(local: LocalHub, film: Path, tmp_path: Path) -> None:
    digest = hashlib.sha256(film.read_bytes()).hexdigest()
    part = tmp_path / f"got.mp4.{digest[:12]}.part"
    part.write_bytes(bytes(media.CHUNK_BYTES * 2))
    device = Device(local.url, local.tokens["lock"])
    device.serve("visit", film)
    async with device, App(local.url, local.tokens["phone"]) as app:
        with pytest.raises(MediaError, match="damaged"):
            await app.download("lock", "visit", tmp_path / "got.mp4")
        assert not part.exists()
        assert (await app.download("lock", "visit", tmp_path / "got.mp4")).read_bytes() == film.read_bytes()


async def test_what_a_device_does_not_have_is_said(local: LocalHub, tmp_path: Path) -> None:
    device = Device(local.url, local.tokens["lock"])
    device.serve("visit", tmp_path / "nothing")
    async with device, App(local.url, local.tokens["phone"]) as app:
        with pytest.raises(MediaError, match="no media"):
            await app.download("lock", "visit", tmp_path / "got.mp4")


async def test_chunks_leave_no_data_in_the_ledgers(local: LocalHub, film: Path, tmp_path: Path) -> None:
    device = Device(local.url, local.tokens["lock"], store=str(tmp_path / "lock.db"))
    device.serve("visit", film)
    async with device, App(local.url, local.tokens["phone"]) as app:
        await app.download("lock", "visit", tmp_path / "got.mp4")
        for ledger in (local.hub.ledger, device._ledger):
            page = await ledger.messages(scope="phone")
            chunks = [r for r in page.records if r.message.kind == "media_download_chunk"]
            assert len(chunks) == 8
            assert all(r.answer is not None and r.answer.data == b"" for r in chunks)


@pytest.mark.parametrize("what", ["device", "hub"])
async def test_a_download_goes_on_after_a_brief_disconnect(
    local: LocalHub, tmp_path: Path, what: str
) -> None:
    film = tmp_path / "long.mp4"
    film.write_bytes(os.urandom(media.CHUNK_BYTES * 40))
    device = Device(local.url, local.tokens["lock"])
    device.serve("visit", film)
    cuts: list[int] = []

    async def cut() -> None:
        if what == "hub":
            await local.stop()
            await local.start()
        else:
            local.hub.gateway.sessions.devices["lock"].close("a cut")

    def progress(n: int, of: int) -> None:
        if n >= 12 * (len(cuts) + 1) and len(cuts) < 2:
            cuts.append(n)
            tasks.append(asyncio.ensure_future(cut()))

    tasks: list[asyncio.Future[None]] = []
    async with device, App(local.url, local.tokens["phone"]) as app:
        async with asyncio.timeout(GUARD):
            got = await app.download("lock", "visit", tmp_path / "got.mp4", progress)
        await asyncio.gather(*tasks)
    assert len(cuts) == 2
    assert got.read_bytes() == film.read_bytes()


async def test_a_device_that_stays_away_is_given_up_in_the_end(
    local: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media, "PATIENCE", 0.5)
    async with App(local.url, local.tokens["phone"]) as app:
        with pytest.raises(MediaError, match="offline"):
            await app.download("lock", "visit", tmp_path / "got.mp4")
