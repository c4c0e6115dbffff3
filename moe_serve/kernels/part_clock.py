"""Measures how long the main thread of a rank is in each part of a step.

Python and C turn the same clock, so a part that is a few kernels in the middle of one C call is timed, too: a turn is
one look at the host's monotonic clock, and none where the part does not change. Work is charged to the part that the
main thread is in; a part that waits for a peer has that wait. On a GPU kernels only begin here, so nothing is said of
parts there. For a profile, turns are also written down.
"""

import time
from array import array

PARTS = (
    "other",  # the Python around a step: batch, bookkeeping, messages
    "exchange",  # ranks agree on the step; waits for the slowest
    "attention",  # with its norm and projections
    "gate",  # the router of a MoE layer, with the norm before it
    "dispatch",  # rows to their experts
    "experts",
    "combine",  # results home, and their sums
    "mlp",  # dense layers and shared experts
    "vocabulary",  # embedding and logits
    "sample",
    "between",  # between two steps: messages, sleep
)  # fmt: skip
OTHER, EXCHANGE, ATTENTION, GATE, DISPATCH, EXPERTS, COMBINE, MLP, VOCABULARY, SAMPLE, BETWEEN = range(len(PARTS))

# The words, as in part_clock.h.
_PART, _SINCE, _TURNS_AT, _NUM_TURNS, _MOST_TURNS, _SUMS = range(6)


class PartClock:
    """Times by part, in ns of time.monotonic_ns(). One thread turns it."""

    def __init__(self) -> None:
        self._words = array("q", [0] * (_SUMS + len(PARTS)))
        self._words[_PART] = BETWEEN
        self._words[_SINCE] = time.monotonic_ns()
        self._turns = array("q")

    @property
    def address(self) -> int:
        """Where C finds the words; they stay there."""
        return self._words.buffer_info()[0]

    def turn(self, part: int) -> int:
        """Begins a part, and returns when, in ns."""
        words = self._words  # each look at one makes an int: no more of them than needed
        now_ns = time.monotonic_ns()
        before = words[_PART]
        if part != before:
            words[_SUMS + before] += now_ns - words[_SINCE]
            words[_SINCE] = now_ns
            words[_PART] = part
            if words[_MOST_TURNS] and (number := words[_NUM_TURNS]) < words[_MOST_TURNS]:
                self._turns[2 * number], self._turns[2 * number + 1] = now_ns, part
                words[_NUM_TURNS] = number + 1
        return now_ns

    def sums_ns(self) -> "array[int]":
        """Returns how long each part has taken up to the last turn, by part."""
        return self._words[_SUMS:]

    def write_turns(self, most: int) -> None:
        """Forgets what was written down, and writes the next turns, `most` of them; 0: none."""
        turns = array("q", bytes(16 * most))
        self._words[_MOST_TURNS] = 0
        self._turns = turns
        self._words[_TURNS_AT], self._words[_NUM_TURNS] = turns.buffer_info()[0], 0
        self._words[_MOST_TURNS] = most

    def stop_writing(self) -> None:
        """Writes no more turns down; what was written stays."""
        self._words[_MOST_TURNS] = self._words[_NUM_TURNS]

    def turns(self) -> "array[int]":
        """Returns what was written down: begin in ns and part, of one turn after the other."""
        return self._turns[: 2 * self._words[_NUM_TURNS]]
