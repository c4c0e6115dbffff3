"""The pages at / and /docs: complete, for browsers and programs, with nothing loaded from elsewhere."""

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
async def test_the_pages_run_no_script_and_all_their_links_are_of_this_server():
    async with serving() as served:
        for path in ("/", "/docs"):
            answer = await served.client.get(path, headers={"accept": "text/html,*/*"})
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
async def test_a_route_that_takes_only_post_is_a_link_to_its_place_in_the_docs():
    async with serving() as served:
        front = (await served.client.get("/", headers={"accept": "text/html"})).text
        docs = (await served.client.get("/docs")).text
        for path in LINKS:
            answer = await served.client.get(path)
            if answer.status_code == 405:
                place = f"post{path.replace('/', '_')}"
                assert f'<span class="method">POST</span> <a href="docs#{place}">{path}</a>' in front
                assert docs.count(f'id="{place}"') == 1
            else:
                assert answer.status_code == 200
                assert f'<a href="{path[1:]}">{path}</a>' in front


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
async def test_a_browser_unfolds_the_route_that_a_link_of_the_front_page_names():
    async with serving() as served, browser_page(f"{served.client.base_url}/") as page:
        await page.page.get_by_role("link", name="/generate").click()
        await page.shows("#post_generate", "SGLang's native generation")
        assert page.problems == []


@in_browser_loop
async def test_a_browser_shows_the_page_without_a_complaint():
    async with serving() as served, browser_page(f"{served.client.base_url}/docs", width=420) as page:
        await page.shows("#GenerateRequest", "sampling_params")
        assert page.problems == []
        assert await page.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
