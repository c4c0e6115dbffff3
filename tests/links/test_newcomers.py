"""Listening sockets that are shut: nobody new comes in, and who is in goes on."""

import socket
from multiprocessing import get_context
from multiprocessing.connection import Connection

from moe_serve.links.newcomers import shut_out_newcomers
from tests.launcher.listening import takes_strangers


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
        shut_out_newcomers({spared.getsockname()[1]})
        pipe.send("shut")
        assert pipe.recv() == "go on"
        inside.sendall(inside.recv(5))
        pipe.recv()


def test_newcomers_are_dropped_and_connections_go_on():
    pipe, end = get_context("fork").Pipe()
    process = get_context("fork").Process(target=_two_ports, args=(end,))
    process.start()
    shut, spared = pipe.recv()
    with socket.create_connection(shut, 5) as client:
        assert pipe.recv() == "shut"
        assert not takes_strangers(shut)
        assert takes_strangers(spared)
        pipe.send("go on")
        client.sendall(b"hello")
        assert client.recv(5) == b"hello"
    pipe.send("end")
    process.join()
    assert process.exitcode == 0
