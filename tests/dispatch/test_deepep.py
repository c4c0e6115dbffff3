"""The adapter to DeepEP against a double whose signatures are read from DeepEP's source; no GPU, not DeepEP itself.

Set MOE_SERVE_DEEPEP_SOURCE to a checkout of DeepEP, or to a git directory of it. Without one only the checks that come
before any call are tested.
"""

import ast
import inspect
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from moe_serve.dispatch import deepep
from moe_serve.dispatch.base import BufferLimits, EpGroup, MaskedRows, PackedRows
from moe_serve.errors import ConfigError
from tests.dispatch.contract import Scenario, slots_of_rows

SOURCE = os.environ.get("MOE_SERVE_DEEPEP_SOURCE", "")
needs_source = pytest.mark.skipif(not SOURCE, reason="MOE_SERVE_DEEPEP_SOURCE names no DeepEP source")
ONE = Scenario((6,), topk=3, slots_per_rank=4, hidden=256, gate="masked", dtype=torch.bfloat16)
LIMITS = BufferLimits(8, ONE.hidden, ONE.topk, ONE.slots_per_rank)
CUDA = EpGroup(0, 1, torch.device("cuda", 0))


def source(path: str) -> str:
    if (Path(SOURCE) / path).exists():
        return (Path(SOURCE) / path).read_text()
    command = ["git", "--git-dir", SOURCE, "show", f"HEAD:{path}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def signatures(path: str, name: str) -> dict[str, inspect.Signature]:
    """Returns the signature of each method of a class in DeepEP's source, without importing it."""
    tree = ast.parse(source(path))
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    result = {}
    for method in found.body:
        if isinstance(method, ast.FunctionDef):
            static = any(ast.unparse(d) == "staticmethod" for d in method.decorator_list)
            arguments = method.args.args[0 if static else 1 :]
            first_default = len(arguments) - len(method.args.defaults)
            result[method.name] = inspect.Signature(
                [
                    inspect.Parameter(
                        argument.arg,
                        inspect.Parameter.POSITIONAL_OR_KEYWORD,
                        default=None if i >= first_default else inspect.Parameter.empty,
                    )
                    for i, argument in enumerate(arguments)
                ]
            )
    return result


def double(path: str, name: str, behaviour: dict[str, Callable[..., Any]]) -> type:
    """Returns a class with DeepEP's signatures; a call that does not fit one raises TypeError as DeepEP would."""
    known = signatures(path, name)

    def method(method_name: str, static: bool = False) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = known[method_name].bind(*(args if static else args[1:]), **kwargs)
            bound.apply_defaults()
            return behaviour[method_name](SimpleNamespace(**bound.arguments))

        return staticmethod(call) if static else call

    body = {key: method(key, key.startswith("get_low_latency_rdma")) for key in behaviour if key != "__init__"}
    body["__init__"] = lambda self, *args, **kwargs: known["__init__"].bind(*args, **kwargs) and None
    return type(name, (), body)


EVENT = SimpleNamespace(current_stream_wait=lambda: None)


def low_latency_dispatch(a: SimpleNamespace) -> Any:
    capacity = a.num_max_dispatch_tokens_per_rank
    x = torch.full((a.num_experts, capacity, a.x.shape[1]), float("nan"), dtype=a.x.dtype)
    token = torch.full((a.num_experts, capacity), -1)
    counts = torch.zeros(a.num_experts, dtype=torch.int32)
    for slot in range(a.num_experts):
        rows = (a.topk_idx == slot).any(1).nonzero()[:, 0]
        x[slot, : len(rows)], token[slot, : len(rows)], counts[slot] = a.x[rows], rows, len(rows)
    received: Any = x
    if a.use_fp8:
        blocks = torch.nan_to_num(x.float()).unflatten(2, (-1, 128))
        scale = blocks.abs().amax(3).clamp(min=1e-4) / 448
        received = ((blocks / scale[..., None]).clamp(-448, 448).flatten(2).to(torch.float8_e4m3fn), scale)
    return received, counts, token, EVENT, lambda: None


def low_latency_combine(a: SimpleNamespace) -> Any:
    out = torch.zeros(a.topk_idx.shape[0], a.x.shape[2])
    for token, k in (a.topk_idx >= 0).nonzero().tolist():
        slot = a.topk_idx[token, k]
        row = (a.handle[slot] == token).nonzero()[0, 0]
        out[token] += a.topk_weights[token, k] * a.x[slot, row].float()
    return out.to(torch.bfloat16), EVENT, lambda: None


def normal_dispatch(a: SimpleNamespace) -> Any:
    sent = (a.topk_idx[:, 0] >= 0).nonzero()[:, 0]
    ids = a.topk_idx[sent]
    counts = torch.bincount(ids[:, 0], minlength=ONE.num_slots).tolist()
    return a.x[sent], ids, a.topk_weights[sent], counts, (sent, a.x.shape[0]), EVENT


def elastic_dispatch(a: SimpleNamespace) -> Any:
    assert a.do_expand
    assert a.expert_alignment == 1
    sent = (a.topk_idx[:, 0] >= 0).nonzero()[:, 0]
    order = sent[torch.sort(a.topk_idx[sent, 0], stable=True).indices]
    counts = torch.bincount(a.topk_idx[sent, 0], minlength=ONE.num_slots).tolist()
    handle = SimpleNamespace(num_recv_tokens_per_expert_list=counts, sent=(order, a.x.shape[0]))
    return a.x[order], None, None, handle, EVENT


def plain_combine(a: SimpleNamespace) -> Any:
    sent, num_tokens = a.handle if isinstance(a.handle, tuple) else a.handle.sent
    out = torch.zeros(num_tokens, a.x.shape[1], dtype=a.x.dtype)
    out[sent] = a.x
    return out, None, EVENT


def layout(a: SimpleNamespace) -> Any:
    return torch.zeros(1), None, torch.zeros(1), torch.zeros(1), EVENT


def library() -> Any:
    legacy = {
        "get_low_latency_rdma_size_hint": lambda a: 1 << 20,
        "low_latency_dispatch": low_latency_dispatch,
        "low_latency_combine": low_latency_combine,
        "get_dispatch_layout": layout,
        "dispatch": normal_dispatch,
        "combine": plain_combine,
        "destroy": lambda a: None,
    }
    elastic = {"dispatch": elastic_dispatch, "combine": plain_combine, "destroy": lambda a: None}
    return SimpleNamespace(
        Buffer=double("deep_ep/buffers/legacy.py", "Buffer", legacy),
        ElasticBuffer=double("deep_ep/buffers/elastic.py", "ElasticBuffer", elastic),
    )


def transport(mode: str, wire: str = "auto") -> deepep.DeepEpAllToAll:
    with mock.patch.object(deepep, "_load", library), mock.patch.object(deepep, "CollectiveAllToAll"):
        return deepep.make_deepep(CUDA, LIMITS, torch.bfloat16, wire, mode)


@needs_source
@pytest.mark.parametrize("mode", ["normal", "elastic"])
def test_pairs_that_travel_alone_come_home_with_our_bits(mode: str) -> None:
    ours = transport(mode)
    hidden, ids, weights = ONE.inputs(0)
    arrived = ours.dispatch(hidden, ids).wait()
    assert isinstance(arrived.rows, PackedRows)
    assert torch.equal(arrived.rows.x, ONE.expected_rows(0))
    assert torch.equal(arrived.rows.rows_per_slot, ONE.slot_counts().sum(0))
    out = ONE.expert_out(arrived.rows.x, slots_of_rows(arrived.rows, 0))
    assert torch.equal(ours.combine(out, weights, arrived.handle).wait(), ONE.expected_combined(0))
    ours.close()


def distinct(ids: Tensor) -> Tensor:
    return torch.where(ids < 0, -1, (ids[:, :1].clamp(min=0) + torch.arange(ids.shape[1])) % ONE.num_slots)


@needs_source
@pytest.mark.parametrize("wire, limit", [("auto", 4e-3), ("fp8", 4e-2)])
def test_low_latency_gives_slabs_and_adds_in_its_own_order(wire: str, limit: float) -> None:
    ours = transport("low_latency", wire)
    hidden, ids, weights = ONE.inputs(0)
    ids = distinct(ids)
    arrived = ours.dispatch(hidden, ids).wait()
    assert isinstance(arrived.rows, MaskedRows)
    assert arrived.rows.x.dtype == torch.bfloat16
    combined = ours.combine(arrived.rows.x, weights, arrived.handle).wait()
    expected = hidden.float() * weights.masked_fill(ids < 0, 0).sum(1, keepdim=True)
    assert (combined.float() - expected).norm() / expected.norm() < limit


@needs_source
def test_the_double_refuses_a_call_that_deepep_does_not_have() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'speed'"):
        library().Buffer(None).dispatch(torch.zeros(1, 1), speed="high")


def make(**changes: Any) -> Any:
    facts = {"group": CUDA, "limits": LIMITS, "dtype": torch.bfloat16, "wire_dtype": "auto", "mode": "low_latency"}
    library = changes.pop("library", SimpleNamespace(Buffer=object, ElasticBuffer=object))
    with mock.patch.object(deepep, "_load", return_value=library):
        return deepep.make_deepep(**(facts | changes))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"group": EpGroup(0, 1, torch.device("cpu"))}, "needs CUDA ranks.*set dispatch.backend: low_latency"),
        ({"dtype": torch.float32}, "set model.dtype: bfloat16"),
        ({"limits": BufferLimits(600, 256, 3, 4)}, "NVSHMEM_QP_DEPTH is 1024 and 600 tokens need 1202"),
        ({"limits": BufferLimits(8, 256, 16, 4)}, "up to 11 experts per token"),
        ({"wire_dtype": "fp8", "mode": "normal"}, "set dispatch.wire_dtype: auto"),
        ({"mode": "fast"}, "choose one of low_latency, normal, elastic"),
        ({"mode": "elastic", "library": SimpleNamespace(Buffer=object)}, "has no ElasticBuffer"),
    ],
)
def test_limits_are_checked_at_start(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**changes)


def test_without_deepep_the_error_says_what_to_install() -> None:
    with mock.patch.dict("sys.modules", {"deep_ep": None}), pytest.raises(ConfigError, match="install DeepEP from"):
        deepep.make_deepep(CUDA, LIMITS, torch.bfloat16, "auto")
