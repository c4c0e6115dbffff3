"""Clients that read slowly or not at all: served above a least rate, cut off below it, and their requests freed."""

import asyncio
from types import SimpleNamespace

import msgspec
from uvicorn.protocols.http.flow_control import FlowControl

from tests.server.fake_worker import LIMITS
from tests.server.raw_client import RawClient
from tests.server.served import in_event_loop, serving, until

FIVE = {"max_new_tokens": 5, "sampling_seed": 10}
LONG = {"max_new_tokens": 10**6, "sampling_seed": 10}
SEVENS = [7] * 10**6
ENDLESS = msgspec.structs.replace(LIMITS, max_model_len=2 * 10**6, max_prompt_len=2 * 10**6)


@in_event_loop
async def test_a_stream_that_nobody_reads_ends_and_frees_its_request():
    async with serving(1, "server.send_deadline_s=0.3", limits=ENDLESS, reply=lambda submit: SEVENS) as served:
        clients = [await RawClient.connect(served, receive_buffer=2048) for _ in range(3)]
        for client in clients:
            await client.post({"text": "a", "stream": True, "sampling_params": LONG})
        await until(lambda: len(served.workers[0].submitted) == 3)
        await until(lambda: len(served.workers[0].aborted) == 3)
        await until(lambda: len(served.server.table) == 0)
        assert len(served.bridge.book) == 0


@in_event_loop
async def test_a_stream_that_is_read_byte_by_byte_ends_and_one_that_is_read_slowly_goes_on():
    async with serving(1, "server.send_deadline_s=0.4", limits=ENDLESS, reply=lambda submit: SEVENS) as served:

        async def read(num_bytes: int, pause_s: float) -> None:
            """Reads a stream in steps, until it ends."""
            client = await RawClient.connect(served, receive_buffer=1 << 14)
            await client.post({"text": "a", "stream": True, "sampling_params": LONG})
            while await client.reader.read(num_bytes):
                await asyncio.sleep(pause_s)

        slow = asyncio.create_task(read(1 << 14, 0.01))  # more than must be read, and far less than comes
        bytewise = [asyncio.create_task(read(1, 0.02)) for _ in range(3)]
        await until(lambda: len(served.workers[0].submitted) == 4)
        await until(lambda: len(served.workers[0].aborted) == 3)
        assert (await served.generate(text="a", sampling_params=FIVE)).status_code == 200
        await asyncio.sleep(1)
        assert not slow.done()
        assert len(served.bridge.book) == 1
        for task in (slow, *bytewise):
            task.cancel()


@in_event_loop
async def test_a_client_that_takes_a_stream_as_fast_as_it_can_is_not_cut_off_though_the_buffer_is_always_full():
    async with serving(1, "server.send_deadline_s=30") as served:
        transport, connection = Buffered(), served.server._connection()
        connection.transport, connection.flow = transport, FlowControl(transport)
        connection.cycle = SimpleNamespace(response_complete=False, more_body=False)
        for second in range(100):  # it empties the buffer within each second, and the stream fills it again
            transport.size = 70_000 if second == 0 else 60_000
            connection.pause_writing()
            connection.sweep(float(second))
            connection.resume_writing()
        assert not transport.aborted
        connection.pause_writing()
        for second in range(100, 140):
            transport.size -= 400
            connection.sweep(float(second))
        assert transport.aborted


class Buffered:
    """A transport with so many bytes that the client has not taken."""

    size, aborted = 0, False

    def get_write_buffer_size(self) -> int:
        return self.size

    def abort(self) -> None:
        self.aborted = True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...
