"""Reads HTTP/1.1 requests: h11's parser, strict where h11 is lenient, and with bounds on what a request may make it do.

If two parsers on a request's way read it differently, a client can hide a second request in the body of the first
(request smuggling). So whatever RFC 9112 lets a server refuse or repair is refused here, and the connection ends: two
framings in one header, bare LF, folded lines, control characters, odd forms of numbers.

`plain_headers` reads the header of a whole, plain request in one piece, for cheap refusals; it takes only headers that
the parser reads in the same way.
"""

import re
from typing import Any, NoReturn

import h11
from h11._receivebuffer import ReceiveBuffer

_MAX_HEADERS = 100
# A chunk costs the parser some 20 µs, whatever is in it: a body of one-byte chunks would keep it busy for minutes.
_FREE_CHUNKS = 64
_BYTES_PER_CHUNK = 64
_MAX_EXTENSION_BYTES = 1024  # of all chunks of a body; nobody uses them
_LENGTH = re.compile(rb"[0-9]{1,18}")  # fits 64 bits with a sign, which is what other parsers may keep it in
_CHUNK_LINE = re.compile(rb"[0-9A-Fa-f]{1,15}(?:;[\t !-~]*)?\r\n")
# Lines without control characters that end with CRLF and are not folded; the last one may not have ended yet.
_LINES = re.compile(rb"(?:[\t -~\x80-\xff]*+\r\n(?![\t ]))*+[\t -~\x80-\xff]*+\r?")
_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[\w.~!$&'()*+,;=%-]*)(?::[0-9]*)?", re.ASCII)
_ABSOLUTE = re.compile(rb"https?://([^/?#]*)([^#]*)", re.IGNORECASE)
_FRAMING = frozenset({b"content-length", b"transfer-encoding", b"host"})
# If one of these came twice, a proxy might go by the first and we by the last.
_ONCE = _FRAMING | {b"authorization", b"content-type", b"content-encoding", b"expect", b"origin", b"sec-fetch-site"}


class BoundedParser(h11.Connection):
    """The server's side of one connection.

    refusal: the status and the reason, once the parser has raised RemoteProtocolError
    is_head: whether the request that is here asks for a header alone
    """

    def __init__(self, max_header_bytes: int):
        super().__init__(h11.SERVER, max_header_bytes)
        self._receive_buffer = self._strict = _StrictBuffer()
        self.refusal = (400, "this is not an HTTP/1.1 request")
        self.is_head = False
        self._num_chunks = 0
        self._num_bytes = 0
        self._is_plain = False  # the body has a content-length
        self._length = 0  # which is this

    @property
    def has_bytes(self) -> bool:
        """Whether there are bytes that no event has used."""
        return bool(self._strict)

    @property
    def reads_plain_body(self) -> bool:
        """Whether a body of known length is being received."""
        return self._is_plain and self.their_state is h11.SEND_BODY

    @property
    def num_missing(self) -> int:
        """Bytes of a body of known length that are still to come; events have used all others."""
        return self._length - self._num_bytes

    def skip(self, num_bytes: int) -> None:
        """Counts bytes of a body as read without parsing them. `next_event` must not be called afterwards."""
        self._num_bytes += num_bytes

    def next_event(self) -> Any:
        """Returns h11's next event. Raises RemoteProtocolError for bytes that are not HTTP, or beyond a bound."""
        if self.their_state is h11.IDLE:
            self.is_head = False
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            status = 431 if error.error_status_hint == 431 else 400  # not 501 or 505: the fault is the client's
            hint = "; send a shorter header" if status == 431 else "; send an HTTP/1.1 request"
            self.refusal = (status, f"{str(error)[:200]}{hint}")
            raise
        if isinstance(event, h11.Request):
            return self._checked(event)
        if isinstance(event, h11.Data):
            self._num_chunks += 1
            self._num_bytes += len(event.data)
            if not self._is_plain and self._num_chunks > _FREE_CHUNKS + self._num_bytes // _BYTES_PER_CHUNK:
                self._refuse(400, f"the body comes in chunks of less than {_BYTES_PER_CHUNK} bytes; send larger ones")
        elif isinstance(event, h11.EndOfMessage) and any(name in _FRAMING for name, _ in event.headers):
            self._refuse(400, "a trailer field says where the request ends or goes; send such fields in the header")
        return event

    def _checked(self, request: h11.Request) -> h11.Request:
        """Returns a request with its target as a path. Refuses one whose end or host can be read in two ways."""
        self.is_head = request.method == b"HEAD"
        if request.http_version not in (b"1.0", b"1.1"):
            self._refuse(400, "the request is not of HTTP/1.0 or HTTP/1.1; send one of these")
        lines = self._strict.lines[1:]
        if len(lines) > _MAX_HEADERS:
            self._refuse(431, f"{len(lines)} header fields, at most {_MAX_HEADERS} are read; send fewer")
        fields: dict[bytes, bytes] = {}  # as they came: h11 makes one of `content-length: 5, 5`
        for line in lines:
            name, _, value = bytes(line).partition(b":")
            name = name.lower()
            if name in fields and name in _ONCE:
                self._refuse(400, f"the header field {name.decode()} is given twice; send it once")
            fields[name] = value.strip(b"\t ")
        length = fields.get(b"content-length")
        if b"transfer-encoding" in fields:
            if length is not None:
                self._refuse(400, "content-length and transfer-encoding are both given; send one of them")
            if request.http_version == b"1.0":
                self._refuse(400, "HTTP/1.0 has no transfer-encoding; send content-length, or use HTTP/1.1")
        elif length is not None and not _LENGTH.fullmatch(length):
            self._refuse(400, "content-length is no number of at most 18 digits; send the bytes of the body")
        self._num_chunks = self._num_bytes = 0
        self._is_plain, self._length = length is not None, int(length or 0)
        return self._with_path(request, fields.get(b"host"))

    def _with_path(self, request: h11.Request, host: bytes | None) -> h11.Request:
        if host is not None and not _HOST.fullmatch(host):
            self._refuse(400, "the header field host is no name or address; send those of this server")
        if request.method == b"CONNECT":
            self._refuse(400, "this server opens no tunnels; send a request to one of its paths")
        if request.target.startswith(b"/") or (request.target == b"*" and request.method == b"OPTIONS"):
            return request
        absolute = _ABSOLUTE.fullmatch(request.target)
        if absolute is None or absolute[1].lower() != (host or b"").lower():
            self._refuse(400, "the target is neither a path nor a URL with the name of the field host; send a path")
        path = absolute[2] if absolute[2].startswith(b"/") else b"/" + absolute[2]
        return h11.Request(
            method=request.method, headers=request.headers, target=path, http_version=request.http_version
        )

    def _refuse(self, status: int, message: str) -> NoReturn:
        self.refusal = (status, message)
        raise h11.RemoteProtocolError(message, error_status_hint=status)


class _StrictBuffer(ReceiveBuffer):
    """h11's receive buffer, strict: lines end with CRLF, and anything else that could pass for an end is refused.

    lines: of the header or trailer section that was read last, without their ends
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[bytearray] = []
        self._num_extension_bytes = 0

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Returns the lines up to an empty one; None while it has not come. Refuses other ends of lines at once."""
        if not self._data.startswith(b"\r\n"):
            start = max(0, self._multiple_lines_search - 1)  # what is before was looked at
            if start and self._data.startswith(b"\n", start):
                start -= 1
            end = self._data.find(b"\r\n\r\n", start)
            if not _LINES.fullmatch(self._data, start, end + 2 if end >= 0 else len(self._data)):
                raise h11.LocalProtocolError("the header has a folded line, a CR or LF alone, or a control character")
        lines = super().maybe_extract_lines()
        if lines is not None:
            self.lines, self._num_extension_bytes = lines, 0
        return lines

    def maybe_extract_next_line(self) -> bytearray | None:
        """Returns the line before a chunk; None while it has not come."""
        line = super().maybe_extract_next_line()
        if line is None:
            if len(self) > _MAX_EXTENSION_BYTES:
                raise h11.LocalProtocolError("the line before a chunk does not end")
            return None
        if not _CHUNK_LINE.fullmatch(line):
            raise h11.LocalProtocolError("the line before a chunk is not its size in hexadecimal digits")
        self._num_extension_bytes += len(line.partition(b";")[2])
        if self._num_extension_bytes > _MAX_EXTENSION_BYTES:
            raise h11.LocalProtocolError(f"the extensions of chunks have more than {_MAX_EXTENSION_BYTES} bytes")
        return line


PLAIN_HEADER_BYTES = 4096
_FIELD = re.compile(rb"([A-Za-z0-9-]+):[ \t]*([!-~](?:[ -~]*[!-~])?)[ \t]*")
# Fields that ask for something, or that change the answer.
_UNUSUAL = frozenset({"transfer-encoding", "expect", "upgrade", "origin", "trailer", "connection"})


def plain_headers(data: bytes) -> dict[str, str] | None:
    """Returns the header fields of a request by lower-case name; None unless data is one whole, plain request."""
    head, end, body = data.partition(b"\r\n\r\n")
    if not end or len(head) > PLAIN_HEADER_BYTES:
        return None
    fields: dict[str, str] = {}
    for line in head.split(b"\r\n")[1:]:
        field = _FIELD.fullmatch(line)
        if field is None:
            return None
        name = field[1].decode().lower()
        if name in _UNUSUAL and (name, field[2].lower()) != ("connection", b"keep-alive"):
            return None
        if name in fields:
            return None
        fields[name] = field[2].decode()
    return fields if "host" in fields and fields.get("content-length") == str(len(body)) else None
