"""The base of all messages between front ends, ranks and launchers. Torch-free."""

import msgspec


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Base of all messages. Fields travel by position."""
