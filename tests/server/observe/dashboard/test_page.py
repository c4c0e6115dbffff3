"""The page at /dashboard: what is served, and what a headless Chromium shows of it."""

import time
from importlib import resources

import msgspec
import pytest

from moe_serve.engine.protocol.messages import Answer, DecisionReport, Rebalance
from moe_serve.server.edge.keys import ADMIN_KEY_VARIABLE
from tests.browser import Page, browser_page, in_browser_loop
from tests.server.observe.reports import Story
from tests.server.served import Served, in_event_loop, serving

DYNAMIC = "eplb.mode=dynamic"
FILES = {"": "text/html", "/page.css": "text/css", "/charts.js": "text/javascript", "/page.js": "text/javascript"}


def short_story(num_windows: int = 30, policy: str = "incremental", **fields: int) -> Story:
    story = Story(num_windows=num_windows, shifts=(12,), policy=policy, **fields)  # type: ignore[arg-type]
    story.began_s = time.time() - story.num_windows * story.window_s
    return story


def tell(served: Served, story: Story) -> None:
    """The reports of a story, each at its time, and the ranks' own."""
    for at_s, report in story.reports():
        served.bridge.balance.take(report, at_s)
    for worker, status in zip(served.workers, story.statuses(30), strict=True):
        worker.say(status)


async def colors(page: Page, canvas: str) -> int:
    """How many colours a canvas shows."""
    return int(
        await page.page.evaluate(
            """id => { const canvas = document.getElementById(id);
                       const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
                       return new Set(new Uint32Array(data.buffer)).size }""",
            canvas,
        )
    )


async def drawn(page: Page, version: float) -> None:
    await page.shows("#version", f"v{version:.0f}")
    await page.page.locator("#experts").wait_for()


async def check(page: Page, served: Served) -> None:
    """Nothing complained, nothing was asked of another server, nothing sticks out to the right."""
    origin = str(served.client.base_url)
    assert page.problems == []
    assert all(url.startswith((origin, "data:")) for url in page.urls)
    assert await page.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@in_event_loop
async def test_the_page_is_small_and_may_load_nothing_from_elsewhere():
    async with serving(2) as served:
        answers = {path: await served.client.get(f"/dashboard{path}") for path in FILES}
        data = await served.client.get("/dashboard/data")
        wrong = await served.client.get("/dashboard/data?windows=x")
    for path, kind in FILES.items():
        assert answers[path].status_code == 200
        assert answers[path].headers["content-type"].startswith(kind)
        policy = answers[path].headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        text = answers[path].text
        for forbidden in ("http://", "https://", "//cdn", "innerHTML", "insertAdjacent", "document.write", "eval("):
            assert forbidden not in text, (path, forbidden)
    assert sum(len(answer.content) for answer in answers.values()) < 100_000
    assert data.json()["balancer"]["mode"] == "static"
    assert wrong.status_code == 400
    assert "windows" in wrong.json()["error"]["message"]


def test_the_package_holds_the_files_of_the_page():
    folder = resources.files("moe_serve.server") / "pages"
    assert {path.name for path in folder.iterdir()} >= {"page.html", "page.css", "page.js", "charts.js"}


@in_browser_loop
async def test_a_desktop_shows_load_moves_and_a_decision_that_comes_later():
    story = short_story()
    async with serving(4, DYNAMIC, info=story.info) as served:
        tell(served, story)
        async with browser_page(f"{served.client.base_url}/dashboard") as page:
            await drawn(page, story.totals["num_rounds"])
            assert await colors(page, "experts") > 30
            assert await colors(page, "ranks") > 10
            assert await colors(page, "curve") > 5
            assert await page.text("#model") == "demo"
            assert await page.text("#state") == "balancer: watching"
            assert " → " in await page.text("#gain")
            assert f"{story.totals['num_experts_moved']:.0f}" == await page.text("#moved")
            assert "is live" in await page.text("#timeline li:first-child")
            assert len((await page.text("#table")).strip().splitlines()) == 4
            await shows_values_under_pointer_and_keys(page, served)
            hostile = "<img src=x onerror=document.title=1> & 'more'"
            later = DecisionReport(time.time(), 9000, "keep", hostile, 4, 0.0, 0.0)
            (_, first), *_ = story.reports()
            report = type(first)(
                0, 0, 9000, "dynamic", "off", served.bridge.balance.version, {}, "it failed 3 times", None, [later]
            )
            served.workers[0].say(report)
            await page.shows("#timeline li:nth-child(2)", hostile)
            assert "it failed 3 times" in await page.text("#timeline li:first-child")
            assert "it failed 3 times" in await page.text("#alarm")
            judged = DecisionReport(time.time(), 9100, "watch", "the last move is judged", 0, 4.0, 0.0, 2.5)
            served.workers[0].say(msgspec.structs.replace(report, step=9100, decisions=[judged]))
            await page.shows("#timeline li:first-child", "gained 2.5\u00a0s of 4\u00a0s promised")
            await check(page, served)


