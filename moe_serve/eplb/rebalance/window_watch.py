"""What a closed window can tell a rebalancer: about prices, about the last move, and whether the next plan is due."""

from dataclasses import dataclass

from moe_serve.eplb.load import LoadRecord
from moe_serve.eplb.placement import Placement

# Where prices are learned from windows, one without a move is waited for after so many with moves.
MOST_WITHOUT_WHOLE = 4


@dataclass(frozen=True)
class ClosedWindow:
    """A window with load.

    first, last: the placements in use at its beginning and end
    whole:  one placement served all of it, so its time can teach the prices
    unseen: the last move is over, and its plan knew nothing of this load, so the load measures what the move gains
    """

    first: Placement
    last: Placement
    whole: bool
    unseen: bool


class WindowWatch:
    """Follows windows, plans and moves by their steps."""

    def __init__(self, placement: Placement, cooldown_windows: int, learns: bool) -> None:
        """cooldown_windows: see RebalanceSettings;  learns: prices are learned from whole windows"""
        self._before = placement  # in use at the beginning of the running window
        self._cooldown, self._learns = cooldown_windows, learns
        self._live_step = 0  # when the placement in use was complete
        self._asked_step = 0  # when the last plan was asked for: later load is new to it
        self._rest = 0  # unseen windows to skip before the next plan
        self._num_partial = 0  # windows since the last whole one
        self.num_windows = 0

    def plan_asked(self, step: int) -> None:
        """Notes that a plan is asked for at this step."""
        self._asked_step = step

    def rest(self) -> None:
        """Begins the cooldown."""
        self._rest = self._cooldown

    def complete(self, step: int) -> None:
        """Notes that the placement in use is complete from this step on: its migration ended, or was given up."""
        self._live_step = step

    def begin_anew(self, step: int, placement: Placement) -> None:
        """Notes that another group of ranks serves from this step on."""
        self._before, self._live_step = placement, step
        self.rest()

    def close(self, record: LoadRecord, placement: Placement, is_moving: bool) -> ClosedWindow | None:
        """Returns what the window that has just closed is good for; None: nothing, since it had no load."""
        before, self._before = self._before, placement
        if not record.num_steps or not record.tokens.any():
            return None
        self.num_windows += 1
        whole = not is_moving and record.first_step >= self._live_step
        self._num_partial = 0 if whole else self._num_partial + 1
        return ClosedWindow(before, placement, whole, not is_moving and record.first_step >= self._asked_step)

    def is_due(self) -> bool:
        """Counts an unseen window. Returns whether the cooldown is over, so that a plan may be asked for."""
        self._rest -= 1
        return self._rest <= 0 and not (self._learns and self._num_partial >= MOST_WITHOUT_WHOLE)
