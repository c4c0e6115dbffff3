"""Any change to a valid file, in its bytes or its JSON, gives a trace, a placement or one error of ours."""

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_serve.eplb.files.placements import read_placement
from moe_serve.eplb.files.traces import read_trace
from moe_serve.errors import MoeServeError
from tests.eplb.test_hostile_files import little_memory

ROUTED = {"step": 0, "layer": 0, "rank": 0, "num_tokens": 2, "topk": 2, "top_indices": [[0, 1], [2, 3]]}
RECORD = {"first_step": 0, "num_steps": 2, "phase": "decode", "tokens": [[1, 2, 3, 4]], "step_time_s": 0.1,
          "num_forwards": 2, "num_ranks": 2, "physical_to_logical_map": [[0, 1, 2, 3]], "activations": [[1, 1, 1, 2]],
          "by_source": [[[1, 1, 1, 2], [0, 1, 2, 2]]]}  # fmt: skip
TEXTS: dict[str, Any] = {
    "record.jsonl": RECORD,
    "window.jsonl": {"window": 0, "layer": 0, "counts": [1, 2, 3, 4]},
    "routed.jsonl": ROUTED,
    "vllm.json": [{"physical_expert_load": [[1, 2, 3, 4]], "physical_to_logical_map": [[0, 1, 2, 0]], "step": 3}],
    "history.json": {"load_history": [{"logical_expert_load": [[1, 2, 3, 4]]}]},
    "named.json": {"code": [[1, 2, 3, 4]], "docs": [[3, 4, 1, 1]]},
    "ours.json": {"format": "moe_serve.placement", "num_logical": 2, "num_ranks": 2, "moe_layer_ids": [1],
                  "version": 0, "physical_to_logical_map": [[0, 1]]},
    "ascend.json": {"moe_layer_count": 1, "layer_list": [{"layer_id": 0, "device_count": 1, "device_list": [
        {"device_id": 0, "device_expert": [0, 1]}]}]},
}  # fmt: skip
ODD: list[Any] = [
    0,
    -1,
    True,
    2**31,
    2**53 + 1,
    2**64,
    10**30,
    1e300,
    0.5,
    None,
    "",
    "x",
    [],
    {},
    [[]],
    [None],
    float("nan"),
]


@cache
def binary_files() -> dict[str, bytes]:
    dump = {
        "records": [{"forward_pass_id": 0, "rank": 0, "global_physical_count": torch.ones(2, 4, dtype=torch.int32)}],
        "last_physical_to_logical_map": torch.tensor([[0, 1, 2, 3]] * 2),
    }
    files = {"t.npz": io.BytesIO(), "t.npy": io.BytesIO(), "t.pt": io.BytesIO()}
    np.savez(files["t.npz"], counts=np.ones((2, 2, 4)), meta=np.array('{"num_logical": 4, "moe_layer_ids": [0, 1]}'))
    np.save(files["t.npy"], np.ones((2, 2, 4), dtype=np.int64))
    torch.save(dump, files["t.pt"])
    return {name: file.getvalue() for name, file in files.items()}


def changed(value: Any, data: st.DataObject) -> Any:
    """Returns JSON with one thing in it taken away, doubled or replaced."""
    if not isinstance(value, dict | list) or not value or data.draw(st.integers(0, 5)) == 0:
        return data.draw(st.sampled_from(ODD))
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = data.draw(st.sampled_from(keys))
    copy = value.copy()
    action = data.draw(st.sampled_from(["into", "into", "into", "away", "twice"]))
    if action == "away":
        del copy[key]
    elif action == "twice" and isinstance(copy, list):
        copy.insert(key, copy[key])
    else:
        copy[key] = changed(value[key], data)
    return copy


def read_or_refuse(path: Path) -> None:
    with little_memory(1000):
        for read in (lambda: list(read_trace(path)), lambda: read_placement(path, 2)):
            refusal = ""
            try:
                read()
            except MoeServeError as error:
                refusal = str(error)
            assert len(refusal) < 1500
            assert "\n" not in refusal


quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("name", TEXTS)
@quick
@given(data=st.data())
def test_changed_json_is_read_or_refused(tmp_path: Path, name: str, data: st.DataObject) -> None:
    lines = [json.dumps(TEXTS[name])] if data.draw(st.booleans()) else []
    lines.append(json.dumps(changed(TEXTS[name], data)))
    (tmp_path / name).write_text("\n".join(lines) + "\n")
    read_or_refuse(tmp_path / name)


@pytest.mark.parametrize("name", ["t.npz", "t.npy", "t.pt"])
@quick
@given(data=st.data())
def test_changed_bytes_are_read_or_refused(tmp_path: Path, name: str, data: st.DataObject) -> None:
    content = bytearray(binary_files()[name])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    (tmp_path / name).write_bytes(bytes(content[: data.draw(st.integers(1, len(content)))]))
    read_or_refuse(tmp_path / name)
