"""A headless Chromium that may talk to one server only, and remembers what a page complains about.

It starts once for all tests of a file, which share an event loop for that: a start takes longer than most tests.
"""

import asyncio
import contextlib
import functools
import importlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
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


@dataclass
class Browser:
    """The one of this process. runner: its event loop"""

    runner: asyncio.Runner | None = None
    manager: Any = None  # playwright's
    chromium: Any = None

    def run(self, awaitable: Awaitable[None]) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(150):
                await awaitable

        self.runner = self.runner or asyncio.Runner()
        self.runner.run(bounded())

    async def started(self) -> Any:
        """Returns the browser, whose event loop runs; skips the test where playwright or Chromium is not installed."""
        api = pytest.importorskip("playwright.async_api", reason="playwright is not installed (pip install '.[test]')")
        if CHROMIUM is None:
            pytest.skip("no chromium on this machine (Debian: apt-get install --no-install-recommends chromium)")
        assert self.runner is not None, "tests with pages run by in_browser_loop"
        assert asyncio.get_running_loop() is self.runner.get_loop(), "tests with pages run by in_browser_loop"
        if self.chromium is not None and not self.chromium.is_connected():
            await self.end()  # it has died, in a test before this one
        if self.chromium is None:
            self.manager = await api.async_playwright().start()
            self.chromium = await self.manager.chromium.launch(executable_path=CHROMIUM, args=_ARGUMENTS)
        return self.chromium

    async def end(self) -> None:
        if self.chromium is not None:
            await self.chromium.close()
            await self.manager.stop()
            self.chromium = None

    def close(self) -> None:
        if self.runner is not None:
            self.runner.run(self.end())
            self.runner.close()
            self.runner = None


BROWSER = Browser()


def in_browser_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs an async test in the browser's event loop, with a deadline."""

    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        BROWSER.run(test(*args, **kwargs))

    return run


@contextlib.asynccontextmanager
async def browser_page(url: str, width: int = 1280, height: int = 900, **context: object) -> AsyncIterator[Page]:
    """Opens a page at a size, without anything of earlier ones; skips the test where there is no browser."""
    browser = await BROWSER.started()
    page = await browser.new_page(viewport={"width": width, "height": height}, **context)
    try:
        seen = Page(page)
        page.on("console", lambda line: line.type in ("error", "warning") and seen.problems.append(line.text))
        page.on("pageerror", lambda error: seen.problems.append(str(error)))
        page.on("request", lambda request: seen.urls.append(request.url))
        page.on("requestfailed", lambda request: seen.problems.append(f"{request.url}: {request.failure}"))
        await page.goto(url)
        yield seen
    finally:
        await page.close()  # and its context
