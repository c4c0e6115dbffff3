"""How many experts may be under way at once while a migration runs."""

from dataclasses import dataclass

from moe_serve.errors import PlacementError


@dataclass(frozen=True)
class RoundLimits:
    """What one round of a migration may move, all layers together. Raises PlacementError unless all are at least 1.

    per_rank: experts into one rank, and out of it; each takes a staging slot
    per_pair: experts from one rank to another; None = as many as per_rank allows
    per_node: experts into one node from others over its network, and out of it; None = no limit
    """

    per_rank: int = 1
    per_pair: int | None = None
    per_node: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and (int(value) != value or value < 1):
                raise PlacementError(f"{name} of a round's limits is {value!r}; give a whole number of at least 1")
