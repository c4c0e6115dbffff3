"""The front door for files: placements and load traces of every engine, recognised by content.

One file per family lies beside this one (formats_sglang.py, formats_tensorrt.py, …); here is only the choice.
Our placement file is JSON: {"format": "moe_serve.placement", "num_logical", "num_ranks", "moe_layer_ids", "version",
"physical_to_logical_map": [[expert of each slot] per MoE layer]}; -1 = empty slot.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from moe_serve.eplb.files import ascend as formats_ascend
from moe_serve.eplb.files import sglang as formats_sglang
from moe_serve.eplb.files import tensorrt as formats_tensorrt
from moe_serve.eplb.files import trace_csv, trace_jsonl, trace_npz
from moe_serve.eplb.files.megatron import is_router_line, read_megatron
from moe_serve.eplb.files.named import is_named_counts, read_named
from moe_serve.eplb.files.placement_files import make_placement, read_json, slot_rows
from moe_serve.eplb.files.sglang_dump import read_sglang, stat_trace
from moe_serve.eplb.files.tensorrt_stats import is_statistics_folder, read_tensorrt
from moe_serve.eplb.files.torch_file import MAX_TORCH_BYTES, is_torch_file, load_torch_file
from moe_serve.eplb.files.trace import ByteProgress
from moe_serve.eplb.files.vllm import is_dump, read_dumps, read_history
from moe_serve.eplb.load import LoadTrace
from moe_serve.eplb.placement import Placement
from moe_serve.eplb.rebalance.balance_log import is_balance_log
from moe_serve.errors import PlacementError, TraceError
from moe_serve.topology import Topology

EXAMPLE_TRACES = ("demo", "demo_unbalanced")
_WHOLE_JSON = 1 << 28  # 256 MiB: JSON that is not one of the streamed kinds is parsed whole up to this size

PlacementTarget = Literal["moe_serve", "sglang", "tensorrt_llm", "vllm_ascend"]
PLACEMENT_FORMAT = "moe_serve.placement"


def read_trace(
    path: str | Path,
    *,
    progress: ByteProgress | None = None,
    num_logical: int | None = None,
    max_torch_bytes: int = MAX_TORCH_BYTES,
) -> LoadTrace:
    """Returns the load trace in a file or folder, recognised by content; records are read while it is iterated.

    Ours (.npz, .jsonl, .csv), SGLang recorder dumps, TensorRT-LLM statistics, vLLM dumps and ADRS history, Megatron
    router traces, counts by name; or "example:demo", "example:demo_unbalanced", which are part of the package.
    progress: called with (done, total) while records are read.
    num_logical: experts per layer, for formats that do not say it (Megatron).
    Raises TraceError with file, line or key, what was expected and what was found.
    """
    if str(path).startswith("example:"):
        return replace(read_trace(_example(str(path)), progress=progress), source=str(path))
    path = Path(path)
    if path.is_dir():
        return _read_folder(path, progress, max_torch_bytes)
    if not path.is_file():
        raise TraceError(f"load trace {path} does not exist; give a file, a folder of dumps, or example:demo")
    with path.open("rb") as file:
        head = file.read(1 << 16)
    if not head.strip():
        raise TraceError(f"{path} is empty; expected a load trace")
    if is_torch_file(path):
        return read_sglang([path], progress, max_torch_bytes)
    if head[:2] == b"PK":
        if not trace_npz.is_trace_npz(path):
            raise TraceError(f"{path}: a zip without counts.npy; expected an .npz trace or a .pt dump")
        return trace_npz.read_npz(path, progress)
    if trace_csv.is_trace_csv(head):
        return trace_csv.read_csv(path, progress)
    if head.lstrip()[:1] in (b"{", b"["):
        return _read_json_trace(path, head, progress, num_logical)
    if is_balance_log(head):
        raise TraceError(
            f"{path} is an engine's log: it says how balanced the ranks are, not which experts are busy, so it cannot "
            f"be replayed; record expert counts (SGLang: /start_expert_distribution_record) and give that dump"
        )
    if head[:1] == b"\x80":
        raise TraceError(f"{path} is a Python pickle, which can carry code, and is refused; write it as .npz or JSON")
    raise TraceError(
        f"{path}: not a load trace; expected ours (.npz, .jsonl, .csv), an SGLang .pt dump, TensorRT-LLM statistics, "
        f"vLLM or ADRS JSON, or a Megatron router trace; found {head[:24]!r}"
    )


def read_placement(
    path: str | Path,
    num_ranks: int | None = None,
    num_logical: int | None = None,
    moe_layer_ids: Sequence[int] = (),
    *,
    num_slots: int | None = None,
    topology: Topology | None = None,
    policy: str = "refined",
    max_torch_bytes: int = MAX_TORCH_BYTES,
) -> Placement:
    """Returns the placement in a file: ours, SGLang's (json or .pt), TensorRT-LLM's YAML or a vllm-ascend map.

    num_ranks, num_logical, moe_layer_ids: of the model and system that will use it; checked against the file. None or
    empty: what the file says (SGLang and TensorRT-LLM do not say the number of ranks).
    num_slots, topology, policy: for a file that holds counts ("logical_count") instead of a placement, the placement is
    planned from them; num_slots None: one slot per expert, filled up to a multiple of the ranks.
    Raises PlacementError with the file, the key, what was expected and what was found.
    """
    path = Path(path)
    if not path.is_file():
        raise PlacementError(f"placement file {path} does not exist; give the path of a placement, or 'trivial'")
    moe_layer_ids = tuple(int(layer) for layer in moe_layer_ids)
    content = _parse(path, max_torch_bytes)

    if formats_ascend.is_expert_map(content):
        rows, devices = formats_ascend.expert_map_rows(content, path)
        table, num_logical = slot_rows(rows, path, "layer_list", num_logical)
        return make_placement(table, path, num_logical, _same_ranks(num_ranks, devices, path), moe_layer_ids)
    if formats_tensorrt.is_balancer_yaml(content):
        rows, layers = formats_tensorrt.assignment_rows(content, path)
        table, num_logical = slot_rows(rows, path, "initial_global_assignments", num_logical)
        if moe_layer_ids and layers != moe_layer_ids:
            raise PlacementError(
                f"{path}: layers {list(layers)}, expected {list(moe_layer_ids)} (the model's MoE layers)"
            )
        return make_placement(table, path, num_logical, _known_ranks(num_ranks, path), layers)
    if not isinstance(content, dict) or not content.keys() & {"physical_to_logical_map", "logical_count"}:
        found = f"keys {sorted(map(str, content))[:6]}" if isinstance(content, dict) else type(content).__name__
        raise PlacementError(
            f"{path}: not a placement; expected 'physical_to_logical_map', 'logical_count', 'layer_list' or "
            f"'initial_global_assignments', found {found}"
        )
    if "physical_to_logical_map" not in content:
        return _plan_from_counts(
            content, path, _known_ranks(num_ranks, path), num_logical, moe_layer_ids, num_slots, topology, policy
        )
    version = 0
    if content.get("format") == PLACEMENT_FORMAT:
        num_ranks = _same_ranks(num_ranks, _number(content, "num_ranks", path), path)
        stated = _number(content, "num_logical", path)
        if num_logical is not None and stated != num_logical:
            raise PlacementError(f"{path}, key num_logical: {stated} experts, expected {num_logical} (the model's)")
        num_logical = stated
        version = _number(content, "version", path)
        own_layers = tuple(content.get("moe_layer_ids") or ())
        if moe_layer_ids and own_layers and own_layers != moe_layer_ids:
            raise PlacementError(
                f"{path}, key moe_layer_ids: {list(own_layers)}, expected {list(moe_layer_ids)} "
                "(the model's MoE layers)"
            )
        moe_layer_ids = moe_layer_ids or own_layers
    table, num_logical = slot_rows(formats_sglang.location_rows(content), path, "physical_to_logical_map", num_logical)
    return make_placement(table, path, num_logical, _known_ranks(num_ranks, path), moe_layer_ids, version)


def write_placement(
    placement: Placement, path: str | Path, target: str = "moe_serve", *, num_model_layers: int | None = None
) -> None:
    """Writes a placement for an engine. target: moe_serve, sglang, tensorrt_llm or vllm_ascend.

    num_model_layers: for sglang, all layers of the model, dense ones included (None: up to the last MoE layer).
    Raises PlacementError when the target cannot say what the placement says (an empty slot).
    """
    path = Path(path)
    match target:
        case "moe_serve":
            path.write_text(json.dumps(placement_to_json(placement)) + "\n", encoding="utf-8")
        case "sglang":
            formats_sglang.write_location(placement, path, num_model_layers)
        case "tensorrt_llm":
            formats_tensorrt.write_balancer_yaml(placement, path)
        case "vllm_ascend":
            formats_ascend.write_expert_map(placement, path)
        case _:
            known = ", ".join(get_args(PlacementTarget))
            raise PlacementError(f"placement target {target!r} is not known; use one of {known}")


def placement_to_json(placement: Placement) -> dict[str, Any]:
    """Returns our placement file's content."""
    return {
        "format": PLACEMENT_FORMAT,
        "num_logical": placement.num_logical,
        "num_ranks": placement.num_ranks,
        "moe_layer_ids": list(placement.moe_layer_ids),
        "version": placement.version,
        "physical_to_logical_map": placement.physical_to_logical.tolist(),
    }


