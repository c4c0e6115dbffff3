"""Load records of one rank: when each began, and when it counts.

A record is closed by a reduction over all ranks, and counts from the next exchange on: who comes through that knows
that all have come through the reduction. Until then a lost rank takes it back on all that are left, and what is in it
is in the next one. So no token is in two records or in none, whichever rank writes them.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from moe_serve.ep.load_recorder import LoadRecorder
from moe_serve.eplb.load import LoadRecord
from moe_serve.eplb.placement import Placement


@dataclass(frozen=True)
class _Window:
    """Where a load record began, and where experts were."""

    first_step: int
    start_s: float
    placement: Placement


class LoadWindows:
    """The record that is being counted, and those that were closed and may still be taken back."""

    def __init__(self, recorder: LoadRecorder, placement: Placement):
        self._recorder = recorder
        self._closed: list[LoadRecord] = []
        self._window = self._confirmed = _Window(0, time.monotonic(), placement)

    def close(self, step: int, placement: Placement) -> None:
        """Ends the record with the step before `step`; a collective call. placement: that the next one begins with.

        Raises PeerError when a peer does not take part: the record goes on.
        """
        now_s, window = time.monotonic(), self._window
        num_steps = step - window.first_step
        record = self._recorder.take(window.first_step, num_steps)
        if record is None:
            return
        self._window = _Window(step, now_s, placement)
        self._closed.append(
            replace(
                record,
                placement=window.placement,
                placement_version=window.placement.version,
                step_time_s=(now_s - window.start_s) / num_steps,
            )
        )

    def confirm(self) -> Sequence[LoadRecord]:
        """Returns the records that were closed: from now on they count."""
        if not self._closed:
            return ()
        self._recorder.confirm()
        self._confirmed = self._window
        confirmed, self._closed = self._closed, []
        return confirmed

    def void(self) -> None:
        """Takes back what was counted and closed since the last step that is done, and since `confirm`."""
        self._recorder.void_step()
        self._window, self._closed = self._confirmed, []

    def come_back(self, first_step: int, placement: Placement) -> None:
        """This rank was out: its record begins with first_step, where that of the others does."""
        self._recorder.come_back()
        self._window = self._confirmed = _Window(first_step, time.monotonic(), placement)
