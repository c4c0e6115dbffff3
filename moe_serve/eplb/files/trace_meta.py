"""What our three trace formats (.npz, .jsonl, .csv) share: the description of a trace and the names of fields."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moe_serve.eplb.files.counts import check_layer_ids, check_table_size
from moe_serve.eplb.load import LoadTrace
from moe_serve.errors import TraceError

TRACE_FORMAT = "moe_serve.trace"
OPTIONAL_FIELDS = ("per_step", "by_source", "activations")

ByteProgress = Callable[[int, int], None]  # (bytes read, bytes in all)


@dataclass(frozen=True)
class TraceMeta:
    """What a trace file says about all its records."""

    num_logical: int
    moe_layer_ids: tuple[int, ...]
    topk: int | None = None
    model_id: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "format": TRACE_FORMAT,
            "num_logical": self.num_logical,
            "moe_layer_ids": list(self.moe_layer_ids),
            "topk": self.topk,
            "model_id": self.model_id,
        }

    @classmethod
    def from_json(cls, content: Any, where: str) -> "TraceMeta":
        """Raises TraceError naming `where` (file and line or key) when something is missing or of the wrong kind."""
        if not isinstance(content, dict):
            raise TraceError(f"{where}: expected an object that describes the trace, found {content!r:.60}")
        layers, experts, topk = content.get("moe_layer_ids"), content.get("num_logical"), content.get("topk")
        if not isinstance(layers, list) or not layers:
            raise TraceError(f"{where}, key moe_layer_ids: expected a list of layer ids, found {layers!r:.60}")
        check_layer_ids(layers, f"{where}, key moe_layer_ids")
        if len(set(layers)) != len(layers):
            raise TraceError(f"{where}, key moe_layer_ids: a layer is named twice in {layers!r:.60}")
        if type(experts) is not int or experts < 1:
            raise TraceError(f"{where}, key num_logical: expected a number of experts, found {experts!r:.60}")
        if topk is not None and (type(topk) is not int or topk < 1):
            raise TraceError(f"{where}, key topk: expected experts per token, found {topk!r:.60}")
        check_table_size(len(layers), experts, where)
        return cls(experts, tuple(layers), topk, str(content.get("model_id") or ""))

    @classmethod
    def of(cls, trace: LoadTrace) -> "TraceMeta":
        return cls(trace.num_logical, trace.moe_layer_ids, trace.topk, trace.model_id)
