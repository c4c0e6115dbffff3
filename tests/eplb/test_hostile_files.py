"""Damaged and hostile files of every format, and any change to a valid one: the right counts, or one line of error."""

import io
import json
import os
import resource
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_serve.eplb.files.balance_log import is_balance_log, read_balance_log
from moe_serve.eplb.files.placements import read_placement
from moe_serve.eplb.files.trace_jsonl import read_events
from moe_serve.eplb.files.traces import read_trace
from moe_serve.eplb.load import DecodeCounts
from moe_serve.errors import MoeServeError, PlacementError, TraceError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@contextmanager
def little_memory(extra_mib: int = 300) -> Iterator[None]:
    """Lets the process take so much address space more, and raises MemoryError at the first allocation beyond."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + (extra_mib << 20), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def read_all(path: Path, extra_mib: int = 300) -> list[Any]:
    with little_memory(extra_mib):
        return [record.tokens.tolist() for record in read_trace(path)]


def test_errors_of_files_are_value_errors_too() -> None:
    assert issubclass(TraceError, ValueError)
    assert issubclass(PlacementError, ValueError)


DEEP = "[" * 200_000


@pytest.mark.parametrize(
    "name, text",
    [
        ("t.json", DEEP),
        ("t.json", DEEP + "]" * 200_000),
        ("t.json", '{"a":' * 200_000),
        ("t.json", '{"logical_count": ' + DEEP),
        ("t.json", '{"code": ' + DEEP + "]" * 200_000 + "}"),
        ("t.json", '{"load_history": [' + DEEP + "]" * 200_000 + "]}"),
        ("t.jsonl", '{"first_step": 0, "tokens": ' + DEEP + "]" * 200_000 + "}"),
        ("t.jsonl", '{"layer": 0, "top_indices": [[0]]}\n{"layer": 0, "top_indices": ' + DEEP + "]" * 200_000 + "}"),
        ("t.csv", "# {" + '"a": ' + DEEP[:30_000] + "\nwindow,layer,expert,count\n0,0,0,x\n"),
    ],
)
def test_deep_nesting_is_one_clear_line(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(TraceError, match=r"nested too deeply|found '0,0,0,x'") as trace_error:
        read_all(tmp_path / name)
    assert len(str(trace_error.value)) < 400
    if name == "t.json":
        with pytest.raises(PlacementError, match="nested too deeply") as placement_error:
            read_placement(tmp_path / name, 2)
        assert len(str(placement_error.value)) < 400


def npz_with(name: str, header: dict[str, Any], body: bytes = b"", others: dict[str, bytes] | None = None) -> bytes:
    """Returns an .npz with one .npy member of this header, whatever it claims, and other members as they are."""
    member = io.BytesIO()
    np.lib.format.write_array_header_1_0(member, header)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr(f"{name}.npy", member.getvalue() + body)
        for other, content in (others or {}).items():
            archive.writestr(other, content)
    return out.getvalue()


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


COUNTS = {"counts.npy": npy(np.ones((1, 2, 4), dtype=np.int64))}


@pytest.mark.parametrize(
    "content, says",
    [
        (npz_with("counts", {"descr": "<i8", "fortran_order": False, "shape": (1, 1000, 350_000)}), "is 2800000000 by"),
        (npz_with("counts", {"descr": "<i8", "fortran_order": False, "shape": (10**9, 58, 256)}), "found 0"),
        (npz_with("counts", {"descr": "<i8", "fortran_order": False, "shape": (10**12, 0, 4)}), "expected .records"),
        (npz_with("counts", {"descr": "<i8", "fortran_order": False, "shape": (-1, -2, 4)}), "damaged"),
        (npz_with("meta", {"descr": "<U700000000", "fortran_order": False, "shape": ()}, others=COUNTS), "key meta"),
        (
            npz_with("meta", {"descr": "<U1", "fortran_order": False, "shape": (3,)}, b"\0" * 12, COUNTS),
            "expected JSON",
        ),
        (
            npz_with("num_steps", {"descr": "<U1", "fortran_order": False, "shape": (1,)}, b"x\0\0\0", COUNTS),
            "record 0",
        ),
        (npz_with("first_step", {"descr": "<f8", "fortran_order": False, "shape": (1,)}, b"\xff" * 8, COUNTS), "NaN"),
        (
            npz_with("counts", {"descr": "<i8", "fortran_order": False, "shape": (1, 1, 1 << 24)}, b"\0" * (1 << 27)),
            "layers x 16777216 experts, expected at most",
        ),
    ],
    ids=["row", "rows", "none", "below", "meta", "list", "text", "nan", "bomb"],
)
def test_an_npz_that_claims_more_than_it_holds_is_refused_before_memory_is_taken(
    tmp_path: Path, content: bytes, says: str
) -> None:
    (tmp_path / "t.npz").write_bytes(content)
    with pytest.raises(TraceError, match=says):
        read_all(tmp_path / "t.npz", extra_mib=64)


@pytest.mark.parametrize(
    "name, text",
    [
        ("t.csv", f"window,layer,expert,count\n0,0,{2**40},1\n"),
        ("t.csv", "window,layer,expert,count\n0,-3,0,1\n"),
        ("t.jsonl", '{"layer": 0, "top_indices": [[1099511627776]]}\n'),
        ("t.jsonl", '{"layer": 0, "rank": 1099511627776, "top_indices": [[1]]}\n'),
        ("t.json", '{"physical_expert_load": [[1, 2]], "physical_to_logical_map": [[0, 1099511627776]]}'),
        ("t.jsonl", '{"format": "moe_serve.trace", "num_logical": 1099511627776, "moe_layer_ids": [0]}\n'),
        ("t.jsonl", '{"format": "moe_serve.trace", "num_logical": 4, "moe_layer_ids": [1, 1]}\n'),
        ("t.json", '{"logical_count": [[' + "1" * 5000 + "]]}"),
        ("t.jsonl", '{"first_step": 0, "tokens": [[1]], "step_time_s": "x"}'),
        ("t.jsonl", '{"first_step": 1e300, "tokens": [[1]]}'),
        ("t.json", '{"logical_expert_load": [[1, 99999999999999999999999]]}'),
    ],
)
def test_huge_and_wrong_numbers_are_refused_before_memory_is_taken(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(TraceError, match=r"t\.jsonl?|t\.csv"):
        read_all(tmp_path / name)


@pytest.mark.parametrize(
    "content",
    [
        {"format": "moe_serve.placement", "num_logical": 10**12, "num_ranks": 1, "version": 0},
        {"format": "moe_serve.placement", "num_logical": 2, "num_ranks": 0, "version": 0},
        {"format": "moe_serve.placement", "num_logical": 2, "num_ranks": 1, "version": 0, "moe_layer_ids": 3},
        {"format": "moe_serve.placement", "num_logical": 2, "num_ranks": 1, "version": 0, "moe_layer_ids": [10**12]},
    ],
)
def test_a_placement_with_odd_sizes_is_refused(tmp_path: Path, content: dict[str, Any]) -> None:
    (tmp_path / "p.json").write_text(json.dumps(content | {"physical_to_logical_map": [[0, 1]]}))
    with pytest.raises(PlacementError, match=r"p\.json"), little_memory():
        read_placement(tmp_path / "p.json")
    (tmp_path / "p.json").write_text('{"physical_to_logical_map": [[0, 2147483647]]}')
    with pytest.raises(PlacementError, match=r"2 slots in key .* for 2147483648 experts"), little_memory():
        read_placement(tmp_path / "p.json", 2)


@pytest.mark.parametrize(
    "name, text, says",
    [
        ("p.yaml", "num_slots: 2\ninitial_global_assignments: {0: [0, 1\x0b]}\n", "not YAML text"),
        (
            "p.yaml",
            "a: &a ["
            + "0," * 6000
            + "]\ninitial_global_assignments: {"
            + ", ".join(f"{i}: *a" for i in range(6000))
            + "}",
            "6000 layers x 6000 slots; no model",
        ),
        ("p.json", '{"layer_list": [{"layer_id": 0, "device_list": [3]}]}', "expected objects with device_id"),
        ("p.json", '{"layer_list": [{"device_list": [{"device_id": []}, {"device_id": 1}]}]}', "expected objects with"),
    ],
)
def test_a_placement_of_odd_things_is_refused(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(PlacementError, match=says), little_memory():
        read_placement(tmp_path / name, 1)


@pytest.mark.parametrize(
    "event", [{"event": "plan_ready"}, {"event": "plan_ready", "step": []}, {"event": 3, "step": 4}]
)
def test_an_event_without_a_step_names_its_line(tmp_path: Path, event: dict[str, Any]) -> None:
    (tmp_path / "t.jsonl").write_text('{"first_step": 0, "tokens": [[1, 2]]}\n' + json.dumps(event))
    with pytest.raises(TraceError, match="line 2: expected an event's name and its step"):
        list(read_events(tmp_path / "t.jsonl"))


def test_npy_counts_are_a_trace(tmp_path: Path) -> None:
    counts = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    np.save(tmp_path / "t.npy", counts)
    assert read_all(tmp_path / "t.npy") == counts.tolist()
    np.save(tmp_path / "t.npy", counts[1])
    assert read_all(tmp_path / "t.npy") == [counts[1].tolist()]


@pytest.mark.parametrize(
    "array, says",
    [
        (np.ones(3), "shape .3. of float64, expected counts"),
        (np.full((1, 2, 2), 0.5), "record 0: .*fractions"),
        (np.array([[["a"]]], dtype=object), "not a complete .npy of numbers"),
        (np.zeros((2, 0, 4)), "expected counts"),
        (np.zeros((1, 1, 70_000)), "70000 experts, expected at most"),
    ],
)
def test_an_npy_without_counts_says_what_it_holds(tmp_path: Path, array: np.ndarray, says: str) -> None:
    np.save(tmp_path / "t.npy", array, allow_pickle=True)
    with pytest.raises(TraceError, match=says):
        read_all(tmp_path / "t.npy")


def test_a_cut_off_npy_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.npy").write_bytes(npy(np.ones((1, 3, 4))).replace(b"), }", b"(({ ", 1))
    with pytest.raises(TraceError, match=r"not a complete \.npy"):
        read_all(tmp_path / "t.npy")
    (tmp_path / "t.npy").write_bytes(npy(np.ones((100, 3, 4)))[:-8])
    with pytest.raises(TraceError, match=r"not a complete \.npy"):
        read_all(tmp_path / "t.npy")


@pytest.mark.parametrize(
    "name, text, counts",
    [
        ("t.json", '{"logical_expert_load": [[1, 2]]}', [[[1, 2]]]),
        ("t.json", '{\n"code": [[1, 2]]}', [[[1, 2]]]),
        (
            "t.jsonl",
            '{"first_step": 0, "tokens": [[1, 2]]}\n{"first_step": 1, "tokens": [[3, 4]]}',
            [[[1, 2]], [[3, 4]]],
        ),
        ("t.csv", "window,layer,expert,count\n0,0,0,1\n0,0,1,2\n", [[[1, 2]]]),
        ("t.json", '{"load_history": [{"logical_expert_load": [[1, 2]]}]}', [[[1, 2]]]),
    ],
)
def test_a_byte_order_mark_is_skipped_and_utf16_is_named(tmp_path: Path, name: str, text: str, counts: Any) -> None:
    (tmp_path / name).write_bytes(BYTE_ORDER_MARK + text.encode())
    assert read_all(tmp_path / name) == counts
    (tmp_path / name).write_bytes(text.encode("utf-16"))
    with pytest.raises(TraceError, match="UTF-16 text; save it as UTF-8"):
        read_all(tmp_path / name)


def test_a_byte_order_mark_before_a_placement_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_bytes(BYTE_ORDER_MARK + b'{"physical_to_logical_map": [[0, 1]]}')
    assert read_placement(tmp_path / "p.json", 2).num_slots == 2
    (tmp_path / "p.json").write_bytes('{"physical_to_logical_map": [[0, 1]]}'.encode("utf-16"))
    with pytest.raises(PlacementError, match="UTF-16"):
        read_placement(tmp_path / "p.json", 2)


def test_fractions_in_the_plain_form_are_refused_not_cut_off(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"window": 0, "layer": 0, "counts": [1, 2.5]}')
    with pytest.raises(TraceError, match=r"line 1, key counts: expected whole numbers, found 2\.5"):
        read_all(tmp_path / "t.jsonl")


@pytest.mark.parametrize("name", ["logical_expert_load", "code"])
def test_fractions_are_refused_not_rounded(tmp_path: Path, name: str) -> None:
    (tmp_path / "t.json").write_text(json.dumps({name: [[1.0, 2.5]]}))
    with pytest.raises(TraceError, match=rf"key {name}: expected whole numbers, found 2.5; a mean is not a count"):
        read_all(tmp_path / "t.json")
    (tmp_path / "t.json").write_text(json.dumps({name: [[1.0, 2.0]]}))
    assert read_all(tmp_path / "t.json") == [[[1, 2]]]


SGLANG_LOG = """[2026-08-20 10:00:00 TP0] server_args=ServerArgs(model_path='m')
{noise}[2026-08-20 10:00:09 TP0] [Expert Balancedness] forward_pass_id=20 current_pass_balancedness=0.400 \
last_10_average_balancedness=0.500 last_100_average_balancedness=0.450 gpu_physical_count_sum=40
"""
VLLM_LOG = """INFO 08-20 10:00:00 [core.py:58] Initializing a V1 LLM engine
{noise}(EngineCore_DP0 pid=9) INFO 08-20 10:00:09 [eplb_state.py:635] EPLB step: 100 for model deepseek-r1: \
avg_tokens=812.50, max_tokens=1500, balancedness=0.5417, steps until the next rearrangement: 2900
"""


@pytest.mark.parametrize("log", [SGLANG_LOG, VLLM_LOG], ids=["sglang", "vllm"])
@pytest.mark.parametrize("noise", [0, 40_000], ids=["at once", "after 2 MB of other lines"])
def test_an_engines_own_log_is_known_wherever_its_first_line_stands(tmp_path: Path, log: str, noise: int) -> None:
    path = tmp_path / "server.log"
    path.write_text(log.format(noise="[2026-08-20 10:00:01 TP0] Load weight begin. avail mem\n" * noise))
    assert is_balance_log(path)
    assert len(list(read_balance_log(path))) == 1
    with pytest.raises(TraceError, match=r"is an engine's log: .* cannot be replayed"):
        read_trace(path)


def test_a_line_of_a_log_without_end_needs_no_memory(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text("EPLB step: 1 for model balancedness=" * 20_000)
    assert not is_balance_log(tmp_path / "server.log")


def test_pipes_and_loops_are_never_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    with pytest.raises(TraceError, match="no dumps in it"):
        read_trace(tmp_path)
    for name in ("pipe.pt", "loop.jsonl", "x" * 5000):
        with pytest.raises(TraceError, match="does not exist"):
            read_trace(tmp_path / name)
        with pytest.raises(PlacementError, match="does not exist"):
            read_placement(tmp_path / name)
    (tmp_path / "meta_info.json").write_text('{"num_experts": 4}')
    os.mkfifo(tmp_path / "rank0.safetensors")
    with pytest.raises(TraceError, match=r"no rank\*.safetensors"):
        read_trace(tmp_path)


ROUTED = {"step": 0, "layer": 0, "rank": 0, "num_tokens": 2, "topk": 2, "top_indices": [[0, 1], [2, 3]]}
RECORD = {"first_step": 0, "num_steps": 2, "phase": "decode", "tokens": [[1, 2, 3, 4]], "step_time_s": 0.1,
          "num_forwards": 2, "num_ranks": 2, "physical_to_logical_map": [[0, 1, 2, 3]], "activations": [[1, 1, 1, 2]],
          "by_source": [[[1, 1, 1, 2], [0, 1, 2, 2]]], "decodes": DecodeCounts().to_json()}  # fmt: skip
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
