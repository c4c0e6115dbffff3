"""What one client may ask for: requests and tokens per minute, requests at a time. Time is an argument."""

import asyncio
import multiprocessing
import multiprocessing.synchronize
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_serve.config import ServerConfig
from moe_serve.errors import ConfigError, QueueFullError, RateLimitError, RequestError
from moe_serve.server.edge.client_limits import (
    Bucket,
    Client,
    ClientLimits,
    ClientTable,
    Ledger,
    _duration,
    shared_memory,
)
from moe_serve.server.edge.keys import API_KEY_VARIABLE, KeyRing
from tests.server.served import in_event_loop, serving, until

FIVE = {"max_new_tokens": 5, "sampling_seed": 10}


def client(name: str = "a", **limits: int) -> Client:
    return Client("key", name, ClientLimits(**limits))


def enter(table: ClientTable, of: Client, now_s: float):
    """A permit that has entered, or the error."""
    permit = table.permit(of, now_s)
    try:
        permit.enter(now_s)
    except RateLimitError as error:
        permit.leave(now_s)
        return error
    return permit


# --- buckets ----------------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 10**6),
    st.lists(st.tuples(st.floats(0, 200), st.integers(0, 10**6), st.booleans()), max_size=60),
)
def test_no_minute_gives_more_than_a_full_bucket_and_what_comes_back_meanwhile(limit, steps):
    bucket, now_s, taken = Bucket(limit, memoryview(bytearray(16)).cast("d"), 0), 0.0, 0
    bucket.fill(0.0)
    for wait_s, amount, gives_back in steps:
        now_s += wait_s
        if amount <= bucket.level(now_s):
            bucket.take(amount, now_s)
            taken += amount
            if gives_back:
                bucket.take(-amount, now_s)
                taken -= amount
        else:
            now_s += bucket.wait_s(amount, now_s)
            assert bucket.level(now_s) >= min(amount, limit) * (1 - 1e-9)
        assert 0 <= bucket.level(now_s) <= limit
        assert taken <= limit * (1 + now_s / 60) * (1 + 1e-9)


@pytest.mark.parametrize(
    "seconds, text", [(0, "0ms"), (0.0204, "20ms"), (1, "1s"), (8.64, "8.64s"), (60, "1m0s"), (432, "7m12s")]
)
def test_a_time_is_written_as_in_openais_headers(seconds, text):
    assert _duration(seconds) == text


# --- one client -------------------------------------------------------------------------------------------------------


def test_requests_per_minute_come_back_evenly():
    table, one = ClientTable(), client(rpm_limit=6)
    for _ in range(6):
        enter(table, one, 0.0).leave(0.0)
    refused = enter(table, one, 4.0)
    assert refused.retry_after_s == pytest.approx(6.0)
    assert str(refused) == (
        "the key a has 0 requests left and asks for 1 more, of 6 per minute (server.rpm_limit, or rpm_limit of its "
        "key); try again in 6s"
    )
    enter(table, one, 10.0).leave(10.0)
    assert isinstance(enter(table, one, 10.0), RateLimitError)
    assert table.refused == {"rpm_limit": 2}


def test_a_call_counts_each_of_its_outputs():
    table, one = ClientTable(), client(rpm_limit=6, max_parallel_requests=5)
    permit = enter(table, one, 0.0)
    permit.take(4, 40, 0.0)
    other = enter(table, one, 0.0)
    with pytest.raises(RateLimitError, match="has 5 requests open and asks for 1 more, of at most 5"):
        other.take(2, 2, 0.0)
    assert dict(other.headers(0.0))[b"x-ratelimit-remaining-requests"] == b"1"
    other.leave(0.0)
    permit.leave(0.0)
    with pytest.raises(RequestError, match=r"asks for 6 outputs, but server\.max_parallel_requests"):
        enter(table, one, 60.0).take(6, 1, 60.0)


