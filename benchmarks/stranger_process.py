"""A process of strangers, and one of decoys. Both give way to whatever else runs on the machine."""

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event

_CONNECT_S = 0.5
_LISTEN_S = 0.2  # how long a stranger waits for an answer


@dataclass(frozen=True)
class Attack:
    """Where, with what, how often per second, and which texts must not be heard."""

    addresses: Sequence[tuple[str, int]]
    payloads: Sequence[bytes]
    rate: float
    secrets: Sequence[bytes]


@dataclass(frozen=True)
class Heard:
    """What came of the connections to one port. secrets: answers with a text that no stranger may hear"""

    tried: int = 0
    made: int = 0
    num_bytes: int = 0
    secrets: int = 0

    def plus(self, other: "Heard") -> "Heard":
        return Heard(
            self.tried + other.tried,
            self.made + other.made,
            self.num_bytes + other.num_bytes,
            self.secrets + other.secrets,
        )


def attack(plan: Attack, stop: Event, answer: Connection) -> None:
    """Sends payloads to all addresses in turn, until stop; answers with what was heard, by port."""
    os.nice(19)
    answer.send(asyncio.run(_attack(plan, stop)))


async def _attack(plan: Attack, stop: Event) -> dict[int, Heard]:
    heard = {number: Heard() for _, number in plan.addresses}
    turns = itertools.cycle(itertools.product(plan.payloads, plan.addresses))
    open_calls: set[asyncio.Task[None]] = set()
    next_s = time.monotonic()

    async def call(host: str, number: int, payload: bytes) -> None:
        found = await _call(host, number, payload, plan.secrets)
        heard[number] = heard[number].plus(found)

    while not stop.is_set():
        payload, (host, number) = next(turns)
        task = asyncio.create_task(call(host, number, payload))
        open_calls.add(task)
        task.add_done_callback(open_calls.discard)
        next_s = max(next_s + 1 / plan.rate, time.monotonic() - 0.1)  # what it misses it does not make up for
        await asyncio.sleep(max(0.0, next_s - time.monotonic()))
    await asyncio.gather(*open_calls)
    return heard


async def _call(host: str, number: int, payload: bytes, secrets: Sequence[bytes]) -> Heard:
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host, number), _CONNECT_S)
    except (OSError, TimeoutError):
        return Heard(tried=1)
    data = b""
    with contextlib.suppress(OSError, TimeoutError):
        writer.write(payload)
        data = await asyncio.wait_for(reader.read(65536), _LISTEN_S)
    writer.close()
    return Heard(1, 1, len(data), int(any(secret in data for secret in secrets)))


def listen_as_decoy(count: int, answer: Connection) -> None:
    """Listens on ports of its own, until it is ended; answers with their addresses."""
    os.nice(19)
    asyncio.run(_listen(count, answer))


async def _listen(count: int, answer: Connection) -> None:
    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while await reader.read(65536):
                pass
        writer.close()

    servers = [await asyncio.start_server(take, "127.0.0.1", 0) for _ in range(count)]
    answer.send([server.sockets[0].getsockname()[:2] for server in servers])
    await asyncio.gather(*(server.serve_forever() for server in servers))
