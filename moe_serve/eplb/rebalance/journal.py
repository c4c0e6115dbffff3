"""What a rebalancer has decided, how often in a row it came to nothing, and why it is switched off, if it is."""

from collections import deque

from moe_serve.eplb.rebalance.events import Decision

MAX_DECISIONS = 10_000  # that are remembered


class Journal:
    """The decisions of one rebalancer, oldest first; of very many the newest.

    alarm: why the rebalancer is switched off; "" = it is not
    """

    def __init__(self, max_failures: int) -> None:
        """max_failures: after so many in a row the rebalancer switches itself off"""
        self.alarm = ""
        self._decisions: deque[Decision] = deque(maxlen=MAX_DECISIONS)
        self._num_decisions = 0
        self._max_failures = max_failures
        self._failures = 0

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return tuple(self._decisions)

    def since(self, number: int) -> tuple[list[Decision], int]:
        """Returns the decisions after the first `number` ones, and how many there are now."""
        num_new = min(self._num_decisions - number, len(self._decisions))
        return [self._decisions[index] for index in range(-num_new, 0)], self._num_decisions

    def add(self, decision: Decision) -> None:
        self._decisions.append(decision)
        self._num_decisions += 1

    def fail(self, step: int, reason: str) -> None:
        """Notes a plan or a move that came to nothing; switches off after too many in a row."""
        self.add(Decision(step, "failed", reason))
        self._failures += 1
        if self._failures >= self._max_failures and not self.alarm:
            self.switch_off(step, f"{self._failures} plans or moves in a row came to nothing, the last one: {reason}")

    def switch_off(self, step: int, reason: str) -> None:
        self.alarm = f"the balancer is switched off: {reason}"
        self.add(Decision(step, "off", f"{self.alarm}; POST /eplb/rebalance switches it on again"))

    def succeed(self) -> None:
        """Forgets the failures so far: something worked, or there is a reason why it may work now."""
        self._failures = 0

    def switch_on(self) -> None:
        self._failures, self.alarm = 0, ""
