"""Waiting until something happens to a rank. Torch-free."""

import asyncio
import contextlib


class News:
    """Wakes those who wait whenever there is some."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def tell(self) -> None:
        """There is some."""
        self._event.set()

    async def wait(self, timeout_s: float) -> bool:
        """Returns whether there was some within the timeout."""
        self._event.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._event.wait(), timeout_s)
            return True
        return False