def _read_folder(path: Path, progress: ByteProgress | None, max_torch_bytes: int) -> LoadTrace:
    if is_statistics_folder(path):
        return read_tensorrt(path, progress)
    dumps = sorted(path.glob("*.pt"))
    if dumps:
        return read_sglang(dumps, progress, max_torch_bytes)
    objects = sorted([*path.glob("*.json"), *path.glob("*.jsonl")])
    if objects:
        return read_dumps(objects, progress)
    raise TraceError(
        f"folder {path}: no dumps in it; expected meta_info.json with rank*.safetensors (TensorRT-LLM), *.pt (SGLang) "
        f"or *.json (vLLM)"
    )


def _read_json_trace(path: Path, head: bytes, progress: ByteProgress | None, num_logical: int | None) -> LoadTrace:
    if b'"load_history"' in head:
        return read_history(path, progress)
    with path.open("rb") as file:
        line = file.readline(_WHOLE_JSON)
        more = bool(file.read(1 << 12).strip())
    try:
        content = msgspec.json.decode(line)
        lines = more
    except msgspec.DecodeError:  # spread over lines, or cut off
        lines = False
        if path.stat().st_size > _WHOLE_JSON:
            raise TraceError(
                f"{path}: a JSON file of {path.stat().st_size >> 20} MiB that is neither lines nor a load_history; "
                f"write it as .jsonl, one window per line"
            ) from None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as problem:
            if trace_jsonl.looks_like_ours(line):
                return trace_jsonl.read_jsonl(path, progress)
            number = getattr(problem, "lineno", "?")
            raise TraceError(f"{path} line {number}: not JSON ({problem}); is the file cut off?") from None
    if trace_jsonl.is_trace_line(content):
        return trace_jsonl.read_jsonl(path, progress)
    if is_router_line(content):
        return read_megatron(path, progress, num_logical)
    if is_dump(content) or (isinstance(content, list) and content and is_dump(content[0])):
        return read_dumps([path], progress)
    if not lines and isinstance(content, dict):
        if "logical_count" in content:
            return stat_trace(content["logical_count"], path, progress)
        if content.keys() & {"physical_to_logical_map", "layer_list"}:
            raise TraceError(f"{path} is a placement, not a load trace; give it as --current, or convert it")
        if is_named_counts(content):
            return read_named(path)
    found = f"keys {sorted(map(str, content))[:6]}" if isinstance(content, dict) else type(content).__name__
    raise TraceError(
        f"{path}: JSON, but no load trace; expected 'tokens', 'window' and 'counts', 'load_history', 'logical_count', "
        f"'logical_expert_load' or 'top_indices', found {found}"
    )


