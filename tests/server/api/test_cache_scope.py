"""Whose cached prefixes a request may find: each client's own where there are keys. What ranks are told, by route."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from moe_serve.config import ServerConfig
from moe_serve.server.edge.client_limits import Client, ClientLimits
from moe_serve.server.edge.keys import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE, KeyRing
from tests.server.served import Served, in_event_loop, serving

ROUTES: dict[str, dict[str, Any]] = {
    "/generate": {"text": "some text", "sampling_params": {"max_new_tokens": 2}},
    "/v1/completions": {"prompt": "some text", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "some text"}], "max_tokens": 2},
    "/v1/responses": {"input": "some text", "max_output_tokens": 2},
}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


async def salt_of(served: Served, route: str, key: str | None, **fields: Any) -> str:
    """The salt with which ranks get the request of a call."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    answer = await served.client.post(route, json={**ROUTES[route], **fields}, headers=headers)
    assert answer.status_code == 200, answer.text
    newest = max((submit for worker in served.workers for submit in worker.submitted), key=_number)
    return newest.salt


def _number(submit: Any) -> int:
    return int(submit.request_id.rpartition("-")[2])


def template(tmp_path: Path) -> str:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    return f"server.chat_template={path}"


def test_each_key_has_a_salt_of_its_own_by_every_route_and_on_every_front_end(monkeypatch, tmp_path):
    monkeypatch.setenv(API_KEY_VARIABLE, "first-key second-key")
    monkeypatch.setenv(ADMIN_KEY_VARIABLE, "admin-key")
    setting = template(tmp_path)

    @in_event_loop
    async def check():
        found: dict[str, set[str]] = {"first-key": set(), "second-key": set(), "admin-key": set()}
        for _ in range(2):  # front ends that know nothing of each other
            async with serving(2, setting) as served:
                for key, route in itertools.product(found, ROUTES):
                    found[key].add(await salt_of(served, route, key))
        assert [len(salts) for salts in found.values()] == [1, 1, 1]
        salts = [next(iter(each)) for each in found.values()]
        assert len(set(salts)) == 3
        for key, salt in zip(found, salts, strict=True):
            assert key not in salt
            ring = KeyRing.load(ServerConfig())
            assert ring.identify(key).digest.hex() not in salt, "who sees a salt cannot pass for the client"

    check()


def test_a_salt_of_the_client_divides_its_own_scope_and_reaches_no_other(monkeypatch):
    monkeypatch.setenv(API_KEY_VARIABLE, "first-key second-key")

    @in_event_loop
    async def check():
        async with serving() as served:
            own = await salt_of(served, "/generate", "first-key")
            tenant = await salt_of(served, "/generate", "first-key", cache_salt="tenant")
            assert tenant != own
            assert tenant == await salt_of(served, "/v1/completions", "first-key", cache_salt="tenant")
            assert tenant != await salt_of(served, "/generate", "second-key", cache_salt="tenant")
            for stolen in (own, tenant, own.removesuffix("\0")):  # a client that had seen another's salt
                assert await salt_of(served, "/generate", "second-key", cache_salt=stolen) not in (own, tenant)

    check()


@pytest.mark.parametrize("keys", ["", "first-key second-key"])
def test_without_keys_and_where_keys_share_on_purpose_salts_are_those_of_the_clients(monkeypatch, keys):
    monkeypatch.setenv(API_KEY_VARIABLE, keys)

    @in_event_loop
    async def check():
        async with serving(2, *(["server.share_prefix_cache=true"] if keys else [])) as served:
            for key in keys.split() or [None]:
                assert await salt_of(served, "/generate", key) == ""
                assert await salt_of(served, "/v1/completions", key, cache_salt="tenant") == "tenant"

    check()


def test_keys_of_one_name_are_one_client_and_share_its_prefixes(tmp_path):
    path = tmp_path / "keys"
    path.write_text("alice sk-old\nbob sk-b\nalice sk-new\nsk-c\n")
    path.chmod(0o600)
    ring = KeyRing.load(ServerConfig(api_key_file=str(path)), {})
    old, bob, new, unnamed = (ring.identify(key).client.cache_salt("") for key in ("sk-old", "sk-b", "sk-new", "sk-c"))
    assert old == new
    assert len({old, bob, unnamed}) == 3


def test_a_scope_is_shown_nowhere():
    client = Client("key", "alice", ClientLimits(), cache_scope="5c0be")
    assert "5c0be" not in f"{client} {client!r}"
    assert client.cache_salt("own") == "5c0be\0own"
    assert Client.at("127.0.0.1", ClientLimits()).cache_salt("own") == "own"
