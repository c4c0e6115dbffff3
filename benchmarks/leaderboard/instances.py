"""The instances of the leaderboard: model, cluster, load and seed. They are frozen: a change makes old tables void."""

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.balancer_instances import Q3_EP16, Q3_EP64, V3_EP32, V3_EP72, V3_EP144, V3_EP320, Shape
from moe_serve.eplb.cost.model import CostModel
from moe_serve.eplb.cost.profile_files import load_hardware, load_model_profile
from moe_serve.eplb.load import LoadRecord, LoadTrace
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.policies.make import make_policy
from moe_serve.eplb.policies.policy import PlanRequest
from moe_serve.eplb.replay.costs import ProfileCosts
from moe_serve.eplb.replay.synthetic import SyntheticLoad, synthetic_trace

TOKENS_PER_RANK = {"prefill": 16384, "decode": 256}  # that a rank computes in a step
HARDWARE = "H800"


@dataclass(frozen=True)
class Instance:
    """A load on a cluster.

    family, skew, rho, period, seed: of `SyntheticLoad`
    num_groups:                      expert groups of the model's router; 1 = none
    model:                           model profile, for bytes of an expert and predicted times
    phase:                           prefill or decode
    plans:                           windows that are planned for; each plan is also scored on the window after it
    """

    name: str
    shape: Shape
    model: str
    phase: str
    family: str = "lognormal"
    skew: float | None = None
    rho: float = 0.98
    period: int = 3
    num_groups: int = 8
    seed: int = 501
    plans: int = 5

    @property
    def words(self) -> str:
        """Layers, experts, slots and ranks, phase, and the load."""
        return f"{self.shape.words}, {self.phase}, {self._load().words().partition(':')[0]}"

    def trace(self) -> LoadTrace:
        """Returns a window for the first placement, those that are planned for, and one more to be scored on."""
        return synthetic_trace(self._load())

    def windows(self) -> Iterator[LoadRecord]:
        return iter(self.trace())

    def start(self, first: LoadRecord) -> Placement:
        """Returns the placement in use before the first plan: one that fits the first window."""
        request = PlanRequest(first.tokens, self.shape.topology, self.shape.num_slots)
        return make_policy("refined").plan(request).placement

    def costs(self) -> ProfileCosts:
        """Returns the prices of times and bytes."""
        model = load_model_profile(self.model)
        return ProfileCosts(CostModel(load_hardware(HARDWARE), model, self.shape.topology))

    def _load(self) -> SyntheticLoad:
        return SyntheticLoad(
            self.family,
            self.plans + 2,
            self.shape.num_layers,
            self.shape.num_logical,
            num_groups=8,
            skew=self.skew,
            rho=self.rho,
            period=self.period,
            phase=self.phase,
            tokens_per_step=TOKENS_PER_RANK[self.phase] * self.shape.topology.num_ranks,
            seed=self.seed,
        )


V3, QWEN3 = "DeepSeek-V3", "Qwen3-235B-A22B"
INSTANCES = (
    Instance("v3-ep32-drift", V3_EP32, V3, "prefill"),
    Instance("v3-ep32-fast-drift", V3_EP32, V3, "prefill", rho=0.9),
    Instance("v3-ep32-hot-expert", V3_EP32, V3, "prefill", family="hot"),
    Instance("v3-ep32-domains", V3_EP32, V3, "prefill", family="bursts"),
    Instance("v3-ep72-drift", V3_EP72, V3, "decode"),
    Instance("v3-ep144-drift", V3_EP144, V3, "decode"),
    Instance("v3-ep320-drift", V3_EP320, V3, "decode"),
    Instance("qwen3-ep16-drift", Q3_EP16, QWEN3, "prefill", num_groups=1),
    Instance("qwen3-ep64-zipf", Q3_EP64, QWEN3, "decode", family="zipf", skew=1.0, num_groups=1),
)
