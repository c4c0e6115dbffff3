"""moe_serve: Mixture-of-Experts serving with expert parallelism.

`from moe_serve import LLM, SamplingParams, Output` for offline generation. Names load on first use, so that
`import moe_serve.eplb` never pays for the engine.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_serve.attention_dp.request import SamplingParams
    from moe_serve.launcher.llm import LLM, Output

__all__ = ["LLM", "Output", "SamplingParams"]
__version__ = "0.1.0"

_HOME = {
    "LLM": "moe_serve.launcher.llm",
    "Output": "moe_serve.launcher.llm",
    "SamplingParams": "moe_serve.attention_dp.request",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'moe_serve' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