def _example(name: str) -> Path:
    wanted = name.removeprefix("example:")
    if wanted not in EXAMPLE_TRACES:
        known = ", ".join(f"example:{known}" for known in EXAMPLE_TRACES)
        raise TraceError(f"{name} is not an example trace; use one of {known}")
    return Path(__file__).parent / "example_traces" / f"{wanted}.jsonl"


def _parse(path: Path, max_torch_bytes: int) -> Any:
    if is_torch_file(path):
        return load_torch_file(path, PlacementError, max_torch_bytes)
    with path.open("rb") as file:
        first = file.read(256).lstrip()[:1]
    if first in (b"{", b"["):
        return read_json(path)
    if path.suffix in (".yaml", ".yml"):
        return formats_tensorrt.read_yaml(path)
    return read_json(path)


def _plan_from_counts(
    content: dict[str, Any],
    path: Path,
    num_ranks: int,
    num_logical: int | None,
    moe_layer_ids: tuple[int, ...],
    num_slots: int | None,
    topology: Topology | None,
    policy: str,
) -> Placement:
    counts = formats_sglang.location_counts(content, path, num_logical)
    if moe_layer_ids and len(counts) != len(moe_layer_ids):
        if len(counts) <= max(moe_layer_ids):
            raise PlacementError(
                f"{path}, key logical_count: {len(counts)} layers, expected {len(moe_layer_ids)} or at least "
                f"{max(moe_layer_ids) + 1}; are these the counts of another model?"
            )
        counts = counts[list(moe_layer_ids)]
    from moe_serve.eplb.planner import plan  # policies are heavy to import, and most files hold a placement

    slots = num_slots or -(-counts.shape[1] // num_ranks) * num_ranks
    placement = plan(counts, topology or Topology(1, num_ranks), slots, policy=policy).placement
    return Placement(placement.physical_to_logical, counts.shape[1], num_ranks, moe_layer_ids)


def _number(content: dict[str, Any], key: str, path: Path) -> int:
    value = content.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise PlacementError(f"{path}, key {key}: expected a whole number, found {value!r}")
    return value


def _same_ranks(wanted: int | None, found: int, path: Path) -> int:
    if wanted is not None and wanted != found:
        raise PlacementError(
            f"{path} places experts on {found} ranks, expected {wanted}; plan for {wanted}, or start {found} ranks"
        )
    return found


def _known_ranks(num_ranks: int | None, path: Path) -> int:
    if num_ranks is None:
        raise PlacementError(f"{path} does not say over how many ranks its slots are spread; give the number (--ranks)")
    return num_ranks
