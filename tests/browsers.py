"""Debian's Chromium, for the tests of the page and of `duly.js`, and for pictures of the page."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest_asyncio

from tests import servers

FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


@asynccontextmanager
async def chromium() -> AsyncIterator[Any]:
    """A browser. Where it is missing, the test is skipped, and fails in CI."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        servers.missing("chromium")
    if importlib.util.find_spec("playwright") is None:
        servers.missing("playwright")
    from playwright.async_api import async_playwright

    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser() -> AsyncIterator[Any]:
    """One browser for all tests of a module."""
    async with chromium() as it:
        yield it
