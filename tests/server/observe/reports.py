"""Reports of a balancer, as a leader would send them, without one: the load shifts from one domain to another, the
balancer decides, moves experts in rounds, and the balance recovers."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from moe_serve.engine.protocol.messages import BalanceReport, DecisionReport, Status, WindowReport
from moe_serve.eplb.load import balancedness, rank_load, rank_traffic
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.make import plan
from moe_serve.topology import Topology

WINDOW_STEPS = 200
EXPERT_BYTES = 73_728


@dataclass
class Story:
    """A served system over time. skew: of the log-normal popularity of experts"""

    num_layers: int = 4
    num_experts: int = 32
    num_ranks: int = 4
    num_slots: int = 40
    num_windows: int = 60
    shifts: tuple[int, ...] = (25,)  # windows at which the domain changes
    skew: float = 0.55
    tokens_per_window: int = 40_000
    window_s: float = 5.0
    began_s: float = 1_790_000_000.0
    policy: str = "incremental"
    seed: int = 3
    rank: int = 0
    launch_id: int = 0
    totals: dict[str, float] = field(default_factory=dict)

    @property
    def info(self) -> dict[str, object]:
        """What ranks of this system say when they are ready."""
        return {
            "num_logical": self.num_experts,
            "num_slots": self.num_slots,
            "moe_layer_ids": list(range(1, self.num_layers + 1)),
            "backend": "fake",
        }

    def reports(self) -> Iterator[tuple[float, BalanceReport]]:
        """Yields (when, report), in order."""
        rng = np.random.default_rng(self.seed)
        popularity = self._popularity(rng)
        placement = Placement.trivial(
            self.num_layers, self.num_experts, self.num_ranks, self.num_slots - self.num_experts
        )
        self.totals = dict.fromkeys(("num_experts_moved", "num_bytes_moved", "num_rounds", "plan_seconds"), 0.0)
        uneven = 0
        yield self.began_s, self._report(0, placement=placement.physical_to_logical.tolist())
        for number in range(self.num_windows):
            if number in self.shifts:
                popularity = self._popularity(rng)
            tokens = np.stack([rng.multinomial(self.tokens_per_window, layer) for layer in popularity])
            load = rank_load(tokens, placement)
            balance = balancedness(load)
            step_s = 0.011 * (0.55 + 0.45 / float(balance.mean())) * float(rng.normal(1, 0.01))
            first = number * WINDOW_STEPS
            window = WindowReport(
                first,
                WINDOW_STEPS,
                "decode",
                step_s,
                balance.tolist(),
                load.tolist(),
                tokens.tolist(),
                float(balance.mean()),
                rank_traffic(np.repeat(tokens[:, None] / self.num_ranks, self.num_ranks, axis=1), placement).tolist(),
            )
            at_s = self.began_s + (number + 1) * self.window_s
            yield at_s, self._report(first + WINDOW_STEPS, window=window)
            uneven = uneven + 1 if balance.min() < 0.9 else 0
            if uneven == 3:  # the balancer waits for three uneven windows
                uneven, old = 0, placement
                placement = plan(
                    tokens, Topology(1, self.num_ranks), self.num_slots, self.policy, current=old
                ).placement
                yield from self._move(at_s, window, old, placement)

    def _move(
        self, at_s: float, window: WindowReport, old: Placement, new: Placement
    ) -> Iterator[tuple[float, BalanceReport]]:
        """A plan, the decision to move, rounds of one expert a rank, and the end."""
        step = window.first_step + window.num_steps
        moved = int((new.physical_to_logical != old.physical_to_logical).sum())
        rounds = -(-moved // self.num_ranks)
        reason = f"balancedness is down to {min(window.balancedness):.3f}; layers to plan: {self.num_layers}"
        yield at_s, self._report(step, "planning", decisions=[self._decision(at_s, step, "plan", reason)])
        gain_s = (window.step_time_s - 0.011) * WINDOW_STEPS
        reason = (
            f"{self.num_layers} layers, {moved} experts in {rounds} rounds: saves {gain_s:.3g} s a window for 0.2 s"
        )
        self.totals["plan_seconds"] += 0.35
        decision = self._decision(at_s + 0.4, step, "move", reason, gain_s * 20, 0.21)
        yield at_s + 0.4, self._report(step, "moving", decisions=[decision])
        for count in np.diff(np.linspace(0, moved, rounds + 1).astype(int)):
            self.totals["num_rounds"] += 1
            self.totals["num_experts_moved"] += int(count)
            self.totals["num_bytes_moved"] += int(count) * EXPERT_BYTES
            yield at_s + 0.6, self._report(step + 5, "moving")
        done = self._decision(at_s + 1.2, step + 30, "done", f"placement {self.totals['num_rounds']:.0f} is live")
        yield at_s + 1.2, self._report(step + 30, decisions=[done], placement=new.physical_to_logical.tolist())

    def statuses(self, window: int) -> list[Status]:
        """What the ranks report of requests and cache."""
        rng = np.random.default_rng(window)
        out = []
        for rank in range(self.num_ranks):
            running, free = int(rng.integers(9, 17)), int(rng.integers(180, 420))
            prompt = 4000.0 * window * (1 + 0.1 * rank)
            counters = {
                "num_steps": float(window * WINDOW_STEPS),
                "num_output_tokens": float(window * (2400 + 100 * rank)),
                "num_prompt_tokens": prompt,
                "num_cached_prompt_tokens": prompt * (0.31 + 0.04 * (rank % 8)),
            }
            waiting = int(rng.integers(0, 3))
            out.append(
                Status(rank, self.launch_id, window * WINDOW_STEPS, running, waiting, free, 512, 37 * waiting, counters)
            )
        return out

    def _popularity(self, rng: np.random.Generator) -> np.ndarray:
        weights = rng.lognormal(0, self.skew, (self.num_layers, self.num_experts))
        return weights / weights.sum(axis=1, keepdims=True)

    def _report(self, step: int, state: str = "watching", **more: object) -> BalanceReport:
        """A report; each round that is live has made a version of the placement."""
        version = int(self.totals["num_rounds"])
        return BalanceReport(self.rank, self.launch_id, step, "dynamic", state, version, dict(self.totals), **more)  # type: ignore[arg-type]

    def _decision(
        self, at_s: float, step: int, kind: str, reason: str, gain_s: float = 0.0, cost_s: float = 0.0
    ) -> DecisionReport:
        return DecisionReport(at_s, step, kind, reason, self.num_layers, gain_s, cost_s)
