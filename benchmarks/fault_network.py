"""A way between ranks and front end that can carry nothing for a while, for benchmarks/faults.py."""

import asyncio
import contextlib
import threading
from pathlib import Path


class Interposed:
    """Takes the place of a Unix socket, and passes bytes on to it: for connections made from now on.

    Runs in a thread of its own, so that the load beside it does not slow it.
    """

    def __init__(self, path: Path):
        self._real = path.with_name(path.name + ".real")
        path.rename(self._real)
        self._loop = asyncio.new_event_loop()
        self._flows = asyncio.Event()
        self._flows.set()
        threading.Thread(target=self._loop.run_forever, name="interposed", daemon=True).start()
        asyncio.run_coroutine_threadsafe(asyncio.start_unix_server(self._pass_on, path), self._loop).result()

    async def carry_nothing(self, seconds: float) -> None:
        """Keeps all bytes for so long; connections stay."""
        self._loop.call_soon_threadsafe(self._flows.clear)
        await asyncio.sleep(seconds)
        self._loop.call_soon_threadsafe(self._flows.set)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_unix_connection(self._real)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
        with contextlib.suppress(OSError):
            writer.close()
            await writer.wait_closed()