def test_tokens_that_did_not_come_out_are_given_back():
    table, one = ClientTable(), client(tpm_limit=1000)
    first = enter(table, one, 0.0)
    first.take(1, 900, 0.0)
    second = enter(table, one, 0.0)
    with pytest.raises(RateLimitError, match="100 tokens left and asks for 500 more, of 1000 per minute") as caught:
        second.take(1, 500, 0.0)
    assert caught.value.retry_after_s == pytest.approx(24.0)
    first.use(300)
    first.leave(0.0)
    second.take(1, 500, 0.0)
    assert dict(second.headers(0.0)) == {
        b"x-ratelimit-limit-tokens": b"1000",
        b"x-ratelimit-remaining-tokens": b"200",
        b"x-ratelimit-reset-tokens": b"48s",
    }
    second.leave(0.0)  # without an answer: all come back
    third = enter(table, one, 0.0)
    third.take(1, 700, 0.0)
    third.use(700)
    third.leave(0.0)
    assert isinstance(enter(table, one, 0.0), RateLimitError)
    with pytest.raises(RequestError, match=r"asks for 1001 tokens .* of its key is 1000"):
        enter(table, one, 60.0).take(1, 1001, 60.0)


@settings(deadline=None)  # other processes take the cores
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(0, 60), st.integers(0, 2)), max_size=80))
def test_whatever_calls_do_the_limits_hold_and_nothing_stays_taken(calls):
    limits = {"rpm_limit": 20, "tpm_limit": 100, "max_parallel_requests": 6}
    table, now_s = ClientTable(Ledger(num_rows=64)), 0.0
    open_calls: list[tuple[object, int]] = []
    for who, num_requests, num_tokens, num_ends in calls:
        now_s += 0.1
        permit = table.permit(client(str(who), **limits), now_s)
        try:
            permit.enter(now_s)
            permit.take(num_requests, num_tokens, now_s)
            open_calls.append((permit, num_tokens))
        except RateLimitError:
            permit.leave(now_s)
        for who_else in range(4):
            look = table.permit(client(str(who_else), **limits), now_s)
            assert max(map(table.ledger.num_open, range(64))) <= 6
            assert look._account.tokens.level(now_s) >= -1e-9
            look.leave(now_s)
        for permit, tokens in open_calls[:num_ends]:
            permit.use(tokens // 2)
            permit.leave(now_s)
        del open_calls[:num_ends]
    for permit, _ in open_calls:
        permit.leave(now_s)
    ledger = table.ledger
    assert not any(ledger.num_calls(row) or ledger.num_open(row) for row in range(ledger.num_rows))


def test_what_is_kept_of_clients_is_bounded_and_those_with_open_calls_stay():
    table = ClientTable(Ledger(num_rows=64))
    busy = enter(table, client("busy", rpm_limit=1), 0.0)
    for number in range(1000):
        enter(table, client(str(number), rpm_limit=1), float(number)).leave(float(number))
    assert sum(table.ledger._age(row) >= 0 for row in range(64)) == 64, "no row is left empty"
    assert sum(map(table.ledger.num_open, range(64))) == 1
    table.ledger._known.clear()
    assert isinstance(enter(table, client("busy", rpm_limit=1), 1.0), RateLimitError)
    assert isinstance(enter(table, client("999", rpm_limit=1), 999.0), RateLimitError)
    busy.leave(0.0)


def test_a_client_for_whom_there_is_no_row_is_refused_until_a_call_ends():
    table = ClientTable(Ledger(num_rows=32))
    permits = [enter(table, client(str(number), rpm_limit=1), 0.0) for number in range(32)]
    with pytest.raises(QueueFullError, match="32 clients have open calls"):
        table.permit(client("32", rpm_limit=1), 0.0)
    permits[7].leave(0.0)
    enter(table, client("32", rpm_limit=1), 0.0).leave(0.0)


# --- several front ends -----------------------------------------------------------------------------------------------


@pytest.fixture
def tables() -> Iterator[list[ClientTable]]:
    """Those of three front ends, as their processes have them."""
    fd = shared_memory(3, max_connections=100)
    yield [ClientTable(Ledger.shared(fd, 3, number)) for number in range(3)]
    os.close(fd)


def test_limits_hold_for_all_front_ends_together(tables: list[ClientTable]):
    one = client(rpm_limit=6, tpm_limit=100, max_parallel_requests=2)
    first, second = enter(tables[0], one, 0.0), enter(tables[1], one, 0.0)
    assert "has 2 requests open" in str(enter(tables[2], one, 0.0))
    first.take(1, 90, 0.0)
    with pytest.raises(RateLimitError, match="10 tokens left and asks for 20"):
        second.take(1, 20, 0.0)
    first.use(30)
    first.leave(0.0)
    second.take(1, 20, 0.0)
    second.leave(0.0)
    for table in (*tables, tables[0]):
        enter(table, one, 0.0).leave(0.0)
    assert "has 0 requests left and asks for 1 more, of 6 per minute" in str(enter(tables[2], one, 0.0))
    assert enter(tables[2], client("b", rpm_limit=6), 0.0) is not None


def test_what_was_open_at_a_front_end_that_died_is_not_open_any_more(tables: list[ClientTable]):
    one = client(rpm_limit=6, max_parallel_requests=2)
    enter(tables[1], one, 0.0)
    lives = enter(tables[2], one, 0.0)
    assert isinstance(enter(tables[0], one, 0.0), RateLimitError)
    tables[0].ledger.forget(1)
    again = enter(tables[1], one, 0.0)
    assert sum(map(tables[0].ledger.num_open, range(tables[0].ledger.num_rows))) == 2
    again.leave(0.0)
    lives.leave(0.0)
    assert not any(map(tables[0].ledger.num_open, range(tables[0].ledger.num_rows)))


def hold_the_lock(fd: int, held: "multiprocessing.synchronize.Event") -> None:
    with Ledger.shared(fd, 3, 1).locked():
        held.set()
        time.sleep(60)


def test_a_stopped_front_end_with_the_lock_holds_nobody_up_and_a_killed_one_frees_it(tables: list[ClientTable]):
    fork = multiprocessing.get_context("fork")
    ledger, held = tables[0].ledger, fork.Event()
    other = fork.Process(target=hold_the_lock, args=(ledger._lock_fd, held))
    other.start()
    assert held.wait(60)
    with pytest.raises(QueueFullError, match="another front end holds the counts"):
        tables[0].permit(client(rpm_limit=6), 0.0)
    other.kill()
    other.join()
    ledger._held_until_s = 0.0
    enter(tables[0], client(rpm_limit=6), 0.0).leave(0.0)


@pytest.mark.parametrize(
    "address, name",
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("", ""),
    ],
)
def test_an_address_is_a_client_and_so_is_a_network_of_ipv6(address, name):
    assert Client.at(address, ClientLimits()).name == name


