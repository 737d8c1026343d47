"""A bot that answers every line once, also if it is killed between reading a line and answering it.

Run it: DULY_URL=http://127.0.0.1:7800 DULY_PASSWORD=… python examples/chat_bot.py
"""

import asyncio
import contextlib
import os

import duly


async def main() -> None:
    url, password = os.environ["DULY_URL"], os.environ["DULY_PASSWORD"]
    with contextlib.suppress(duly.SenderError):  # it is registered already
        await duly.Chat.register(url, "bot", password)
    token = await duly.Chat.log_in(url, "bot", password)
    async with duly.Chat(url, token, store="bot.db") as chat:
        print("the bot is here", flush=True)
        async for line in chat.lines():
            if line.sender != "bot":
                # The id is made from the line's: if the line comes again, the answer is the same one.
                await chat.send(line.sender, f"you said: {line.text}", id=f"answer-{line.conv}-{line.n}")


asyncio.run(main())
