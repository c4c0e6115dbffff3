"""Notices clients that have gone away after they closed their own side. Torch-free."""

import asyncio
import select

_FIRST_S, _LAST_S = 0.02, 1.0


def abort_when_reset(transport: asyncio.Transport, wait_s: float = _FIRST_S) -> None:
    """Looks again and again whether a half-closed client has reset its connection: asyncio no longer does."""
    if transport.is_closing():
        return
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), 0)
    if any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0)):
        transport.abort()
    else:
        asyncio.get_running_loop().call_later(wait_s, abort_when_reset, transport, min(2 * wait_s, _LAST_S))
