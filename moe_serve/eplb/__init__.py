"""Plans where experts live and how a hot expert's tokens are shared. Numbers in, plans out; never imports torch.

Names load on first use, so that importing one costs nothing of the others.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_serve.eplb.files.traces import read_trace
    from moe_serve.eplb.migration.plan import plan_migration
    from moe_serve.eplb.policies.make import plan
    from moe_serve.eplb.split.make import BatchSplit
    from moe_serve.topology import Topology

__all__ = ["BatchSplit", "Topology", "plan", "plan_migration", "read_trace"]

_HOME = {
    "BatchSplit": "moe_serve.eplb.split.make",
    "Topology": "moe_serve.topology",
    "plan": "moe_serve.eplb.policies.make",
    "plan_migration": "moe_serve.eplb.migration.plan",
    "read_trace": "moe_serve.eplb.files.traces",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'moe_serve.eplb' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
