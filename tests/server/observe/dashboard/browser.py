"""A headless Chromium that may talk to one server only, and remembers what the page complains about."""

import contextlib
import importlib
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
_ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
              "--disable-component-update", "--disable-sync"]  # fmt: skip


@dataclass
class Page:
    """An open page. page: playwright's;  problems: console errors, uncaught errors, refused and failed requests"""

    page: Any
    problems: list[str] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)

    async def text(self, selector: str) -> str:
        return str(await self.page.inner_text(selector))

    async def shows(self, selector: str, text: str) -> None:
        """Waits until an element is visible and contains a text."""
        api = importlib.import_module("playwright.async_api")
        await api.expect(self.page.locator(selector)).to_contain_text(text, timeout=20_000)


@contextlib.asynccontextmanager
async def browser_page(url: str, width: int = 1280, height: int = 900, **context: object) -> AsyncIterator[Page]:
    """Opens a page at a size; skips the test where playwright or Chromium is not installed."""
    api = pytest.importorskip("playwright.async_api", reason="playwright is not installed (pip install '.[test]')")
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine (Debian: apt-get install --no-install-recommends chromium)")
    async with api.async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=_ARGUMENTS)
        try:
            page = await browser.new_page(viewport={"width": width, "height": height}, **context)
            seen = Page(page)
            page.on("console", lambda line: line.type in ("error", "warning") and seen.problems.append(line.text))
            page.on("pageerror", lambda error: seen.problems.append(str(error)))
            page.on("request", lambda request: seen.urls.append(request.url))
            page.on("requestfailed", lambda request: seen.problems.append(f"{request.url}: {request.failure}"))
            await page.goto(url)
            yield seen
        finally:
            await browser.close()
