"""The choice of a placement policy by name; a policy is imported when it is chosen."""

from typing import Any

from moe_serve.eplb.policies.names import POLICIES
from moe_serve.eplb.policies.policy import PlacementPolicy
from moe_serve.errors import ConfigError


def make_policy(name: str, **options: Any) -> PlacementPolicy:
    """Returns the policy of this name; options are the fields of its class.

    Raises ConfigError for an unknown name or option.
    """
    try:
        match name:
            case "deepseek":
                from moe_serve.eplb.policies.deepseek import DeepSeekPolicy

                return DeepSeekPolicy(**options)
            case "greedy":
                from moe_serve.eplb.policies.greedy import GreedyPolicy

                return GreedyPolicy(**options)
            case "refined":
                from moe_serve.eplb.policies.refined import RefinedPolicy

                return RefinedPolicy(**options)
            case "incremental":
                from moe_serve.eplb.policies.incremental import IncrementalPolicy

                return IncrementalPolicy(**options)
            case "series":
                from moe_serve.eplb.policies.series import SeriesPolicy

                return SeriesPolicy(**options)
            case "milp":
                from moe_serve.eplb.policies.exact import MilpPolicy

                return MilpPolicy(**options)
            case "static":
                from moe_serve.eplb.policies.static import StaticPolicy

                return StaticPolicy(**options)
    except TypeError as error:
        raise ConfigError(f"policy {name!r} does not take these options ({error}); see its class") from None
    raise ConfigError(f"policy {name!r} is unknown; use one of {', '.join(POLICIES)}")
