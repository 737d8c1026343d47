"""Every page, in both themes, languages and widths: axe-core finds nothing, and nothing is too wide."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests import servers
from tests.guard import GUARD
from tests.server.dashboard.populated import PopulatedHub

pytestmark = pytest.mark.asyncio(loop_scope="module")

LOOKS = [
    ("light", "en-GB", 1280),
    pytest.param("dark", "zh-CN", 360, marks=pytest.mark.proof),
    pytest.param("dark", "en-GB", 1280, marks=pytest.mark.proof),
    pytest.param("light", "zh-CN", 360, marks=pytest.mark.proof),
]
"""Of the four that are left out each page differs in one thing from two of these."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def populated(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PopulatedHub]:
    it = PopulatedHub(Path(tmp_path_factory.mktemp("hub")))
    await it.start()
    yield it
    await it.stop()


@pytest.fixture(scope="module")
def axe() -> str:
    if importlib.util.find_spec("axe_playwright_python") is None:
        servers.missing("axe-playwright-python")
    return files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")


async def examine(page: Any, axe: str) -> list[str]:
    """What axe-core finds on a page."""
    await page.evaluate(axe)
    found = await page.evaluate("() => globalThis.axe.run()")
    assert len(found["passes"]) > 10, "it has looked at something"
    return [
        f"{one['id']}: {one['help']}: {[node['html'][:200] for node in one['nodes'][:3]]}"
        for one in found["violations"]
    ]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("theme", "language", "width"), LOOKS)
async def test_every_page_is_accessible_and_fits_the_screen(
    browser: Any, populated: PopulatedHub, axe: str, theme: str, language: str, width: int
) -> None:
    context = await browser.new_context(
        viewport={"width": width, "height": 800}, color_scheme=theme, locale=language, reduced_motion="reduce"
    )
    page = await context.new_page()
    page.set_default_timeout(GUARD * 1000)
    found: dict[str, object] = {}
    await page.goto(f"{populated.url}/login")
    await page.wait_for_selector("form")
    found["login"] = await examine(page, axe)
    await page.goto(await populated.link())
    await page.wait_for_selector(".tiles")
    for name, (path, ready) in populated.pages().items():
        await page.goto(f"{populated.url}{path}")
        await page.wait_for_selector(ready)
        if name == "chat":
            found["chat login"] = await examine(page, axe)
            await populated.chat_in(page)
        found[name] = await examine(page, axe)
        root = "document.documentElement"
        over = await page.evaluate(f"{root}.scrollWidth - {root}.clientWidth")
        if over > 0:
            found[f"{name} is too wide"] = over
    await context.close()
    assert {name: problems for name, problems in found.items() if problems} == {}
