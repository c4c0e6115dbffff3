"""Who may call what: hosts, pages of other sites, keys, content types. Each refused by its header alone."""

import base64
from pathlib import Path

import httpx
import pytest

from moe_serve.config import load_config
from moe_serve.errors import ConfigError
from moe_serve.server.edge.guard import ADMIN, OPEN, is_foreign_page, is_loopback, is_served_host, tagged_routes
from moe_serve.server.edge.keys import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE, KeyRing
from tests.server.raw_client import RawClient, header
from tests.server.served import Served, in_event_loop, serving

FIVE = {"max_new_tokens": 5, "sampling_seed": 10}
BODY = {"text": "a", "sampling_params": FIVE}
ADMIN_ROUTES = {
    *(
        (method, f"/{verb}_expert_distribution_record")
        for method in ("GET", "POST")
        for verb in ("start", "stop", "dump")
    ),
    ("POST", "/start_profile"),
    ("POST", "/stop_profile"),
    ("POST", "/eplb/rebalance"),
    ("POST", "/eplb/placement"),
    *((method, "/flush_cache") for method in ("GET", "POST")),
}
OPEN_ROUTES = {
    ("GET", path)
    for path in (
        "/health", "/health_generate", "/ping", "/ready", "/readyz", "/metrics",
        "/dashboard", "/dashboard/page.css", "/dashboard/page.js", "/dashboard/charts.js",
        "/", "/docs/page.css", "/chat", "/chat/chat.css", "/chat/chat.js",
    )
} | {("HEAD", "/metrics")}  # fmt: skip


async def status(served: Served, method: str, path: str, **headers: str) -> int:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    json = BODY if (method, path) == ("POST", "/generate") else None
    return (await served.client.request(method, path, headers=sent, json=json)).status_code


async def posted(served: Served, media_type: str) -> httpx.Response:
    headers = {"content-type": media_type}
    return await served.client.post("/generate", content=b'{"text": "a"}', headers=headers)


# --- which routes are for whom ----------------------------------------------------------------------------------------


@in_event_loop
async def test_the_routes_that_change_the_server_and_those_that_are_open_are_these():
    async with serving() as served:
        tagged = tagged_routes(served.app)
    assert tagged[ADMIN] >= ADMIN_ROUTES
    assert tagged[OPEN] == OPEN_ROUTES
    assert {path for method, path in tagged[ADMIN] if method == "GET"} <= {path for _, path in ADMIN_ROUTES}


# --- keys -------------------------------------------------------------------------------------------------------------


def test_with_an_api_key_only_health_and_metrics_are_open(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(API_KEY_VARIABLE, "first-key second-key")

    @in_event_loop
    async def check():
        async with serving() as served:
            assert await status(served, "GET", "/health") == 200
            assert await status(served, "GET", "/metrics") == 200
            for path in ("/v1/models", "/server_info", "/eplb/status", "/dashboard/data", "/nothing", "/openapi.json"):
                assert await status(served, "GET", path) == 401, path
            for wrong in (
                "",
                "first-key",
                "Bearer",
                "Bearer first-ke",
                "Bearer first-key2",
                "Basic !",
                "Basic Zmlyc3Q=",
            ):
                assert await status(served, "POST", "/generate", authorization=wrong) == 401, wrong
            for right in (
                "Bearer first-key",
                "bearer second-key",
                f"Basic {base64.b64encode(b'me:first-key').decode()}",
            ):
                assert await status(served, "POST", "/generate", authorization=right) == 200, right
            refused = await served.client.get("/v1/models")
            assert refused.headers["www-authenticate"] == "Bearer"
            assert "Bearer KEY" in refused.json()["error"]["message"]
            asked = await served.client.get("/dashboard/data")
            assert asked.headers["www-authenticate"].startswith("Basic")

    check()


def test_the_admin_key_opens_admin_routes_and_an_api_key_does_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(API_KEY_VARIABLE, "api-key")
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, "admin-key")

    @in_event_loop
    async def check():
        async with serving() as served:
            for method, path in sorted(tagged_routes(served.app)[ADMIN]):
                assert await status(served, method, path) == 401, path
                assert await status(served, method, path, authorization="Bearer api-key") == 403, path
            path = "/eplb/rebalance"
            assert await status(served, "POST", path, authorization="Bearer admin-key") == 400  # eplb.mode is static
            assert await status(served, "POST", "/generate", authorization="Bearer admin-key") == 200
            assert not any(worker.commands for worker in served.workers)

    check()


@in_event_loop
async def test_without_an_admin_key_admin_routes_are_closed_where_other_machines_connect():
    async with serving(2, "server.host=0.0.0.0") as served:
        for method, path in sorted(tagged_routes(served.app)[ADMIN]):
            refused = await served.client.request(method, path)
            assert refused.status_code == 403
            assert "MOE_SERVE_ADMIN_API_KEY" in refused.json()["error"]["message"]
        assert await status(served, "POST", "/generate") == 200
    async with serving() as served:
        assert await status(served, "POST", "/eplb/rebalance") == 400  # open on loopback; eplb.mode is static


def test_keys_come_from_the_environment_and_from_a_file_that_only_its_owner_reads(tmp_path: Path):
    path = tmp_path / "keys"
    path.write_text("# teams\n\nteam-a  sk-1\nsk-2\n")
    path.chmod(0o600)
    server = load_config(overrides=[f"server.api_key_file={path}"]).server
    keys = KeyRing.load(server, {API_KEY_VARIABLE: "sk-0", ADMIN_KEY_VARIABLE: "root"})
    names = {secret: key.name for secret in ("sk-0", "sk-1", "sk-2", "root") if (key := keys.identify(secret))}
    assert names == {"sk-0": "key-1", "sk-1": "team-a", "sk-2": "key-3", "root": "admin-1"}
    assert keys.identify("root").is_admin
    assert not keys.identify("sk-1").is_admin
    for wrong in (None, "", "team-a", "team-a sk-1", "\ud800"):
        assert keys.identify(wrong) is None
    for mode, text, message in (
        (0o644, "sk-1", "chmod 600"),
        (0o600, "# none\n", "holds no key"),
    ):
        path.write_text(text)
        path.chmod(mode)
        with pytest.raises(ConfigError, match=message):
            KeyRing.load(server, {})
    path.unlink()
    with pytest.raises(ConfigError, match="is no file"):
        KeyRing.load(server, {})


