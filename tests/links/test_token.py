"""The secret of a system: where it comes from, and what is refused."""

import os
import stat
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from moe_serve.config import ServerConfig
from moe_serve.errors import LaunchError
from moe_serve.links.link import Link, find_link, is_loopback, shared_token

LONG = "0123456789abcdef0123"


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MOE_SERVE_TOKEN")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_the_environment_comes_first(monkeypatch, tmp_path):
    monkeypatch.setenv("MOE_SERVE_TOKEN", LONG)
    assert shared_token(str(tmp_path / "file"), "192.0.2.1", 1) == LONG
    assert not (tmp_path / "file").exists()


def test_whoever_starts_first_makes_the_file_and_all_others_read_it(tmp_path):
    token = shared_token(None, "127.0.0.1", 30001)
    (path,) = (tmp_path / "moe_serve").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(token) == 64
    assert shared_token(None, "localhost", 30001) == token
    assert shared_token(None, "127.0.0.1", 30002) != token, "each front end has its own"


def _take_token(answer: Connection) -> None:
    answer.send(shared_token(None, "127.0.0.1", 30001))


def test_processes_that_start_at_once_agree_on_one_token():
    context = get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(8)]
    processes = [context.Process(target=_take_token, args=(sender,)) for _, sender in pipes]
    for process in processes:
        process.start()
    assert len({receiver.recv() for receiver, _ in pipes}) == 1
    for process in processes:
        process.join()


def test_an_address_that_others_reach_needs_a_token_and_the_line_says_how():
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        with pytest.raises(LaunchError, match=r"MOE_SERVE_TOKEN.*openssl rand.*server\.token_file") as caught:
            shared_token(None, host, 30001)
        assert "\n" not in str(caught.value)


def test_a_token_file_allows_any_address(tmp_path):
    path = tmp_path / "secret"
    assert shared_token(str(path), "0.0.0.0", 30001) == shared_token(str(path), "192.0.2.1", 5)


def test_a_file_that_others_can_read_is_refused(tmp_path):
    path = tmp_path / "secret"
    path.write_text(LONG)
    path.chmod(0o644)
    with pytest.raises(LaunchError, match="open to other users"):
        shared_token(str(path), "127.0.0.1", 1)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, kind):
    path = tmp_path / "secret"
    if kind == "link":
        (tmp_path / "other").write_text(LONG)
        path.symlink_to(tmp_path / "other")
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    else:
        path.mkdir(0o700)
    with pytest.raises(LaunchError, match=str(path)):
        shared_token(str(path), "127.0.0.1", 1)


@pytest.mark.parametrize("token", ["short", "x" * 2000])
def test_a_token_that_can_be_guessed_or_has_no_end_is_refused_and_not_shown(monkeypatch, token):
    monkeypatch.setenv("MOE_SERVE_TOKEN", token)
    with pytest.raises(LaunchError, match=f"MOE_SERVE_TOKEN has {len(token)} characters") as caught:
        shared_token(None, "127.0.0.1", 1)
    assert token not in str(caught.value)


def test_loopback_is_what_only_this_machine_reaches():
    assert all(map(is_loopback, ["127.0.0.1", "127.8.9.1", "::1", "localhost"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "10.0.0.1", "no such host.invalid"]))


def test_a_folder_of_sockets_that_others_may_enter_is_refused(monkeypatch, tmp_path):
    folder = tmp_path / "sockets"
    folder.mkdir(0o755)
    monkeypatch.setenv("MOE_SERVE_SOCKETS", str(folder))
    with pytest.raises(LaunchError, match="open to other users"):
        find_link(ServerConfig())
    folder.chmod(0o700)
    assert find_link(ServerConfig()) == Link(folder=folder)
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.setenv("MOE_SERVE_SOCKETS", str(tmp_path / "link"))
    with pytest.raises(LaunchError, match="open to other users"):
        find_link(ServerConfig())
