"""A router's description and its result. Importable without torch: `models/families/` build RouterSpecs."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from moe_serve.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RouterSpec:
    """How a model's gate turns logits into experts and weights.

    Mixtral:     softmax, norm_topk=True
    gpt-oss:     the same, has_logit_bias=True
    Qwen3-MoE:   softmax, norm_topk = the model's norm_topk_prob
    DeepSeek-V3: sigmoid, has_bias=True, norm_topk, norm_eps=1e-20, num_groups / topk_groups, scaling

    num_logical: experts of one layer.  topk: experts of one token
    scoring:     "softmax" over all experts, or "sigmoid" of each logit
    norm_topk:   divide the chosen weights by (their sum + norm_eps)
    scaling:     factor on the weights, after norm_topk
    num_groups, topk_groups: experts are chosen from the best topk_groups of num_groups equal groups; a group's score is
                 the sum of its two best choice scores
    has_bias:    a correction bias is added to the scores for the choice only, never to the weights
    has_logit_bias: the projection to logits has a bias
    """

    num_logical: int
    topk: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    norm_topk: bool = True
    scaling: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    has_bias: bool = False
    norm_eps: float = 0.0
    has_logit_bias: bool = False

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
        if self.num_groups > 1 and self.num_logical // self.num_groups < 2:
            raise ModelError(
                f"{self.num_groups} groups of one expert: a group's score needs its two best experts; "
                "correct n_group in the model's config.json"
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
