"""Takes the picture of the page in the README.

python -m tests.server.observe.dashboard.picture docs/dashboard.png                          # of a story, no model
python -m tests.server.observe.dashboard.picture docs/dashboard.png http://127.0.0.1:30000  # of a running server
"""

import asyncio
import sys
import time

from tests.browser import BROWSER, browser_page
from tests.server.observe.reports import Story
from tests.server.served import serving

WIDTH, HEIGHT = 1180, 900
RATE_S = 4  # until the page knows how many tokens a second come out


async def of_a_story(path: str) -> None:
    """The load shifts once, and experts move twice: at the start, and after the shift."""
    story = Story(num_windows=72, shifts=(34,))
    story.began_s = time.time() - (story.num_windows + 1) * story.window_s
    async with serving(story.num_ranks, "eplb.mode=dynamic", info=story.info) as served:
        for at_s, report in story.reports():
            served.bridge.balance.take(report, at_s)

        async def keep_reporting() -> None:
            for window in range(story.num_windows, story.num_windows + 60):
                for worker, status in zip(served.workers, story.statuses(window), strict=True):
                    worker.say(status)
                await asyncio.sleep(1)

        reporting = asyncio.create_task(keep_reporting())
        await of_a_server(path, str(served.client.base_url))
        reporting.cancel()


async def of_a_server(path: str, url: str) -> None:
    async with browser_page(f"{url.rstrip('/')}/dashboard", WIDTH, HEIGHT, color_scheme="light") as page:
        await page.page.locator("#experts").wait_for()
        await asyncio.sleep(RATE_S)
        await page.page.screenshot(path=path, full_page=True)


if __name__ == "__main__":
    BROWSER.run(of_a_server(*sys.argv[1:]) if len(sys.argv) == 3 else of_a_story(sys.argv[1]))
    BROWSER.close()
