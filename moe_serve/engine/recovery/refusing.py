"""One error for all bytes that are no message of ours, whatever a decoder makes of them. Torch-free."""

from types import TracebackType

import msgspec


class Refusing:
    """Raises msgspec.DecodeError in place of whatever a decoder raises for bytes that are no message of ours.

    Strings that are not UTF-8 raise UnicodeDecodeError there, and values nested too deeply RecursionError.
    A class, since a generator's context manager costs as much as decoding a small message.
    """

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and issubclass(kind, (ValueError, RecursionError)):
            raise msgspec.DecodeError(f"{kind.__name__}: {error}") from None
