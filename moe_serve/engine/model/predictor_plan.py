"""Decides where experts are at start, and whether a model is served with its layer for multi-token prediction.

No torch: a launcher asks, too, before it starts any rank.
"""

from pathlib import Path

from moe_serve.config import ServeConfig
from moe_serve.eplb.placement import Placement
from moe_serve.errors import ConfigError, PlacementError
from moe_serve.models.checkpoint import all_tensors, has_weights
from moe_serve.models.spec import ModelSpec
from moe_serve.models.weight_plan import has_predictor


def with_predictor(config: ServeConfig, spec: ModelSpec, folder: Path | None, on_gpu: bool) -> ModelSpec:
    """Returns the spec with its layer for multi-token prediction, where speculation.mode takes drafts of it.

    folder: of the checkpoint; None: weights are drawn;  on_gpu: the ranks are
    Raises ConfigError where it asks for a layer that there is not, or beside something that goes without it.
    """
    if config.speculation.mode not in ("mtp", "auto"):
        return spec
    why_not = why_no_predictor(config, spec, folder, on_gpu)
    if why_not is None:
        return spec.with_predictor()
    if config.speculation.mode == "mtp":
        raise ConfigError(
            f"speculation.mode is mtp, but {why_not}, or set speculation.mode: auto, which goes without it"
        )
    return spec


def why_no_predictor(config: ServeConfig, spec: ModelSpec, folder: Path | None, on_gpu: bool) -> str | None:
    """Returns why a model has no drafts of a layer for multi-token prediction, and what to do; None: it has.

    Arguments as of `with_predictor`.
    """
    for applies, why in (
        (spec.streams is not None,
         f"the layers for multi-token prediction of {spec.model_type} are not built; set speculation.mode: lookup"),
        (spec.num_predictors == 0,
         f"config.json of this {spec.model_type} names no layers for multi-token prediction "
         "(num_nextn_predict_layers); take a checkpoint that has some"),
        (folder is not None and has_weights(folder) and not has_predictor(spec, all_tensors(folder)),
         f"{folder} has no layer {spec.num_layers}, which would predict tokens, though config.json names it; get the "
         "checkpoint as it was published"),
        (config.parallel.num_prefill_ranks > 0,
         "pages that prefill ranks hand over do not hold what that layer caches; set parallel.num_prefill_ranks: 0"),
        (config.cache.host_gb is not None or config.cache.disk_gb is not None,
         "pages below the pool do not hold what that layer caches; leave out cache.host_gb and cache.disk_gb"),
        (config.engine.return_routed_experts,
         "the experts of that layer are not those of a token; leave out engine.return_routed_experts"),
        (config.eplb.mode != "off" and config.eplb.recorder_mode != "stat",
         "recordings of single passes have no place for that layer's; set eplb.recorder_mode: stat"),
        (on_gpu and config.speculation.mode == "auto",
         "on a GPU decode steps are not captured in graphs beside that layer; set speculation.mode: mtp"),
        (config.eplb.record_path is not None and config.speculation.mode == "auto",
         "a trace of the model's own layers could not go on with that layer's load; set speculation.mode: mtp and name "
         "a new eplb.record_path"),
        (config.speculation.mode == "auto" and not _places_predictor(config, spec),
         f"{config.eplb.init_expert_location} does not place its experts; set eplb.init_expert_location: trivial, or "
         "take a placement with one more layer"),
    ):  # fmt: skip
        if applies:
            return why
    return None


def _places_predictor(config: ServeConfig, spec: ModelSpec) -> bool:
    """Returns whether the placement at start places the experts of a model with its predicting layer, if it has one."""
    try:
        make_placement(config, spec.with_predictor() if spec.num_predictors else spec)
    except PlacementError:
        return False
    return True


def make_placement(config: ServeConfig, spec: ModelSpec) -> Placement:
    """Returns the placement at start: the trivial one, or that of eplb.init_expert_location."""
    num_ranks = config.parallel.num_ranks
    where = config.eplb.init_expert_location
    if where == "trivial":
        # Uneven experts are padded with empty slots; the remainder of a redundant count is given to experts, not
        # wasted.
        num_redundant = config.eplb.num_redundant_experts
        if num_redundant:
            num_redundant += -(spec.num_logical + num_redundant) % num_ranks
        return Placement.trivial(
            len(spec.moe_layer_ids), spec.num_logical, num_ranks, num_redundant, moe_layer_ids=spec.moe_layer_ids
        )
    from moe_serve.eplb.files.placements import read_placement
    from moe_serve.eplb.policies.make import plan_counts

    return read_placement(Path(where), num_ranks, spec.num_logical, spec.moe_layer_ids, plan_counts=plan_counts)
