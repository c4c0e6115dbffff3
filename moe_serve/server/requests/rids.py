"""Open requests by the ids that their clients know them by. Torch-free."""

from moe_serve.server.requests.open_request import OpenRequest


class RequestsByRid:
    """Those open requests that have one. Of each there is one."""

    def __init__(self) -> None:
        self._requests: dict[str, OpenRequest] = {}

    def __contains__(self, rid: object) -> bool:
        return rid in self._requests

    def add(self, request: OpenRequest) -> None:
        """Adds a request, if its client named it."""
        if request.spec.rid is not None:
            self._requests[request.spec.rid] = request

    def remove(self, request: OpenRequest) -> None:
        """Forgets a request that has ended."""
        self._requests.pop(request.spec.rid or "", None)

    def find(self, rid: str) -> list[OpenRequest]:
        """Returns the requests that a client knows by this id: one, or the prompts of one call, or their samples."""
        return [request for each, request in self._requests.items() if each == rid or _is_part(each, rid)]


def _is_part(rid: str, of: str) -> bool:
    """Returns whether this is the id of a call's prompt or sample: the call's, and one or two hyphens and numbers."""
    whole, _, number = rid.rpartition("-")
    if not number.isdecimal():
        return False
    call, _, prompt = whole.rpartition("-")
    return whole == of or (call == of and prompt.isdecimal())