@in_browser_loop
async def test_the_tile_of_the_last_move_shows_what_it_brought_once_it_is_measured():
    """Here clients leave with the window in which experts moved: no other one follows."""
    story = short_story(16)
    told = [report for _, report in story.reports()]
    end = next(i for i, report in enumerate(told) if report.decisions and report.decisions[0].kind == "done")
    window = next(report.window for report in reversed(told[:end]) if report.window is not None)
    last = msgspec.structs.replace(window, first_step=window.first_step + window.num_steps, mean_at_end=0.987)
    async with serving(4, DYNAMIC, info=story.info) as served:
        for at_s, report in list(story.reports())[: end + 1]:
            served.bridge.balance.take(report, at_s)
        async with browser_page(f"{served.client.base_url}/dashboard") as page:
            await page.shows("#gain", " → –")
            await page.shows("#gain-more", "predicted: ")
            judged = DecisionReport(time.time(), 9100, "watch", "the last move is judged", 0, 4.0, 0.0, 2.5)
            step = last.first_step + last.num_steps
            served.workers[0].say(
                msgspec.structs.replace(told[end], step=step, window=last, decisions=[judged], placement=None)
            )
            await page.shows("#gain", " → 0.99")
            await page.shows("#gain-more", "gained 2.5\u00a0s of 4\u00a0s promised")
            await check(page, served)