# --- keys' files ------------------------------------------------------------------------------------------------------


def keys(tmp_path: Path, text: str, **settings: object) -> KeyRing:
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(0o600)
    return KeyRing.load(ServerConfig(api_key_file=str(path), **settings), {})


def test_a_line_of_the_file_has_limits_of_its_own(tmp_path: Path):
    text = "alice rpm_limit=60 tpm_limit=none sk-a\nbob sk-b\nrpm_limit=5 sk-c==\nbob sk-d"
    ring = keys(tmp_path, text, rpm_limit=10, tpm_limit=1000)
    found = {secret: ring.identify(secret) for secret in ("sk-a", "sk-b", "sk-c==", "sk-d")}
    names = [(key.client.kind, key.client.name, key.client.limits) for key in found.values()]
    assert names == [
        ("key", "alice", ClientLimits(60, None, None)),
        ("key", "bob", ClientLimits(10, 1000, None)),
        ("key", "key-3", ClientLimits(5, 1000, None)),
        ("key", "bob", ClientLimits(10, 1000, None)),
    ]
    assert found["sk-b"].client == found["sk-d"].client


@pytest.mark.parametrize(
    "line, message",
    [
        ("alice rpm=60 sk-secret", "'rpm' is not a limit of a key; known are rpm_limit, tpm_limit, max_parallel"),
        ("alice rpm_limit=0 sk-secret", "'rpm_limit=0' is not a limit; give a whole number above 0, or none"),
        ("alice rpm_limit=1e3 sk-secret", "is not a limit"),
        ("alice sk-secret rpm_limit=60", "write limits before the key"),
        ("a rpm_limit=60 sk-secret\na sk-other", "keys named 'a' have different limits"),
    ],
)
def test_a_wrong_limit_in_the_file_is_named_without_the_key(tmp_path: Path, line: str, message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        keys(tmp_path, line)
    assert "sk-" not in str(caught.value)


# --- served -----------------------------------------------------------------------------------------------------------


@in_event_loop
async def test_an_address_beyond_its_limit_gets_429_before_its_body_is_read():
    async with serving(1, "server.rpm_limit=2") as served:
        for left in (1, 0):
            answer = await served.generate(text="a", sampling_params=FIVE)
            assert answer.status_code == 200
            assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
        reader, writer = await asyncio.open_connection("127.0.0.1", served.client.base_url.port)
        writer.write(b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n")
        writer.write(b"content-length: 1000000\r\n\r\n")
        refused = (await reader.readuntil(b"\r\n\r\n")).lower()
        writer.close()
        assert b" 429 " in refused
        assert b"retry-after: 30" in refused
        assert b"x-ratelimit-limit-requests: 2" in refused
        assert (await served.client.get("/v1/models")).status_code == 200
        metrics = (await served.client.get("/metrics")).text
        assert 'moe_serve_requests_refused_total{reason="rpm_limit"} 1.0' in metrics
        assert 'moe_serve_requests_refused_total{reason="queue"} 0.0' in metrics


@in_event_loop
async def test_a_client_has_so_many_requests_open_and_the_rest_get_429_until_one_ends():
    async with serving(1, "server.max_parallel_requests=2") as served:
        served.workers[0].go.clear()
        calls = [asyncio.create_task(served.generate(input_ids=[7], sampling_params=FIVE)) for _ in range(2)]
        await until(lambda: len(served.bridge.book) == 2)
        refused = await served.generate(input_ids=[7], sampling_params=FIVE)
        assert refused.status_code == 429
        assert "2 requests open and asks for 1 more" in refused.json()["error"]["message"]
        served.workers[0].go.set()
        assert [(await call).status_code for call in calls] == [200, 200]
        stream = {"stream": True, "sampling_params": FIVE | {"n": 2}, "input_ids": [7]}
        assert (await served.generate(**stream)).status_code == 200
        assert (await served.generate(input_ids=[7], sampling_params=FIVE)).status_code == 200


@in_event_loop
async def test_tokens_of_an_address_are_those_of_prompts_and_of_what_came_out():
    async with serving(1, "server.tpm_limit=100", reply=lambda submit: [5, 6, 7, 1]) as served:
        answer = await served.generate(input_ids=[7] * 10, sampling_params={"max_new_tokens": 80})
        assert answer.headers["x-ratelimit-remaining-tokens"] == "10"  # 80 may yet come out
        answer = await served.generate(input_ids=[7] * 10, sampling_params={"max_new_tokens": 60})
        assert answer.status_code == 200
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) in range(16, 20)  # 14 used, 70 taken, some came back
        never = await served.generate(input_ids=[7] * 10, sampling_params={"max_new_tokens": 91})
        assert never.status_code == 400
        assert "asks for 101 tokens" in never.json()["error"]["message"]


def test_a_key_that_has_used_its_limit_leaves_the_others_theirs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(API_KEY_VARIABLE, "first second")

    @in_event_loop
    async def check():
        async with serving(1, "server.rpm_limit=1") as served:

            async def status(key: str) -> int:
                headers = {"authorization": f"Bearer {key}"}
                body = {"text": "a", "sampling_params": FIVE}
                return (await served.client.post("/generate", json=body, headers=headers)).status_code

            assert [await status(key) for key in ("first", "first", "second", "wrong")] == [200, 429, 200, 401]

    check()
