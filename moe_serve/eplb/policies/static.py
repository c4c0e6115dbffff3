"""Keeps the placement in use: the floor that every balancer is compared with."""

from dataclasses import dataclass

import numpy as np

from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.policy import Plan, PlanRequest
from moe_serve.eplb.policies.problem import Ids, Problem, as_table, finish, holds, problem_of
from moe_serve.eplb.repair import give_ranks
from moe_serve.errors import PlacementError


@dataclass(frozen=True)
class StaticPolicy:
    """Keeps the current placement, or experts in order where there is none."""

    name: str = "static"

    def plan(self, request: PlanRequest) -> Plan:
        """Returns the current placement; without one, the trivial placement over the ranks that take part.

        With min_replicas above 1, slots of the trivial placement are changed where an expert is on too few ranks.
        Raises PlacementError when the current placement uses an excluded rank for an expert's only slot, or has an
        expert on fewer than min_replicas ranks.
        """
        problem = problem_of(request)
        if problem.current is not None:
            if request.current is not None and request.excluded_ranks:
                lost = request.current.without_ranks(request.excluded_ranks)[1]
                if lost:
                    raise PlacementError(
                        f"the static policy keeps the current placement, but without ranks {request.excluded_ranks} "
                        f"expert {lost[0][1]} of row {lost[0][0]} (and {len(lost) - 1} more) has no slot; use another "
                        "policy"
                    )
            _check_ranks(problem, problem.current)
            return finish(problem, problem.current, keep_slots=False)
        num_layers, num_logical = problem.weight.shape
        trivial = Placement.trivial(num_layers, num_logical, problem.num_ranks, problem.num_slots - num_logical)
        table = as_table(trivial, problem.ranks * 0 + range(problem.num_ranks))
        if problem.min_replicas > 1:
            for ranks in table:
                give_ranks(ranks, range(problem.num_ranks), problem.min_replicas)
        return finish(problem, table)


def _check_ranks(problem: Problem, table: Ids) -> None:
    """Raises PlacementError when an expert of the table [L, R, K] is on fewer than min_replicas ranks."""
    least = problem.min_replicas
    num_ranks = holds(table, problem.weight.shape[1]).sum(axis=1)
    if least > 1 and (num_ranks < least).any():
        row, expert = np.argwhere(num_ranks < least)[0]
        raise PlacementError(
            f"the static policy keeps the current placement, in which expert {expert} of row {row} is on "
            f"{num_ranks[row, expert]} of the ranks that take part and min_replicas is {least}; use another policy"
        )
