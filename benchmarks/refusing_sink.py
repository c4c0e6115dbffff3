"""A process that answers every request with one fixed refusal: what load alone costs the machine's cores.

It parses nothing and looks a hundred times a second, as the front end does while it refuses. What goodput is lost
beside it is lost to sending and receiving, whoever refuses.
"""

import contextlib
import multiprocessing
import select
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

from benchmarks.load_generator import LoadGenerator, Tally

_PERIOD_S = 0.01
_BODY = b'{"error":{"message":"try again later","type":"rate_limit_error","code":429,"param":null,"retryable":true}}'
_ANSWER = (
    b"HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\nretry-after: 1\r\ncontent-length: %d\r\n\r\n"
) % len(_BODY) + _BODY


class LoadBeside:
    """Sends load to a sink, from a process of its own, beside what the caller does."""

    def __init__(self, commands: Connection):
        self._commands = commands

    @contextlib.contextmanager
    def open_loop(self, rate: float, seconds: float) -> Iterator[list[Tally]]:
        """Sends so many requests per second from before the block until after it; what they came to is in the list."""
        tallies: list[Tally] = []
        self._commands.send((rate, seconds))
        self._commands.recv()  # it has begun
        yield tallies
        tallies.append(self._commands.recv())


@contextlib.contextmanager
def load_beside(request: bytes, num_connections: int) -> Iterator[LoadBeside]:
    """Starts a sink and a generator of load for it, which do nothing until they are told to."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listening:
        sink = spawn.Process(target=_refuse, args=(listening,), daemon=True)
        sink.start()
        generator = spawn.Process(
            target=_generate, args=(theirs, listening.getsockname()[1], request, num_connections), daemon=True
        )
        generator.start()
        try:
            yield LoadBeside(ours)
        finally:
            for process in (generator, sink):
                process.terminate()
                process.join(10)


def _generate(commands: Connection, port: int, request: bytes, num_connections: int) -> None:
    load = LoadGenerator(port, request, num_connections)
    while True:
        rate, seconds = commands.recv()
        commands.send(None)
        commands.send(load.open_loop(rate, seconds, settle_s=0.0))


def _refuse(listening: socket.socket) -> None:
    """Answers until the process is ended."""
    ready = select.epoll()
    ready.register(listening.fileno(), select.EPOLLIN)
    clients: dict[int, socket.socket] = {}
    while True:
        time.sleep(_PERIOD_S)
        for number, _ in ready.poll():
            if number == listening.fileno():
                client, _address = listening.accept()
                client.setblocking(False)
                clients[client.fileno()] = client
                ready.register(client.fileno(), select.EPOLLIN)
            elif clients[number].recv(1 << 16):
                clients[number].send(_ANSWER)
            else:
                clients.pop(number).close()
