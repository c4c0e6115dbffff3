"""Engines of two hosts on one machine whose ranks take each other's pages, over a network that may be bad."""

import contextlib
import random
import socket
from collections.abc import Iterator

from moe_serve.dispatch.base import EpGroup
from moe_serve.engine.engine import Engine
from tests.attention_dp.connections import cut, pump, start, tcp_pair
from tests.dispatch.hosts.pretended import on_hosts
from tests.engine.offline import ScriptedMailbox

# Byte of the answers of a connection, and what becomes of it. A page's record begins at the third byte.
_FAULTS = [(10, "flip"), (500, "flip"), (600, "cut")]
_WITHIN = 6000  # bytes of the answers; a page has 1 or 3 kB


def on_two_hosts(group: EpGroup) -> EpGroup:
    """Has rank 0 and 1 on hosts of their own."""
    return on_hosts(group, [0, 1])


class NoRests(dict[int, object]):
    """So that a rank that failed is asked again at once."""

    def __setitem__(self, rank: int, rest: object) -> None:
        pass


def ask_later(engine: Engine) -> None:
    """Has rank 1 begin when rank 0 has computed all, and ask it for pages though computing takes less time."""
    tiers, mailbox = engine.scheduler.blocks.tiers, engine.mailbox
    assert tiers is not None
    assert isinstance(mailbox, ScriptedMailbox)
    tiers._of_network.is_worth_it = lambda *given: True  # type: ignore[method-assign]
    if engine.rank == 1:
        mailbox.script = [(1 << 40, message) for _, message in mailbox.script]


def ask_later_over_a_bad_network(engine: Engine, seed: int = 0) -> None:
    """The same, with answers that are flipped, repeated or cut, soon, on each connection."""
    ask_later(engine)
    tiers, faults = engine.scheduler.blocks.tiers, faults_of(seed)
    assert tiers is not None
    assert tiers._peers is not None
    dial, tiers._peers._rests = tiers._peers._dial, NoRests()  # type: ignore[assignment]

    def dial_badly(rank: int) -> socket.socket:
        there = dial(rank)
        there.settimeout(None)
        near, far = tcp_pair()
        start(pump, far, there)
        start(meddle, there, far, *next(faults))
        return near

    tiers._peers._dial = dial_badly


def faults_of(seed: int) -> Iterator[tuple[int, str]]:
    """Yields the fault of each connection: which byte, and what becomes of it."""
    draw = random.Random(seed)
    while True:
        yield from _FAULTS
        for _ in range(3):
            yield draw.randrange(_WITHIN), draw.choice(["flip", "repeat", "cut"])


def meddle(source: socket.socket, to: socket.socket, at: int, what: str) -> None:
    """Passes on what comes, with one fault at a byte."""
    draw, num_passed = random.Random(at), 0
    with contextlib.suppress(OSError):
        while data := source.recv(draw.randrange(1, 1 << 14)):
            if num_passed <= at < num_passed + len(data):
                where = at - num_passed
                if what == "flip":
                    data = data[:where] + bytes([data[where] ^ 1 << draw.randrange(8)]) + data[where + 1 :]
                elif what == "repeat":
                    data = data[:where] + data
                else:
                    break
            num_passed += len(data)
            to.sendall(data)
    cut(source, to)
