"""RouterSocket: a flood of messages leaves turns of the event loop to others, and loses nothing."""

import asyncio
import itertools
import time

import zmq

from moe_serve.engine.protocol.messages import Alive
from moe_serve.links.link import Link
from moe_serve.links.sockets import LinkSockets
from moe_serve.log import call_id
from moe_serve.server.ranks import router_socket
from moe_serve.server.ranks.router_socket import RouterSocket
from tests.server.served import in_event_loop, until

NUM_MESSAGES = 20_000
LINK = Link(token="a token of sixteen characters", host="127.0.0.1")


@in_event_loop
async def test_a_flood_is_handled_in_turns_and_nothing_is_lost():
    handled: list[bytes] = []
    turns: list[int] = []
    socket = RouterSocket(LINK, lambda _, data: handled.append(data))
    sockets = LinkSockets(socket.link)
    sender = sockets.connected(zmq.DEALER, socket.link.front_end)
    for number in range(NUM_MESSAGES):
        sender.send(b"%d" % number)
    time.sleep(0.2)  # they are queued by now, beside a loop that does not turn

    while len(handled) < NUM_MESSAGES:
        turns.append(len(handled))
        await asyncio.sleep(0)
    steps = [after - before for before, after in itertools.pairwise(turns)]
    assert max(steps) <= router_socket._TURN_MESSAGES
    assert handled == [b"%d" % number for number in range(NUM_MESSAGES)]
    sockets.close()
    socket.close()


@in_event_loop
async def test_a_slow_handler_gives_way_after_a_few_messages():
    handled: list[bytes] = []

    def slow(_: bytes, data: bytes) -> None:
        time.sleep(0.003)
        handled.append(data)

    socket = RouterSocket(LINK, slow)
    sockets = LinkSockets(socket.link)
    sender = sockets.connected(zmq.DEALER, socket.link.front_end)
    for number in range(20):
        sender.send(b"%d" % number)
    time.sleep(0.1)
    seen = []
    while len(handled) < 20:
        seen.append(len(handled))
        await asyncio.sleep(0)
    assert max(after - before for before, after in itertools.pairwise(seen)) <= 2
    await until(lambda: len(handled) == 20)
    sockets.close()
    socket.close()


@in_event_loop
async def test_what_a_rank_says_is_of_no_call_though_a_call_has_it_read():
    handled: list[tuple[bytes, str | None]] = []
    socket = RouterSocket(LINK, lambda _, data: handled.append((data, call_id.get())))
    sockets = LinkSockets(socket.link)
    sender = sockets.connected(zmq.DEALER, socket.link.front_end)
    sender.send(b"first")
    await until(lambda: len(handled) == 1)

    async def call() -> None:
        call_id.set("of a client")
        sender.send(b"second")
        time.sleep(0.1)  # it is there by now, beside a loop that does not turn
        socket.send(b"nobody", Alive())

    await asyncio.create_task(call())
    await until(lambda: len(handled) == 2)
    assert handled == [(b"first", None), (b"second", None)]
    sockets.close()
    socket.close()
