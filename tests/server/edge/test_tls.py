"""HTTPS. The key in tests/server/edge/tls/ is for these tests; it keeps no secret."""

import shutil
import ssl
from pathlib import Path

import pytest

from moe_serve.config import load_config
from moe_serve.errors import ConfigError
from moe_serve.server.edge.ports import make_tls
from tests.server.raw_client import RawClient, header
from tests.server.served import in_event_loop, serving, until

FOLDER = Path(__file__).parent / "tls"
CERT, KEY = FOLDER / "cert.pem", FOLDER / "key.pem"
TLS = f"server.ssl_certfile={CERT}", f"server.ssl_keyfile={KEY}"


def client_context() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=CERT)


@in_event_loop
async def test_https_is_served_and_garbage_on_its_port_ends():
    async with serving(2, *TLS, "server.header_deadline_s=0.3") as served:
        silent = await RawClient.connect(served)
        garbage = await RawClient.connect(served)
        await garbage.send(b"GET /ping HTTP/1.1\r\nhost: localhost\r\n\r\n")
        client = await RawClient.connect(served, ssl=client_context())
        await client.post({"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 5}})
        assert (await client.answer()).body.endswith(b"data: [DONE]\n\n")
        await garbage.closed()
        await silent.closed()
        await client.close()
        await until(lambda: len(served.server.table) == 0)


@in_event_loop
async def test_silent_handshakes_count_as_connections_and_yield_to_new_ones():
    async with serving(1, *TLS, "server.max_connections=5", "server.max_connections_per_client=5") as served:
        silent = [await RawClient.connect(served) for _ in range(20)]
        client = await RawClient.connect(served, ssl=client_context())
        await client.send(header("GET /ping"))
        assert (await client.answer()).status == 200
        assert len(served.server.table) <= 5
        assert await silent[0].closed() == b""


@in_event_loop
async def test_a_client_without_a_certificate_is_refused_where_one_is_needed():
    async with serving(1, *TLS, f"server.ssl_ca_certs={CERT}") as served:

        async def ping(context: ssl.SSLContext) -> int:
            client = await RawClient.connect(served, ssl=context)
            await client.send(header("GET /ping"))
            return (await client.answer()).status

        with pytest.raises((OSError, EOFError)):
            await ping(client_context())
        known = client_context()
        known.load_cert_chain(CERT, KEY)
        assert await ping(known) == 200


def test_files_that_do_not_fit_are_named(tmp_path: Path):
    def problem(*overrides: str) -> str:
        with pytest.raises(ConfigError) as caught:
            make_tls(load_config(overrides=overrides).server)
        return str(caught.value)

    assert make_tls(load_config().server) is None
    assert "without ssl_certfile" in problem(f"server.ssl_keyfile={KEY}")
    assert "server.ssl_keyfile is" in problem(f"server.ssl_certfile={CERT}", "server.ssl_keyfile=/nowhere/key.pem")
    assert "do not fit" in problem(f"server.ssl_certfile={CERT}")  # the key is not in it
    assert "password" in problem(f"server.ssl_certfile={CERT}", f"server.ssl_keyfile={FOLDER / 'encrypted_key.pem'}")
    assert "do not fit" in problem(f"server.ssl_certfile={KEY}", f"server.ssl_keyfile={KEY}")
    shutil.copy(KEY, tmp_path / "ca.pem")
    assert "server.ssl_ca_certs" in problem(*TLS, f"server.ssl_ca_certs={tmp_path / 'ca.pem'}")
