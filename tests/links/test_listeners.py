"""Listening sockets that are shut: nobody new comes in, and who is in goes on."""

import contextlib
import os
import select
import socket
from multiprocessing import get_context
from multiprocessing.connection import Connection

from moe_serve.links.listeners import refuse_new_connections
from tests.launcher.listening import takes_connections


def _two_ports(pipe: Connection) -> None:
    """Shuts one of its two ports when somebody is in, and then greets whoever is in."""
    with (
        socket.create_server(("127.0.0.1", 0)) as shut,
        socket.create_server(("127.0.0.1", 0)) as spared,
        socket.socket(),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
    ):
        datagrams.bind(("127.0.0.1", 0))
        pipe.send((shut.getsockname(), spared.getsockname()))
        inside, _ = shut.accept()
        refuse_new_connections({spared.getsockname()[1]})
        pipe.send("shut")
        assert pipe.recv() == "go on"
        inside.sendall(inside.recv(5))
        pipe.recv()


def test_new_connections_are_dropped_and_others_go_on():
    pipe, end = get_context("fork").Pipe()
    process = get_context("fork").Process(target=_two_ports, args=(end,))
    process.start()
    shut, spared = pipe.recv()
    with socket.create_connection(shut, 5) as client:
        assert pipe.recv() == "shut"
        assert not takes_connections(shut)
        assert takes_connections(spared)
        pipe.send("go on")
        client.sendall(b"hello")
        assert client.recv(5) == b"hello"
    pipe.send("end")
    process.join()
    assert process.exitcode == 0


def _keep_nothing(said: Connection) -> None:
    """Refuses new connections beside descriptors of each kind; prints the open ones before and after, by number."""
    reader, writer = os.pipe()
    with (
        socket.create_server(("127.0.0.1", 0)),
        socket.socket(socket.AF_UNIX),
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
        open(os.devnull, "rb"),
        select.epoll(),
    ):
        before = _open_descriptors()
        refuse_new_connections()
        said.send((before, _open_descriptors()))
    os.close(writer)
    said.send(os.read(reader, 1))  # would wait for a copy of the end that writes


def _open_descriptors() -> dict[str, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # of the folder itself
            found[name] = os.readlink(f"/proc/self/fd/{name}")
    return found


def test_no_descriptor_is_left_over_and_a_pipe_ends():
    said, end = get_context("fork").Pipe()
    process = get_context("fork").Process(target=_keep_nothing, args=(end,))
    process.start()
    try:
        before, afterwards = said.recv()
        assert afterwards == before
        assert said.poll(60), "a copy keeps the pipe open"
        assert said.recv() == b""
    finally:
        process.kill()
        process.join()
