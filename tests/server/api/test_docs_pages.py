"""What is at /, and the page at /docs: complete, for browsers and programs, with nothing loaded from elsewhere."""

import re
from html.parser import HTMLParser

import pytest

from moe_serve.server.api.docs import LINKS, docs_page
from moe_serve.server.edge.keys import API_KEY_VARIABLE
from tests.browser import browser_page, in_browser_loop
from tests.server.served import in_event_loop, serving


class Links(HTMLParser):
    def __init__(self, page: str):
        super().__init__()
        self.tags: set[str] = set()
        self.targets: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.targets += [value for name, value in attrs if name in ("href", "src")]


@in_event_loop
async def test_docs_has_every_route_field_and_error_of_the_openapi_document():
    async with serving() as served:
        page = (await served.client.get("/docs")).text
        document = (await served.client.get("/openapi.json")).json()
    for path, methods in document["paths"].items():
        for method in methods:
            assert f"{method.upper()}</span> <code>{path}</code>" in page, (method, path)
    for name, schema in document["components"]["schemas"].items():
        for field in schema.get("properties", {}) if name != "Error" else ():
            assert f"<code>{field}</code>" in page.partition(f'id="{name}"')[2], (name, field)
    assert "try again after the time in Retry-After" in page


@in_event_loop
async def test_the_page_runs_no_script_and_all_its_links_are_of_this_server():
    async with serving() as served:
        answer = await served.client.get("/docs", headers={"accept": "text/html,*/*"})
        assert answer.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        links = Links(answer.text)
        assert not links.tags & {"script", "iframe", "img", "form"}
        for target in links.targets:
            if target.startswith("#"):
                assert f'id="{target[1:]}"' in answer.text
            elif target != "data:,":
                assert re.fullmatch(r"[\w./#]+", target), target
                assert (await served.client.get(f"/{target}")).status_code == 200, target


@in_event_loop
async def test_root_is_the_chat_for_browsers():
    async with serving() as served:
        answer = await served.client.get("/", headers={"accept": "text/html,*/*;q=0.8"})
        assert (answer.status_code, answer.headers["location"], answer.headers["vary"]) == (307, "chat", "Accept")
        assert "<title>moe_serve: chat</title>" in (await served.client.get("/chat")).text


@in_event_loop
async def test_root_says_to_programs_what_there_is():
    async with serving() as served:
        answer = await served.client.get("/", headers={"accept": "*/*"})
        paths = answer.json()["paths"]
        assert list(paths) == list(LINKS)
        for path, words in paths.items():
            status = (await served.client.get(path)).status_code
            assert (status, words) == ((405, f"{LINKS[path]} (POST)") if "(POST)" in words else (200, LINKS[path]))


def test_with_an_api_key_root_is_open_and_docs_asks_a_browser_for_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(API_KEY_VARIABLE, "key")

    @in_event_loop
    async def check():
        async with serving() as served:
            assert (await served.client.get("/")).status_code == 200
            refused = await served.client.get("/docs")
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"].startswith("Basic")

    check()


def test_what_a_document_says_is_text_on_the_page():
    operation = {"description": "<b>bold</b>", "responses": {"200": {"description": "<i>"}}}
    page = docs_page({"info": {"title": "<t>"}, "paths": {"/<p>": {"get": operation}}, "components": {"schemas": {}}})
    assert not Links(page).tags & {"b", "i", "t", "p>"}


@in_browser_loop
async def test_a_browser_comes_from_root_to_the_chat_and_unfolds_the_route_that_a_link_names():
    async with serving() as served, browser_page(f"{served.client.base_url}/") as page:
        await page.page.get_by_role("link", name="docs").click()
        await page.page.goto(f"{served.client.base_url}/docs#post_generate")
        await page.shows("#post_generate", "SGLang's native generation")
        assert page.problems == []


@in_browser_loop
async def test_a_browser_shows_the_page_without_a_complaint():
    async with serving() as served, browser_page(f"{served.client.base_url}/docs", width=420) as page:
        await page.shows("#GenerateRequest", "sampling_params")
        assert page.problems == []
        assert await page.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
