"""The question to a placement policy, and its answer.

Every policy plans all layers of one request at once, accepts `current=None`, and gives the same plan for the same
request. Effort is counted in iterations; `time_budget_s` is only a stop, and a plan it cut short says `truncated`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moe_serve.eplb.load import MAX_EXACT
from moe_serve.eplb.placement import Placement
from moe_serve.errors import PlacementError
from moe_serve.topology import Topology

Floats = NDArray[np.float64]
OBJECTIVES = ("tokens", "activated", "off_node", "step_time")


@dataclass(frozen=True)
class RankCost:
    """The prices of the `step_time` objective for a rank of one MoE layer, in seconds.

    token_s:          per token
    activated_s:      per expert with at least one token, whose weights are streamed once
    off_node_token_s: per token from another node
    """

    token_s: float
    activated_s: float
    off_node_token_s: float = 0.0


def planned_split(split: str) -> str:
    """Returns the `planned_split` of plans for batches that are split so: one of `SPLITS` or "window"."""
    return "exact" if split in ("exact", "time") else "even"


@dataclass(frozen=True, eq=False, kw_only=True)
class PlanRules:
    """The rules of one system's plans, the same for every load and placement.

    num_groups:     expert groups of the model's router; None = none. A group has one home node where groups can be
                    spread evenly over nodes; otherwise single experts have homes
    off_home:       0 .. 1, share of the load that may be served outside its expert's home node: 0 = hard hierarchy,
                    1 = no hierarchy
    max_moves:      slots per layer whose rank may have to receive an expert; None = no limit. Needs a placement in use
    max_total_moves: the same for all layers together; the moves go to the layers where they gain most. Likewise
    max_rank_moves: experts that any one rank may have to receive in a layer; None = no limit. Likewise
    min_gain:       a move of `incremental` lowers the smooth maximum of its layer (planned for the exact split: the
                    heaviest rank) by at least this share of the mean rank load; None = the policy's own
    time_budget_s:  stop after this long and mark the plan truncated; None = no stop
    objective:      one of OBJECTIVES, or weights of several, e.g. {"tokens": 1.0, "activated": 0.3}. off_node is
                    lowered by greedy and refined without a hierarchy (off_home = 1)
    cost:           prices for step_time
    planned_split:  "even" or "exact": how the per-batch split will share an expert's tokens over its replicas; refined
                    and incremental plan for either
    min_replicas:   ranks that every expert is on, at least: with 2, any one rank can be lost. Under a hierarchy
                    (off_home < 1) all of them are on the home node
    two_nodes:      spread replicas so that experts with two are on two nodes, where a swap does it that raises no
                    heaviest rank by more than 5 %: most nodes can then be lost. Not under a hierarchy
    seed:           breaks ties and drives searches
    """

    num_groups: int | None = None
    off_home: float = 1.0
    max_moves: int | None = None
    max_total_moves: int | None = None
    max_rank_moves: int | None = None
    min_gain: float | None = None
    time_budget_s: float | None = None
    objective: str | Mapping[str, float] = "tokens"
    cost: RankCost | None = None
    planned_split: str = "even"
    min_replicas: int = 1
    two_nodes: bool = False
    seed: int = 0

    def request(self, tokens: NDArray[np.number], topology: Topology, num_slots: int, **more: Any) -> "PlanRequest":
        """Returns the request for one load. more: fields of PlanRequest beside these rules"""
        return PlanRequest(tokens, topology, num_slots, **vars(self), **more)


@dataclass(frozen=True, eq=False)
class PlanRequest(PlanRules):
    """One question to a policy: a load, where it is served, and rules. Checked when built.

    tokens:         [L, E] whole numbers up to 2^53, or finite float64 (a forecast); load to plan for
    topology:       ranks and nodes
    num_slots:      P, a multiple of the ranks, at least E on the ranks that take part
    current:        placement in use; None = none yet
    by_source:      [L, R, E] tokens by the rank they come from, for off_node, step_time; None = everywhere alike
    activations:    [L, E] float64, 0 .. 1, share of batches with a token for the expert; None = 1 where there is load
    excluded_ranks: ranks that get no expert at all
    series:         [W, L, E] tokens of the windows that `tokens` sums up, oldest first, for policy series; None = one
    series_weights: [W] how much each of them counts, not all 0; None = all alike
    moe_layer_ids:  model layer of each row; () = as in current, or 0 .. L-1
    """

    tokens: NDArray[np.number]
    topology: Topology
    num_slots: int
    current: Placement | None = None
    by_source: NDArray[np.number] | None = None
    activations: Floats | None = None
    excluded_ranks: tuple[int, ...] = ()
    series: NDArray[np.number] | None = None
    series_weights: tuple[float, ...] | None = None
    moe_layer_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        tokens = _checked_load(self.tokens, "tokens", 2)
        object.__setattr__(self, "tokens", tokens)
        num_layers, num_logical = tokens.shape
        num_ranks = self.topology.num_ranks
        if num_layers < 1 or num_logical < 1:
            raise PlacementError(f"tokens has shape {tokens.shape}; give at least one layer and one expert")
        if int(self.num_slots) != self.num_slots or self.num_slots < 1 or self.num_slots % num_ranks:
            down, up = self.num_slots // num_ranks * num_ranks, -(-max(1, self.num_slots) // num_ranks) * num_ranks
            better = f"{down} or {up}" if down else f"{up}"
            raise PlacementError(f"num_slots is {self.num_slots} but {num_ranks} ranks need a multiple of {num_ranks}; "
                                 f"use {better}")  # fmt: skip
        excluded = tuple(sorted({int(r) for r in self.excluded_ranks}))
        object.__setattr__(self, "excluded_ranks", excluded)
        if excluded and (excluded[0] < 0 or excluded[-1] >= num_ranks or len(excluded) == num_ranks):
            raise PlacementError(f"excluded_ranks is {excluded} of {num_ranks} ranks; name ranks of the topology and "
                                 "leave at least one")  # fmt: skip
        self._check_dials()
        self._check_room(num_logical, num_ranks)
        self._check_current(num_layers, num_logical, num_ranks)
        self._check_objective(num_layers, num_logical, num_ranks)
        self._check_series()
        ids = self.moe_layer_ids or (self.current.moe_layer_ids if self.current else tuple(range(num_layers)))
        if len(ids) != num_layers:
            raise PlacementError(f"moe_layer_ids names {len(ids)} layers but tokens has {num_layers}; give one each")
        object.__setattr__(self, "moe_layer_ids", tuple(int(i) for i in ids))

    def _check_room(self, num_logical: int, num_ranks: int) -> None:
        num_live, least = num_ranks - len(self.excluded_ranks), self.min_replicas
        if int(least) != least or not 1 <= least <= num_live:
            raise PlacementError(
                f"min_replicas is {least!r} and {num_live} ranks take part; give a whole number from 1 to {num_live}"
            )
        room = self.num_slots // num_ranks * num_live
        if room < num_logical * least:
            times = "" if least == 1 else f", each with {least} replicas at least"
            raise PlacementError(
                f"num_slots is {self.num_slots}, of which {room} on ranks that take part, but there are {num_logical} "
                f"experts{times}; use at least {-(-num_logical * least // num_live) * num_ranks} slots"
            )

    def _check_dials(self) -> None:
        if not 0.0 <= self.off_home <= 1.0:
            raise PlacementError(
                f"off_home is {self.off_home!r}; give a share between 0 (hard hierarchy) and 1 (global)"
            )
        groups = self.num_groups
        if groups is not None and (int(groups) != groups or groups < 1 or self.tokens.shape[1] % groups):
            raise PlacementError(f"num_groups is {groups!r} but {self.tokens.shape[1]} experts must divide into them; "
                                 "give a divisor, or None")  # fmt: skip
        for name in ("max_moves", "max_total_moves", "max_rank_moves"):
            most = getattr(self, name)
            if most is not None and (int(most) != most or most < 0):
                raise PlacementError(f"{name} is {most!r}; give a whole number of at least 0, or None")
            if most is not None and self.current is None:
                raise PlacementError(f"{name} is set but current is None; give the placement in use, or drop {name}")
        if self.min_gain is not None and not 0.0 <= self.min_gain < np.inf:
            raise PlacementError(f"min_gain is {self.min_gain!r}; give a share of the mean rank load, such as 0.0003")
        if self.time_budget_s is not None and not self.time_budget_s > 0:
            raise PlacementError(f"time_budget_s is {self.time_budget_s!r}; give seconds above 0, or None")
        if self.planned_split not in ("even", "exact"):
            raise PlacementError(f"planned_split is {self.planned_split!r}; give 'even' or 'exact'")

    def _check_current(self, num_layers: int, num_logical: int, num_ranks: int) -> None:
        if self.current is None:
            return
        have = (self.current.num_layers, self.current.num_logical, self.current.num_ranks, self.current.num_slots)
        want = (num_layers, num_logical, num_ranks, self.num_slots)
        if have != want:
            raise PlacementError(
                f"current has (layers, experts, ranks, slots) = {have}, the request {want}; plan for the shape in use, "
                "or drop current"
            )

    def _check_objective(self, num_layers: int, num_logical: int, num_ranks: int) -> None:
        weights = self.objective_weights
        unknown = sorted(set(weights) - set(OBJECTIVES))
        if (
            unknown
            or not weights
            or any(not np.isfinite(w) or w < 0 for w in weights.values())
            or not any(weights.values())
        ):
            raise PlacementError(f"objective is {self.objective!r}; give one of {', '.join(OBJECTIVES)}, or weights of "
                                 "them that are >= 0 and not all 0")  # fmt: skip
        if weights.get("step_time") and self.cost is None:
            raise PlacementError("objective step_time needs prices; give cost=RankCost(...), e.g. from a cost model")
        for name, shape in (
            ("by_source", (num_layers, num_ranks, num_logical)),
            ("activations", (num_layers, num_logical)),
        ):
            value = getattr(self, name)
            if value is None:
                continue
            array = _checked_load(value, name, len(shape))
            if array.shape != shape or (name == "activations" and array.size and array.max() > 1):
                raise PlacementError(f"{name} has shape {array.shape} and maximum {array.max(initial=0)}; expected "
                                     f"{shape}" + (", at most 1" if name == "activations" else ""))  # fmt: skip
            object.__setattr__(self, name, array)

    def _check_series(self) -> None:
        weights = self.series_weights
        if self.series is not None:
            series = _checked_load(self.series, "series", 3)
            if series.shape[1:] != self.tokens.shape or not len(series):
                raise PlacementError(f"series has shape {series.shape}; expected [windows, {self.tokens.shape[0]}, "
                                     f"{self.tokens.shape[1]}], with at least one window")  # fmt: skip
            object.__setattr__(self, "series", series)
        num = 0 if self.series is None else len(self.series)
        if weights is not None and (
            len(weights) != num or not all(np.isfinite(w) and w >= 0 for w in weights) or not sum(weights)
        ):
            raise PlacementError(f"series_weights is {weights!r} for {num} windows; give each one a weight of at least "
                                 "0, and not all 0")  # fmt: skip

    @property
    def objective_weights(self) -> dict[str, float]:
        """Returns the objective as weights."""
        return {self.objective: 1.0} if isinstance(self.objective, str) else dict(self.objective)

    @property
    def live_ranks(self) -> NDArray[np.int64]:
        """Ids of the ranks that take part, ascending."""
        return np.setdiff1d(np.arange(self.topology.num_ranks), np.array(self.excluded_ranks, dtype=np.int64))


@dataclass(frozen=True)
class Unkept:
    """A rule of a request that a plan does not keep, in some layers.

    rule:    with its value, such as "max_moves 4";  reached: the most in any layer (of all, for max_total_moves)
    because: why not, and what follows
    """

    rule: str
    reached: float
    num_layers: int
    because: str

    def __str__(self) -> str:
        layers = f"{self.num_layers} layer{'s' * (self.num_layers != 1)}"
        return f"{self.rule} is not kept in {layers} (up to {self.reached:.4g}): {self.because}"


@dataclass(frozen=True, eq=False)
class Plan:
    """A policy's answer.

    placement:    where experts should live
    balancedness: [L] float64, mean / max rank load of this placement on the planned load
    bound:        [L] float64, no placement with these slots (and this split) can be better than this
    gap:          [L] float64, bound - balancedness
    truncated:    the time budget stopped the search before its effort was spent
    num_moves:    slots, over all layers, whose rank must receive an expert; 0 without a current placement
    elapsed_s:    wall clock of the planning
    off_home:     [L] float64, share of the load served outside the expert's home node
    unkept:       limits of moves and rules of the hierarchy that this plan does not keep, and why
    """

    placement: Placement
    balancedness: Floats
    bound: Floats
    gap: Floats
    truncated: bool
    num_moves: int
    elapsed_s: float
    off_home: Floats | None = None
    unkept: tuple[Unkept, ...] = ()


class PlacementPolicy(Protocol):
    """Decides where experts live."""

    @property
    def name(self) -> str: ...

    def plan(self, request: PlanRequest) -> Plan:
        """Returns the plan of one request; a pure function of it, timings apart."""
        ...


def _checked_load(value: NDArray[np.number], name: str, ndim: int) -> NDArray[np.number]:
    array = np.asarray(value)
    if array.ndim != ndim or array.dtype.kind not in "iuf":
        raise PlacementError(
            f"{name} has shape {array.shape} and dtype {array.dtype}; give numbers with {ndim} dimensions"
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise PlacementError(f"{name} holds NaN or infinity; clean the load first")
    if array.size and (array.min() < 0 or array.max() > MAX_EXACT):
        raise PlacementError(f"{name} ranges from {array.min()} to {array.max()}; loads lie between 0 and 2^53")
    copy = array.astype(np.float64 if array.dtype.kind == "f" else np.int64, copy=True)
    copy.setflags(write=False)
    return copy
