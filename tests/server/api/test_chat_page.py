"""The chat at /chat, in a browser: it streams, goes on with the conversation, stops, and says what is wrong."""

from pathlib import Path

import pytest

from moe_serve.server.edge.keys import API_KEY_VARIABLE
from tests.browser import browser_page, in_browser_loop
from tests.server.api.calls import TEXT, says, with_template
from tests.server.observe.reports import Story
from tests.server.served import serving, until

_THINKS = "server.reasoning_parser=qwen3"


@in_browser_loop
async def test_a_conversation_goes_on_and_an_answer_can_be_stopped(tmp_path: Path):
    reply = says("<think>\nHm.\n</think>\n\nIt is <b>one</b>.")
    async with (
        serving(1, with_template(tmp_path), _THINKS, reply=reply) as served,
        browser_page(f"{served.client.base_url}/chat", width=400) as page,
    ):
        await page.shows("#model", "demo")
        await page.page.click("footer summary")
        await page.page.fill("#length", "40")
        await page.page.fill("#text", "hi")
        await page.page.press("#text", "Enter")
        await page.shows(".message.assistant .text >> nth=-1", "It is <b>one</b>.")
        await page.shows(".message.assistant .more", "in the prompt")
        await page.shows(".message.assistant details", "reasoning")
        served.hold()
        await page.page.fill("#text", "and?")
        await page.page.press("#text", "Enter")
        await until(lambda: len(served.bridge.book) == 1)
        await page.page.keyboard.press("Escape")
        await until(lambda: len(served.bridge.book) == 0)
        await page.page.wait_for_selector("#send:visible")
        wide = await page.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        prompts = [TEXT.decode(submit.prompt_ids) for submit in served.workers[0].submitted]
    assert wide
    assert prompts[1].startswith("<user>hi\n<assistant>It is <b>one</b>.\n<user>and?\n")
    assert [problem for problem in page.problems if "ERR_ABORTED" not in problem] == []


@pytest.mark.parametrize("kind", ["chat", "continue"])
def test_each_token_of_an_answer_shows_the_experts_and_ranks_that_computed_it(kind: str, tmp_path: Path):
    story = Story(num_windows=3)
    options = (with_template(tmp_path), "eplb.mode=dynamic", "engine.return_routed_experts=true")

    @in_browser_loop
    async def check():
        async with serving(story.num_ranks, *options, info=story.info, reply=says("one two")) as served:
            for at_s, report in story.reports():
                served.bridge.balance.take(report, at_s)
            placement = served.bridge.balance.placement
            assert placement is not None
            per_rank = len(placement[0]) // story.num_ranks
            async with browser_page(f"{served.client.base_url}/chat", width=400) as page:
                await page.shows("#model", "demo")
                assert not await page.page.is_visible("#no-experts")
                await page.page.click("footer summary")
                await page.page.fill("#length", "2")
                await page.page.select_option("#kind", kind)
                await page.page.fill("#text", "hi")
                await page.page.click("#send")
                await page.page.locator(".token >> nth=1").wait_for()
                assert await page.page.locator(".token").count() == 2
                await page.page.focus(".token >> nth=0")
                await page.page.keyboard.press("ArrowRight")
                text = await page.text(".message.assistant .more >> nth=-1")
                strips = await page.page.eval_on_selector_all(".token i", "all => all.map(i => i.style.background)")
                wide = await page.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            (submit,) = [submit for worker in served.workers for submit in worker.submitted]

        def shown(layer: int, expert: int) -> str:
            ranks = dict.fromkeys(slot // per_rank for slot, held in enumerate(placement[layer]) if held == expert)
            return f"{expert} (rank {' or '.join(map(str, ranks))})"

        row = len(submit.prompt_ids)  # behind the first token, from which the second was drawn
        first = shown(0, row) if row < 32 else str(row)
        assert f"layer 0: {first}, {shown(0, 1)}; layer 1: {shown(1, 2)}, {shown(1, 3)}" in text
        assert all("linear-gradient" in strip for strip in strips)
        assert wide
        assert page.problems == []

    check()


@in_browser_loop
async def test_a_server_whose_layer_predicts_says_that_it_keeps_no_experts_beside_it():
    options = ("speculation.mode=mtp",)
    async with serving(1, *options) as served, browser_page(f"{served.client.base_url}/chat") as page:
        await page.shows("#no-experts", "--enable-return-routed-experts and another --speculation than mtp to see them")


@in_browser_loop
async def test_text_is_continued_and_problems_are_told():
    async with serving(1, reply=says(" world")) as served, browser_page(f"{served.client.base_url}/chat") as page:
        await page.shows("#model", "demo")
        await page.shows("#no-experts", "--enable-return-routed-experts")
        assert not await page.page.is_visible("#beside-layer")
        await page.page.fill("#text", "hello")
        await page.page.click("footer summary")
        await page.page.fill("#length", "5000")
        await page.page.press("#text", "Enter")
        await page.shows("#problem", "max_tokens is 5000")
        await page.page.select_option("#kind", "continue")
        await page.page.fill("#length", "8")
        await page.page.click("#send")
        await page.shows(".message.assistant", "hello world")
        assert not await page.page.is_visible("#problem")


def test_a_key_is_asked_for_where_the_server_needs_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(API_KEY_VARIABLE, "secret")

    @in_browser_loop
    async def check():
        async with serving(1) as served, browser_page(f"{served.client.base_url}/chat") as page:
            await page.shows("#problem", "API key")
            await page.page.fill("#key", "secret")
            await page.page.press("#key", "Tab")
            await page.shows("#model", "demo")

    check()
