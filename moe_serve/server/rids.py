"""Open requests by the ids that their clients know them by. Torch-free."""

from moe_serve.server.open_request import OpenRequest


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
        """Returns the requests that a client knows by this id: one, or the samples of one prompt."""
        return [request for each, request in self._requests.items() if each == rid or _is_sample(each, rid)]


def _is_sample(rid: str, of: str) -> bool:
    """Returns whether this is the id of one of several samples: the prompt's id, a hyphen and a number."""
    prompt, _, number = rid.rpartition("-")
    return prompt == of and number.isdecimal()
