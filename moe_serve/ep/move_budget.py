"""How much of a move happens between two steps, and when a move is late. Pure arithmetic on seconds and bytes."""

IDLE_S = 0.005  # of work between two steps without rows: a request that arrives meanwhile waits so long at most
MOST_S = 0.05  # of work between two steps, however long they are
_LONGEST_GAP_S = 2.0  # counted between two turns: after a longer one this process was stopped, and nobody else was late
_FIRST_GUESS_S = 1e-9  # for a byte, before anything was measured
_MEMORY = 0.9  # share of the older measurements that each new one leaves


class MoveBudget:
    """The bytes that a turn may copy and sum so that a step becomes at most a given share longer.

    The speed is learned from the turns themselves: a moving average, weighted by bytes.
    """

    def __init__(self, step_share: float):
        """step_share: part of a step's time that moving may add"""
        self._step_share = step_share
        self._seconds = self._bytes = 0.0

    def allowance(self, step_s: float) -> int:
        """Returns the bytes of the next turn, at least 1: then one piece is carried, however small the share.

        step_s: seconds of the last step with rows; 0 = the engine is idle
        """
        per_byte = self._seconds / self._bytes if self._bytes else _FIRST_GUESS_S
        wanted_s = min(self._step_share * step_s, MOST_S) if step_s else IDLE_S
        return max(1, int(wanted_s / per_byte))

    def record(self, num_bytes: int, seconds: float) -> None:
        """Learns from a turn. num_bytes: that it handled;  seconds: that it took, > 0 where num_bytes is"""
        if num_bytes:
            self._bytes = _MEMORY * self._bytes + num_bytes
            self._seconds = _MEMORY * self._seconds + seconds


class MoveDeadline:
    """Whether a round has taken too long. The time in which this process was stopped itself does not count."""

    def __init__(self, deadline_s: float, now_s: float):
        self._left_s = deadline_s
        self._last_s = now_s

    def has_passed(self, now_s: float) -> bool:
        """To be called every turn. now_s: seconds of a clock that never goes back"""
        self._left_s -= min(now_s - self._last_s, _LONGEST_GAP_S)
        self._last_s = now_s
        return self._left_s < 0
