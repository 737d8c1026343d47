"""A browser for the tests of the page, one for all tests of a module."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio

from tests import servers

FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser() -> AsyncIterator[Any]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        servers.missing("chromium")
    if importlib.util.find_spec("playwright") is None:
        servers.missing("playwright")
    from playwright.async_api import async_playwright

    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        await browser.close()
