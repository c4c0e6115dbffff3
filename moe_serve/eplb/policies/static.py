"""Keeps the placement in use: the floor that every balancer is compared with."""

from dataclasses import dataclass

from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.policy import Plan, PlanRequest
from moe_serve.eplb.policies.problem import as_table, finish, problem_of
from moe_serve.errors import PlacementError


@dataclass(frozen=True)
class StaticPolicy:
    """Keeps the current placement, or experts in order where there is none."""

    name: str = "static"

    def plan(self, request: PlanRequest) -> Plan:
        """Returns the current placement; without one, the trivial placement over the ranks that take part.

        Raises PlacementError when the current placement uses an excluded rank for an expert's only slot.
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
            return finish(problem, problem.current, keep_slots=False)
        num_layers, num_logical = problem.weight.shape
        trivial = Placement.trivial(num_layers, num_logical, problem.num_ranks, problem.num_slots - num_logical)
        return finish(problem, as_table(trivial, problem.ranks * 0 + range(problem.num_ranks)))
