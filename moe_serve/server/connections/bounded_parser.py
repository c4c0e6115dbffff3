"""h11's parser of HTTP/1.1 requests, with bounds on what one request may make it do. Torch-free."""

from typing import Any

import h11

_MAX_HEADERS = 100
# A chunk costs the parser some 20 µs, whatever is in it: a body of one-byte chunks would keep it busy for minutes.
_FREE_CHUNKS = 64
_BYTES_PER_CHUNK = 64


class BoundedParser(h11.Connection):
    """The server's side of one connection.

    refusal: the status and the reason, once the parser has raised RemoteProtocolError
    """

    def __init__(self, max_header_bytes: int):
        super().__init__(h11.SERVER, max_header_bytes)
        self.refusal = (400, "this is not an HTTP/1.1 request")
        self._num_chunks = 0
        self._num_bytes = 0
        self._is_plain = False  # the body has a content-length
        self._length = 0  # which is this

    @property
    def has_bytes(self) -> bool:
        """Whether bytes are here that no event has used."""
        return bool(self.trailing_data[0])

    @property
    def reads_plain_body(self) -> bool:
        """Whether a body of known length is being received."""
        return self._is_plain and self.their_state is h11.SEND_BODY

    @property
    def num_missing(self) -> int:
        """Bytes of a body of known length that are still to come; all that have come were given to events."""
        return self._length - self._num_bytes

    def skip(self, num_bytes: int) -> None:
        """Counts bytes of a body that nobody reads as if they had come. No event may be asked for afterwards."""
        self._num_bytes += num_bytes

    def next_event(self) -> Any:
        """Returns h11's next event. Raises RemoteProtocolError for what is not HTTP, or beyond a bound."""
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            status = 431 if error.error_status_hint == 431 else 400  # not 501 or 505: the fault is the client's
            hint = "; send a shorter header" if status == 431 else "; send an HTTP/1.1 request"
            self.refusal = (status, f"{str(error)[:200]}{hint}")
            raise
        if isinstance(event, h11.Request):
            if event.http_version not in (b"1.0", b"1.1"):
                self._refuse(400, "the request is not of HTTP/1.0 or HTTP/1.1; send one of these")
            if len(event.headers) > _MAX_HEADERS:
                self._refuse(431, f"{len(event.headers)} header fields, at most {_MAX_HEADERS} are read; send fewer")
            self._num_chunks = self._num_bytes = 0
            length = next((value for name, value in event.headers if name == b"content-length"), None)
            self._is_plain, self._length = length is not None, int(length or 0)
        elif isinstance(event, h11.Data):
            self._num_chunks += 1
            self._num_bytes += len(event.data)
            if not self._is_plain and self._num_chunks > _FREE_CHUNKS + self._num_bytes // _BYTES_PER_CHUNK:
                self._refuse(400, f"the body comes in chunks of less than {_BYTES_PER_CHUNK} bytes; send larger ones")
        return event

    def _refuse(self, status: int, message: str) -> None:
        self.refusal = (status, message)
        raise h11.RemoteProtocolError(message, error_status_hint=status)