def test_no_answer_shows_a_key(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(API_KEY_VARIABLE, "a-secret-key")

    @in_event_loop
    async def check():
        async with serving() as served:
            served.client.headers["authorization"] = "Bearer a-secret-key"
            for path in ("/server_info", "/metrics", "/health", "/openapi.json", "/dashboard/data"):
                answer = await served.client.get(path)
                assert answer.status_code == 200
                assert "a-secret-key" not in answer.text + str(answer.headers)

    check()


# --- hosts and sites --------------------------------------------------------------------------------------------------

HOSTS = [
    ("localhost", True), ("localhost:30000", True), ("127.0.0.1:1", True), ("[::1]:30000", True), ("10.1.2.3", True),
    ("a.localhost", True), ("LOCALHOST", True), (None, True),
    ("evil.example", False), ("localhost.evil.example", False), ("127.0.0.1.evil.example", False), ("", False),
    ("[::1", False), ("evil.example#localhost", False), ("evil.example@localhost", True),
]  # fmt: skip


@pytest.mark.parametrize(("name", "served"), HOSTS)
def test_names_that_could_point_anywhere_are_refused_on_loopback(name, served):
    assert is_served_host(name, "127.0.0.1", ()) == served
    assert is_served_host(name, "0.0.0.0", ())
    assert is_served_host(name, "127.0.0.1", ("*",))
    assert is_served_host("evil.example:80", "127.0.0.1", ("Evil.Example",))
    assert not is_served_host("other.example", "0.0.0.0", ("evil.example",))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_addresses_are_known(host):
    assert is_loopback(host)
    assert not any(is_loopback(other) for other in ("0.0.0.0", "::", "10.0.0.1", "example.com", ""))


@in_event_loop
async def test_a_rebound_name_is_refused_before_anything_else():
    async with serving() as served:
        client = await RawClient.connect(served)
        for path in ("GET /server_info", "GET /health", "POST /generate"):
            await client.send(header(path, "content-length: 0\r\n", host="evil.example:30000"))
            answer = await client.answer()
            assert answer.status == 421
            assert "server.allowed_hosts" in answer.message
    async with serving(2, "server.allowed_hosts=[good.example]") as served:
        client = await RawClient.connect(served)
        await client.send(header("GET /server_info", host="good.example"))
        assert (await client.answer()).status == 200


def test_pages_of_other_sites_are_told_from_own_ones_and_from_programs():
    own = {"host": "localhost:30000"}
    assert not is_foreign_page(own, ())
    assert not is_foreign_page({**own, "origin": "http://localhost:30000", "sec-fetch-site": "same-origin"}, ())
    assert not is_foreign_page({**own, "sec-fetch-site": "none"}, ())
    assert is_foreign_page({**own, "origin": "http://evil.example"}, ())
    assert is_foreign_page({**own, "origin": "http://localhost:8080", "sec-fetch-site": "same-site"}, ())
    assert is_foreign_page({**own, "origin": "null"}, ())
    assert is_foreign_page({**own, "origin": "http://[bad"}, ())
    assert is_foreign_page({**own, "sec-fetch-site": "cross-site"}, ())
    allowed = {**own, "origin": "https://a.example", "sec-fetch-site": "cross-site"}
    assert not is_foreign_page(allowed, ("https://a.example",))
    assert not is_foreign_page(allowed, ("*",))


@in_event_loop
async def test_a_web_page_can_neither_post_to_a_local_server_nor_change_it_by_an_image():
    async with serving() as served:
        evil = {"origin": "http://evil.example", "sec_fetch_site": "cross-site"}
        assert await status(served, "POST", "/generate", **evil) == 403
        assert await status(served, "GET", "/start_expert_distribution_record", sec_fetch_site="cross-site") == 403
        assert await status(served, "POST", "/eplb/rebalance", origin="null") == 403
        for media_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
            refused = await served.client.post(
                "/generate", content=b'{"text": "a"}', headers={"content-type": media_type}
            )
            assert refused.status_code == 415, media_type
            assert "application/json" in refused.json()["error"]["message"]
        assert not any(worker.submitted or worker.commands for worker in served.workers)
        for media_type in ("application/json", "Application/JSON; charset=utf-8", "application/vnd.x+json"):
            answer = await served.client.post(
                "/generate", content=b'{"text": "a"}', headers={"content-type": media_type}
            )
            assert answer.status_code == 200, media_type
        plain = await served.client.get("/health", headers={"origin": "http://evil.example"})
        assert "access-control-allow-origin" not in plain.headers


@in_event_loop
async def test_cors_is_for_the_configured_origins_only():
    async with serving(2, "server.cors_origins=['https://a.example']") as served:
        ask = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}

        async def preflight(origin: str) -> httpx.Response:
            return await served.client.options("/generate", headers={"origin": origin, **ask})

        assert (await preflight("https://a.example")).headers["access-control-allow-origin"] == "https://a.example"
        assert (await preflight("https://b.example")).status_code == 400
        answer = await served.client.post("/generate", json=BODY, headers={"origin": "https://a.example"})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        assert await status(served, "POST", "/generate", origin="https://b.example") == 403
