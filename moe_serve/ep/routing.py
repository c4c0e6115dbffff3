"""A router's description and its result. Importable without torch: `models/families/` build RouterSpecs."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_serve.errors import ModelError
from moe_serve.kernels.forms import GroupScore, Scoring

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RouterSpec:
    """How a model's gate turns logits into experts and weights.

    Mixtral:     softmax, norm_topk=True
    gpt-oss:     the same, has_logit_bias=True
    Granite-MoE, Hunyuan-A13B: as Mixtral
    Qwen3-MoE:   softmax, norm_topk = the model's norm_topk_prob
    MiniMax-M2:  sigmoid, has_bias=True, norm_topk=True
    DeepSeek-V3: sigmoid, has_bias=True, norm_topk, norm_eps=1e-20, num_groups / topk_groups, scaling
    DeepSeek-V2: softmax, norm_topk=False, num_groups / topk_groups with group_score="best", scaling
    ERNIE-4.5:   softmax, has_bias=True, norm_topk=True, norm_min
    Llama-4:     sigmoid_of_chosen, one expert, scales_input
    Phi-MoE:     sparsemixer, two experts, jitter

    num_logical: experts of one layer.  topk: experts of one token
    scoring:     "softmax" over all experts, or "sigmoid" of each logit; "sigmoid_of_chosen": the same, chosen by
                 logits, which differ where sigmoids are both 1; "sparsemixer" (arXiv:2409.12136): two experts by
                 logits, each weighed by a softmax over those not far below it, the first left out for the second
    norm_topk:   divide the chosen weights by (their sum + norm_eps), but at least norm_min
    scaling:     factor on the weights, after norm_topk
    num_groups, topk_groups: experts are chosen from the best topk_groups of num_groups equal groups
    group_score: of choice scores, the sum of a group's "best_two", or the "best"
    jitter:      of sparsemixer: an expert is far below another where it lacks more than twice this share
    scales_input: the weight multiplies what goes into the expert, not what comes out; for one expert per token
    has_bias:    a correction bias is added to the scores for the choice only, never to the weights
    has_logit_bias: the projection to logits has a bias
    """

    num_logical: int
    topk: int
    scoring: Scoring = "softmax"
    norm_topk: bool = True
    scaling: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    has_bias: bool = False
    norm_eps: float = 0.0
    has_logit_bias: bool = False
    norm_min: float = 0.0
    group_score: GroupScore = "best_two"
    jitter: float = 0.0
    scales_input: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.topk <= self.num_logical:
            raise ModelError(
                f"top-k is {self.topk} with {self.num_logical} experts; it must be between 1 and {self.num_logical}: "
                "correct num_experts_per_tok in the model's config.json"
            )
        if self.num_groups < 1 or self.num_logical % self.num_groups:
            raise ModelError(
                f"{self.num_logical} experts do not divide into {self.num_groups} groups; "
                "correct n_group in the model's config.json"
            )
        if not 1 <= self.topk_groups <= self.num_groups:
            raise ModelError(
                f"topk_group is {self.topk_groups} with {self.num_groups} groups; it must be between 1 and "
                f"{self.num_groups}: correct topk_group in the model's config.json"
            )
        if self.topk > self.topk_groups * (self.num_logical // self.num_groups):
            raise ModelError(
                f"top-k is {self.topk} but {self.topk_groups} groups of {self.num_logical // self.num_groups} experts "
                "hold fewer; correct n_group or topk_group in the model's config.json"
            )
        if self.num_groups > 1 and self.num_logical // self.num_groups < 2 and self.group_score == "best_two":
            raise ModelError(
                f"{self.num_groups} groups of one expert: a group's score needs its two best experts; "
                "correct n_group in the model's config.json"
            )
        if self.scoring == "sparsemixer" and self.topk != 2:
            raise ModelError(
                f"top-k is {self.topk}, but sparsemixer chooses two experts; "
                "correct num_experts_per_tok in the model's config.json"
            )
        if self.scales_input and self.topk != 1:
            raise ModelError(
                f"top-k is {self.topk} where the router scales the experts' input, which is built for one expert per "
                "token; serve a model with num_experts_per_tok 1"
            )


@dataclass(frozen=True)
class Routing:
    """The experts of each token, and their weights.

    topk_ids:     [T, topk] int64 logical experts, -1 = none
    topk_weights: [T, topk] float32
    load:         [E] int64, number of ids for each expert, where the gate has counted them; else None
    """

    topk_ids: "Tensor"
    topk_weights: "Tensor"
    load: "Tensor | None" = None
