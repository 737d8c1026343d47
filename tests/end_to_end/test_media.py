"""Media chunks are a class of their own: a long download pushes no lock command out of anything."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os

from duly.core.messages import key_of
from tests.end_to_end.conftest import HubUnderTest
from tests.end_to_end.raw import Peer

CHUNK = 2_048


async def serve(device: Peer, file: bytes) -> None:
    """A device that serves one file and does what else it is told."""
    while True:
        command = await device.hear()
        match command["type"]:
            case "media_download":
                digest = hashlib.sha256(file).hexdigest()
                data = {"name": "a.jpg", "size": len(file), "sha256": digest, "chunk": CHUNK}
                await device.ack(command, data=data)
            case "media_download_chunk":
                at = command["data"]["n"] * CHUNK
                await device.ack(command, data=base64.b64encode(file[at : at + CHUNK]).decode())
            case _:
                await device.ack(command, data={"open": True})


async def test_a_file_is_downloaded_in_chunks_and_its_hash_is_right(local: HubUnderTest) -> None:
    file = os.urandom(20 * CHUNK + 7)
    async with local.join("lock") as lock, local.join("phone") as phone:
        serving = asyncio.create_task(serve(lock, file))
        await phone.command("lock", "media_download", data={"name": "a.jpg"})
        about = (await phone.first(lambda f: f["type"] == "ack"))["data"]
        count = -(-about["size"] // about["chunk"])
        sent = [await phone.command("lock", "media_download_chunk", data={"n": n}) for n in range(count)]
        parts: dict[str, bytes] = {}
        while len(parts) < count:
            ack = await phone.first(lambda f: f["type"] == "ack")
            parts[ack["seq_id"]] = base64.b64decode(ack["data"])
        got = b"".join(parts[seq_id] for seq_id in sent)
        assert hashlib.sha256(got).hexdigest() == about["sha256"]
        serving.cancel()


async def test_two_thousand_chunks_do_not_disturb_a_lock_command(local: HubUnderTest) -> None:
    file = os.urandom(CHUNK)
    async with local.join("lock") as lock, local.join("phone") as phone:
        serving = asyncio.create_task(serve(lock, file))
        locked = await phone.command("lock", data={"open": True})
        end = await phone.first(lambda f: f["type"] == "ack")
        chunk = ""
        for _ in range(20):
            for _ in range(100):
                chunk = await phone.command("lock", "media_download_chunk", data={"n": 0})
            for _ in range(100):
                assert (await phone.first(lambda f: f["type"] == "ack"))["data"]
        done = sum(frame.get("type") == "lock_control" for frame in lock.heard)
        await phone.command("lock", seq_id=locked, data={"open": True})
        said = await phone.first(lambda f: f["seq_id"] == locked and f["code"] == 5)
        assert said["state"] == "done"
        assert await phone.first(lambda f: f["seq_id"] == locked and f["type"] == "ack") == end
        assert sum(frame.get("type") == "lock_control" for frame in lock.heard) == done == 1
        # A chunk is dedup'd as well, but what it carried is not kept.
        await phone.command("lock", "media_download_chunk", seq_id=chunk, data={"n": 0})
        again = await phone.first(lambda f: f["seq_id"] == chunk and f["code"] == 5)
        assert again["state"] == "done"
        ack = await phone.first(lambda f: f["seq_id"] == chunk and f["type"] == "ack")
        assert "data" not in ack
        record = await local.hub.ledger.find(key_of("phone", chunk))
        assert record is not None
        assert record.answer is not None
        assert record.answer.data == b""
        # And its memory is short, while the lock command's is long.
        local.clock.seconds = 3_600
        await local.hub.maintenance.run()
        assert await local.state("phone", chunk) is None
        assert await local.state("phone", locked) == "done"
        serving.cancel()
