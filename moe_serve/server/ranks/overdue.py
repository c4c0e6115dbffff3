"""Whether an open request has taken too long. Pure: time is an argument. Torch-free."""

from moe_serve.config import ServerConfig
from moe_serve.server.requests.open_request import OpenRequest


def why_overdue(request: OpenRequest, server: ServerConfig, is_held: bool, now_s: float) -> str | None:
    """Returns why a request is to be cut short; None while it may go on. is_held: a pause keeps it from its rank"""
    age_s = now_s - request.submitted_s
    limits_s = [each for each in (request.spec.timeout_s, server.request_deadline_s) if each is not None]
    if limits_s and age_s > min(limits_s):
        return f"the request took longer than {min(limits_s):g} s"
    most_s = server.queue_deadline_s
    is_new = request.rank is None and not request.num_output and not is_held
    if most_s is not None and is_new and age_s > most_s:
        return f"the request waited longer than server.queue_deadline_s = {most_s:g} s"
    return None