async def shows_values_under_pointer_and_keys(page: Page, served: Served) -> None:
    window, placement = served.bridge.balance.window, served.bridge.balance.placement
    assert window is not None
    assert placement is not None
    await page.page.focus("#experts")
    for key in ("ArrowRight", "ArrowDown", "ArrowDown", "End", "ArrowLeft"):
        await page.page.keyboard.press(key)
    ranks = sorted({slot // (len(placement[2]) // 4) for slot, expert in enumerate(placement[2]) if expert == 30})
    text = await page.text("#experts-text")
    assert text.startswith(f"layer 3, expert 30: {window.tokens[2][30]:,} tokens")
    assert text.endswith(f"on rank {', '.join(map(str, ranks))}")
    box = await page.page.locator("#ranks").bounding_box()
    await page.page.mouse.move(box["x"] + box["width"] - 5, box["y"] + 5)
    tip = await page.text("#tip")
    assert tip.startswith(f"layer 1, rank 3: {round(window.rank_load[0][3]):,} tokens")
    assert tip == await page.text("#ranks-text")
    await page.page.mouse.move(2, 2)
    assert (await page.text("#ranks-text")).startswith("Busiest: ")


@in_browser_loop
async def test_a_phone_shows_58_layers_of_256_experts_and_a_hidden_page_asks_nothing():
    story = short_story(3, "greedy", num_layers=58, num_experts=256, num_ranks=32, num_slots=288)
    async with serving(32, DYNAMIC, info=story.info, round_s=0.2) as served:
        tell(served, story)
        phone = {"has_touch": True, "is_mobile": True, "color_scheme": "dark"}
        async with browser_page(f"{served.client.base_url}/dashboard", 375, 812, **phone) as page:
            await drawn(page, story.totals["num_rounds"])
            assert await colors(page, "experts") > 100
            await page.page.locator("#experts").scroll_into_view_if_needed()
            box = await page.page.locator("#experts").bounding_box()
            await page.page.touchscreen.tap(box["x"] + box["width"] - 1, box["y"] + 3)
            assert (await page.text("#experts-text")).startswith("layer 1, expert 255: ")
            await page.page.evaluate("Object.defineProperty(document, 'hidden', {get: () => true})")
            await page.page.wait_for_timeout(300)
            asked = len(page.urls)
            await page.page.wait_for_timeout(1500)
            assert len(page.urls) == asked
            await check(page, served)


@in_browser_loop
async def test_a_click_shows_an_expert_over_time_and_a_button_asks_for_a_plan():
    story = short_story()

    def answer(call_id: int) -> Answer:
        return Answer(0, 0, call_id, True, "a plan is being made")

    async with serving(4, DYNAMIC, info=story.info, answer=answer) as served:
        tell(served, story)
        async with browser_page(f"{served.client.base_url}/dashboard", 400, 800) as page:
            await drawn(page, story.totals["num_rounds"])
            assert not await page.page.locator("#phases-section").is_visible(), "all windows are of decodes"
            prefill = next(each for _, each in reversed(list(story.reports())) if each.window is not None)
            assert prefill.window is not None
            window = msgspec.structs.replace(prefill.window, phase="prefill", step_time_s=0.1)
            served.workers[0].say(msgspec.structs.replace(prefill, window=window, decisions=[]))
            await page.shows("#prefill-more", "prefill: balancedness ")
            await page.shows("#prefill-more", "1 window, 100.0\u00a0ms a step")
            await page.shows("#decode-more", "decode: balancedness ")
            await page.shows("#prefill-text", "Busiest: layer ")
            assert await colors(page, "prefill") > 30
            await page.page.focus("#decode")
            await page.page.keyboard.press("ArrowRight")
            await page.shows("#decode-text", "layer 1, expert 0: ")
            placement, window = served.bridge.balance.placement, served.bridge.balance.window
            assert placement is not None
            assert window is not None
            assert not await page.page.locator("#expert").is_visible()
            await page.page.locator("#experts").scroll_into_view_if_needed()
            box = await page.page.locator("#experts").bounding_box()
            await page.page.mouse.click(box["x"] + box["width"] - 2, box["y"] + 3)
            await page.shows("#expert-title", "Expert 31 of layer 1")
            slots = [slot for slot, expert in enumerate(placement[0]) if expert == 31]
            per_rank = len(placement[0]) // 4
            where = ", ".join(f"rank {slot // per_rank} (slot {slot})" for slot in slots)
            now = window.tokens[0][31] / (sum(window.tokens[0]) / 32)
            await page.shows("#expert-text", f"{len(slots)} replica")
            await page.shows("#expert-text", f": {where}. 2 windows since")
            await page.shows("#expert-text", f"now {now:.2f}")
            assert await colors(page, "expert-curve") > 3
            await page.page.click("#expert-close")
            await page.page.locator("#expert").wait_for(state="hidden")
            await page.page.focus("#experts")
            await page.page.keyboard.press("ArrowRight")
            await page.page.keyboard.press("Enter")
            await page.shows("#expert-title", "Expert 0 of layer 1")
            await page.page.select_option("#range", "600")
            await page.shows("#curve-text", "Now ")
            await page.page.click("#rebalance")
            await page.page.locator("#answered").wait_for()
            assert await page.text("#answered") == "a plan is being made"
            assert [type(command) for worker in served.workers for command in worker.commands] == [Rebalance] * 4
            await check(page, served)


@in_browser_loop
async def test_without_a_window_the_page_waits_for_it():
    async with serving(2, DYNAMIC) as served, browser_page(f"{served.client.base_url}/dashboard") as page:
        await page.shows("#serving", "serving")
        assert await page.text("#experts-text") == "Waiting for the first window."
        assert await page.text("#timeline") == "Nothing has been decided yet."
        assert not await page.page.locator("#experts").is_visible()
        story = short_story(num_ranks=2)
        tell(served, story)
        await drawn(page, story.totals["num_rounds"])
        assert await page.page.locator("#experts").is_visible()
        await check(page, served)


def test_an_admin_gives_the_key_where_the_server_has_one(monkeypatch: pytest.MonkeyPatch):
    """The button could not be used there."""
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, "secret")
    story, asked = short_story(num_ranks=2), []

    def answer(call: int) -> Answer:
        asked.append(call)
        return Answer(0, 0, call, True, "done")

    @in_browser_loop
    async def check_key():
        async with serving(2, DYNAMIC, info=story.info, answer=answer) as served:
            tell(served, story)
            async with browser_page(f"{served.client.base_url}/dashboard") as page:
                await drawn(page, story.totals["num_rounds"])
                await page.page.click("#rebalance")
                await page.shows("#answered", "this needs the admin key")
                await page.page.keyboard.type("secret")  # the field has the focus
                await page.page.press("#key", "Tab")
                await page.page.focus("#key")
                assert await page.page.text_content("#answered") != "done", "nobody asked"
                await page.page.press("#key", "Enter")
                await page.shows("#answered", "done")
                assert len(asked) == 2, "one of each rank: leaving the field asks for nothing"
                assert all("401" in problem for problem in page.problems)

    check_key()
