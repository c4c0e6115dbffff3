"""Listening sockets that are shut: nobody new comes in, and who is in goes on."""

import socket

import pytest

from moe_serve.links.newcomers import listening_sockets, shut_out_newcomers


def test_newcomers_are_dropped_and_connections_go_on():
    before = listening_sockets()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as other:
        address = listener.getsockname()
        assert listening_sockets() - before == {listener.fileno(), other.fileno()}
        with socket.create_connection(address, 5) as client:
            inside, _ = listener.accept()
            shut_out_newcomers({listener.fileno()})
            with pytest.raises(TimeoutError):
                socket.create_connection(address, 0.2)
            client.sendall(b"hello")
            assert inside.recv(5) == b"hello"
            inside.sendall(b"you too")
            assert client.recv(7) == b"you too"
            inside.close()
        socket.create_connection(other.getsockname(), 5).close()


def test_sockets_that_do_not_listen_are_not_meant():
    before = listening_sockets()
    with socket.socket(), socket.socket(socket.AF_UNIX), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        datagrams.bind(("127.0.0.1", 0))
        assert listening_sockets() == before
