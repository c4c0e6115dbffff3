"""The times of the step loop."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineSettings:
    """Times of the loop, in seconds.

    front_end_deadline_s: the engine ends after this much silence of the front end
    drain_deadline_s:     and so long after it was asked to drain, whatever the front end says
    """

    heartbeat_s: float = 1.0
    front_end_deadline_s: float = 30.0
    drain_deadline_s: float = 25.0
