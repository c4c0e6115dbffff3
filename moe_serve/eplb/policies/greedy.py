"""The fast policy: exact minimax replication, then packing in rounds. A few milliseconds for 58 layers."""

from dataclasses import dataclass

from moe_serve.eplb.policies.anew import finish_anew
from moe_serve.eplb.policies.locality import improve_locality
from moe_serve.eplb.policies.packing import pack_in_rounds, repair_duplicates
from moe_serve.eplb.policies.policy import Plan, PlanRequest
from moe_serve.eplb.policies.problem import Floats, Ids, Problem, problem_of
from moe_serve.eplb.policies.replication import list_replicas, minimax_counts, replica_load


@dataclass(frozen=True)
class GreedyPolicy:
    """Replicates the heaviest experts, then assigns replicas to ranks round by round; see `anew.py` for which rank."""

    name: str = "greedy"

    def plan(self, request: PlanRequest) -> Plan:
        """Returns the greedy plan. It ignores all limits of moves; use `incremental` for that."""
        problem = problem_of(request)
        if problem.is_global:
            table, packed = first_packing(problem)
            known = packed.max(axis=(1, 2)) if request.objective == "tokens" else None
            return finish_anew(problem, improve_locality(problem, table, 40), heaviest_replica=known)
        from moe_serve.eplb.policies.hierarchy import plan_by_node

        table, homes, _ = plan_by_node(problem, sweeps=0)
        return finish_anew(problem, table, homes=homes)


def greedy_table(problem: Problem) -> Ids:
    """Returns the table [L, R, K] of the greedy method, without node hierarchy."""
    return first_packing(problem)[0]


def first_packing(problem: Problem) -> tuple[Ids, Floats]:
    """Returns minimax replicas packed in rounds, without duplicates: table and loads [L, R, K].

    Where each replica has a cost of its own, it tries all redundant slots, half of them and none: a replica that saves
    less than it costs is better left out.
    """
    least = problem.weight.shape[1] * problem.min_replicas
    totals = [problem.num_slots]
    if problem.fixed is not None:
        totals += [(problem.num_slots + least) // 2, least]
    best: tuple[Ids, Floats] | None = None
    for total in dict.fromkeys(totals):
        counts = minimax_counts(problem.weight, total, problem.num_ranks, problem.fixed, problem.min_replicas)
        replicas = list_replicas(counts, problem.num_slots)
        load = replica_load(problem.weight, counts, replicas, problem.fixed)
        table, packed = pack_in_rounds(replicas, load, problem.num_ranks)
        repair_duplicates(table, packed)
        if best is None:
            best = table, packed
            continue
        better = packed.sum(axis=2).max(axis=1) < best[1].sum(axis=2).max(axis=1)
        best[0][better], best[1][better] = table[better], packed[better]
    assert best is not None
    return best
