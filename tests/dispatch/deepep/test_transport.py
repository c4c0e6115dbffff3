"""The adapter to DeepEP against a double whose signatures are read from DeepEP's source; no GPU, not DeepEP itself.

Set DEEPEP_SOURCE to a checkout of DeepEP, or to a git directory of it. Without one only the checks that come before any
call are tested. The double moves rows in plain torch between gloo ranks, as DeepEP's documentation says it does.
"""

import ast
import inspect
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_serve.dispatch.base import BufferLimits, EpGroup, MaskedRows, PackedRows, TransportRequest
from moe_serve.dispatch.deepep import checks as deepep_checks
from moe_serve.dispatch.deepep import transport as deepep
from moe_serve.dispatch.deepep.checks import LOW_LATENCY_HIDDEN, LOW_LATENCY_TOPK, NORMAL_RANKS, Machine, look
from moe_serve.errors import CapacityError, ConfigError
from tests.dispatch.contract import Scenario, slots_of_rows
from tests.ranks import run_ranks
from tests.tolerance import BFLOAT16, FP8_WIRE

SOURCE = os.environ.get("DEEPEP_SOURCE", "")
needs_source = pytest.mark.skipif(not SOURCE, reason="DEEPEP_SOURCE names no DeepEP source")
HIDDEN = 2048  # the smallest for which DeepEP's low-latency kernels are compiled
LIMITS = BufferLimits(8, HIDDEN, 3, 4)
CUDA = EpGroup(0, 2, torch.device("cuda", 0), mock.Mock())
CASES = {
    "uneven": Scenario((6, 3, 8, 1), topk=3, slots_per_rank=4, hidden=HIDDEN, dtype=torch.bfloat16),
    "with -1": Scenario((6, 3, 8, 1), topk=3, slots_per_rank=4, hidden=HIDDEN, gate="masked", dtype=torch.bfloat16),
    "all -1": Scenario((6, 3, 8, 1), topk=3, slots_per_rank=4, hidden=HIDDEN, gate="none", dtype=torch.bfloat16),
    "one slot": Scenario((6, 3, 8, 1), topk=3, slots_per_rank=4, hidden=HIDDEN, gate="one_slot", dtype=torch.bfloat16),
    "idle ranks": Scenario((0, 5, 0, 2), topk=3, slots_per_rank=4, hidden=HIDDEN, dtype=torch.bfloat16),
    "nobody": Scenario((0, 0, 0, 0), topk=3, slots_per_rank=4, hidden=HIDDEN, dtype=torch.bfloat16),
}


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

    def method(method_name: str, static: bool) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = known[method_name].bind(*(args if static else args[1:]), **kwargs)
            bound.apply_defaults()
            own = {} if static else {"group": args[0].group}
            return behaviour[method_name](SimpleNamespace(**own, **bound.arguments))

        call.__signature__ = known[method_name]  # type: ignore[attr-defined]
        return staticmethod(call) if static else call

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        self.group = known["__init__"].bind(*args, **kwargs).arguments["group"]

    return type(name, (), {key: method(key, key.startswith("get_") and "layout" not in key) for key in behaviour}
                | {"__init__": init})  # fmt: skip


EVENT = SimpleNamespace(current_stream_wait=lambda: None)


def gather(a: SimpleNamespace, value: Any) -> list[Any]:
    values = [None] * a.group.size()
    dist.all_gather_object(values, value, a.group)
    return values


def local_slots(a: SimpleNamespace, num_slots: int) -> range:
    per_rank = num_slots // a.group.size()
    return range(a.group.rank() * per_rank, (a.group.rank() + 1) * per_rank)


def low_latency_dispatch(a: SimpleNamespace) -> Any:
    sent, slots = gather(a, (a.x, a.topk_idx)), local_slots(a, a.num_experts)
    capacity = a.num_max_dispatch_tokens_per_rank * len(sent)
    x = torch.full((len(slots), capacity, a.x.shape[1]), float("nan"), dtype=a.x.dtype)
    counts = torch.zeros(len(slots), dtype=torch.int32)
    origin: dict[tuple[int, int, int], tuple[int, int]] = {}
    for here, slot in enumerate(slots):
        for source, (rows, ids) in enumerate(sent):
            for token in (ids == slot).any(1).nonzero()[:, 0].tolist():
                x[here, counts[here]] = rows[token]
                origin[source, token, slot] = (here, int(counts[here]))
                counts[here] += 1
    received: Any = x
    if a.use_fp8:
        blocks = torch.nan_to_num(x.float()).unflatten(2, (-1, 128))
        scale = blocks.abs().amax(3).clamp(min=1e-4) / 448
        received = ((blocks / scale[..., None]).clamp(-448, 448).flatten(2).to(torch.float8_e4m3fn), scale)
    return received, counts, origin, EVENT, lambda: None


def low_latency_combine(a: SimpleNamespace) -> Any:
    assert a.topk_weights.isfinite().all(), "the weight of -1 is ours to hide"
    results: dict[tuple[int, int, int], Tensor] = {}
    for part in gather(a, {key: a.x[at].clone() for key, at in a.handle.items()}):
        results |= part
    out = torch.zeros(a.topk_idx.shape[0], a.x.shape[2])
    for token, k in (a.topk_idx >= 0).nonzero().tolist()[::-1]:  # an order of its own
        out[token] += a.topk_weights[token, k] * results[a.group.rank(), token, int(a.topk_idx[token, k])].float()
    return out.to(torch.bfloat16), EVENT, lambda: None


def arrivals(a: SimpleNamespace, num_slots: int) -> tuple[Tensor, Tensor, list[tuple[int, int]]]:
    """Returns one row for each (source, token) that wants this rank, its local ids, and which it is."""
    slots = local_slots(a, num_slots)
    rows, ids, origin = [a.x[:0]], [a.topk_idx[:0]], []
    for source, (x, wanted) in enumerate(gather(a, (a.x, a.topk_idx))):
        local = torch.where((wanted >= slots.start) & (wanted < slots.stop), wanted - slots.start, -1)
        tokens = (local >= 0).any(1).nonzero()[:, 0]
        rows.append(x[tokens])
        ids.append(local[tokens])
        origin += [(source, token) for token in tokens.tolist()]
    return torch.cat(rows), torch.cat(ids), origin


def layout(a: SimpleNamespace) -> Any:
    return a.num_experts, None, a.num_experts, a.num_experts, EVENT


def normal_dispatch(a: SimpleNamespace) -> Any:
    assert (a.num_tokens_per_rank, a.is_token_in_rank) == (a.num_tokens_per_expert,) * 2, "the layout is handed on"
    num_slots = a.num_tokens_per_expert
    x, ids, origin = arrivals(a, num_slots)
    counts = torch.bincount(ids[ids >= 0], minlength=num_slots // a.group.size()).tolist()
    return x, ids, torch.ones(ids.shape), counts, (origin, a.x.shape[0]), EVENT


def elastic_dispatch(a: SimpleNamespace) -> Any:
    assert a.do_expand
    assert a.expert_alignment == 1
    x, ids, origin = arrivals(a, a.num_experts)
    pairs = sorted((slot, row) for row, mine in enumerate(ids.tolist()) for slot in mine if slot >= 0)
    counts = torch.bincount(ids[ids >= 0], minlength=a.num_experts // a.group.size()).tolist()
    handle = SimpleNamespace(num_recv_tokens_per_expert_list=counts, sent=([origin[r] for _, r in pairs], len(a.x)))
    return x[[r for _, r in pairs]], None, None, handle, EVENT


def plain_combine(a: SimpleNamespace) -> Any:
    origin, num_tokens = a.handle if isinstance(a.handle, tuple) else a.handle.sent
    assert len(origin) == len(a.x)
    out = torch.zeros(num_tokens, a.x.shape[1])
    for rows, origins in gather(a, (a.x, origin)):
        for row, (source, token) in zip(rows, origins, strict=True):
            if source == a.group.rank():
                out[token] += row.float()
    return out.to(a.x.dtype), None, EVENT


def tuned(a: SimpleNamespace) -> Any:
    return SimpleNamespace(get_nvl_buffer_size_hint=lambda b, r: b * r, get_rdma_buffer_size_hint=lambda b, r: 0)


def library() -> Any:
    legacy = {
        "get_low_latency_rdma_size_hint": lambda a: a.num_experts * a.hidden,
        "low_latency_dispatch": low_latency_dispatch,
        "low_latency_combine": low_latency_combine,
        "get_dispatch_config": tuned,
        "get_combine_config": tuned,
        "get_dispatch_layout": layout,
        "dispatch": normal_dispatch,
        "combine": plain_combine,
        "destroy": lambda a: None,
    }
    elastic = {"dispatch": elastic_dispatch, "combine": plain_combine, "destroy": lambda a: None}
    return SimpleNamespace(
        Buffer=double("deep_ep/buffers/legacy.py", "Buffer", legacy),
        ElasticBuffer=double("deep_ep/buffers/elastic.py", "ElasticBuffer", elastic),
        __version__="2.1.0",
    )


def transport(group: EpGroup, mode: str, wire: str = "auto") -> Any:
    with (
        mock.patch.object(deepep, "_load", library),
        mock.patch.object(deepep, "look", return_value=Machine()),
        mock.patch.object(deepep, "choose_mode", return_value=mode),
    ):
        request = TransportRequest("deepep", LIMITS, torch.bfloat16, wire)
        return deepep.make_deepep(replace(group, device=torch.device("cuda", 0)), request)


def on_ranks(name: str, num_ranks: int) -> Scenario:
    return replace(CASES[name], tokens=CASES[name].tokens[:num_ranks])


def check_packed(rank: int, group: EpGroup, mode: str, num_ranks: int) -> None:
    ours = transport(group, mode)
    assert ours.capabilities.bitwise
    for name in CASES:
        one = on_ranks(name, num_ranks)
        hidden, ids, weights = one.inputs(rank)
        arrived = ours.dispatch(hidden, ids).wait()
        assert isinstance(arrived.rows, PackedRows)
        assert torch.equal(arrived.rows.x, one.expected_rows(rank)), name
        mine = one.slot_counts().sum(0)[rank * 4 : rank * 4 + 4]
        assert torch.equal(arrived.rows.rows_per_slot, mine), name
        out = one.expert_out(arrived.rows.x, slots_of_rows(arrived.rows, rank))
        assert torch.equal(ours.combine(out, weights, arrived.handle).wait(), one.expected_combined(rank)), name
    counts = ours.exchange_counts(torch.tensor([rank, 7])).wait()
    assert counts.tolist() == [[r, 7] for r in range(num_ranks)]
    ours.close()


@needs_source
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("mode", ["normal", "elastic"])
def test_pairs_that_travel_alone_come_home_with_our_bits(mode: str, num_ranks: int) -> None:
    run_ranks(num_ranks, check_packed, mode, num_ranks)


def distinct(ids: Tensor, num_slots: int) -> Tensor:
    """A token names a slot once, as low-latency slabs want it."""
    return torch.where(ids < 0, -1, (ids[:, :1].clamp(min=0) + 5 * torch.arange(ids.shape[1])) % num_slots)


def check_slabs(rank: int, group: EpGroup, wire: str, limit: float, num_ranks: int) -> None:
    ours = transport(group, "low_latency", wire)
    assert not ours.capabilities.bitwise
    assert "bits may differ" in ours.note
    for name in CASES:
        one = on_ranks(name, num_ranks)
        hidden, ids, weights = one.inputs(rank)
        ids = distinct(ids, one.num_slots)
        arrived = ours.dispatch(hidden, ids).wait()
        assert isinstance(arrived.rows, MaskedRows)
        assert arrived.rows.x.shape == (4, 8 * num_ranks, HIDDEN)
        assert arrived.rows.x.dtype == torch.bfloat16
        everybody = torch.cat([distinct(one.inputs(r)[1], one.num_slots) for r in range(num_ranks)])
        mine = torch.bincount(everybody[everybody >= 0], minlength=one.num_slots)[rank * 4 : rank * 4 + 4]
        assert torch.equal(arrived.rows.rows_per_slot, mine), name
        out = arrived.rows.x * torch.arange(1, 5)[:, None, None] * 0.5 ** (rank % 2)
        combined = ours.combine(out, weights, arrived.handle).wait()
        factor = (ids % 4 + 1) * 0.5 ** ((ids // 4) % 2)  # what slot and rank have made of the row
        expected = hidden.float() * (weights * factor).masked_fill(ids < 0, 0).sum(1, keepdim=True)
        assert combined.shape == expected.shape
        assert (combined.float() - expected).norm() <= limit * expected.norm(), name
    ours.close()


@needs_source
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("wire, limit", [("auto", BFLOAT16), ("fp8", FP8_WIRE)])
def test_low_latency_gives_slabs_and_adds_in_its_own_order(wire: str, limit: float, num_ranks: int) -> None:
    run_ranks(num_ranks, check_slabs, wire, limit, num_ranks)


@needs_source
def test_the_double_refuses_a_call_that_deepep_does_not_have() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'speed'"):
        library().Buffer(None).dispatch(torch.zeros(1, 1), speed="high")


@needs_source
def test_the_limits_are_those_of_the_source() -> None:
    switch = source("csrc/kernels/legacy/launch.cuh").split("define SWITCH_HIDDEN")[1].split("default:")[0]
    assert tuple(map(int, re.findall(r"case (\d+):", switch))) == LOW_LATENCY_HIDDEN
    kernels = source("csrc/kernels/legacy/internode_ll.cu")
    assert set(re.findall(r"kNumMaxTop[kK] = (\d+);", kernels)) == {str(LOW_LATENCY_TOPK)}
    table = source("deep_ep/buffers/legacy.py").split("config_map = {")[1].split("}")[0]
    assert tuple(map(int, re.findall(r"(\d+): Config", table))) == NORMAL_RANKS
    version = re.search(r"__version__ = '(.*)'", source("deep_ep/__init__.py"))
    assert version is not None
    assert version[1] in inspect.getsource(deepep_checks), "the release that the adapter is written for"


def make(**changes: Any) -> Any:
    library = changes.pop("library", SimpleNamespace(Buffer=object, ElasticBuffer=object))
    machine, mode = changes.pop("machine", Machine()), changes.pop("mode", "low_latency")
    group = changes.pop("group", CUDA)
    with (
        mock.patch.object(deepep, "_load", return_value=library),
        mock.patch.object(deepep, "look", return_value=machine),
        mock.patch.object(deepep, "choose_mode", return_value=mode),
    ):
        return deepep.make_deepep(group, replace(TransportRequest("deepep", LIMITS, torch.bfloat16), **changes))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"dtype": torch.float32}, "set model.dtype: bfloat16"),
        ({"limits": BufferLimits(600, 256, 3, 4)}, "NVSHMEM_QP_DEPTH is 1024 and 600 tokens need 1202"),
        ({"limits": BufferLimits(8, 256, 16, 4)}, "up to 11 experts per token"),
        ({"wire_dtype": "fp8", "mode": "normal"}, "set dispatch.wire_dtype: auto"),
        ({"mode": "elastic", "library": SimpleNamespace(Buffer=object)}, "has no ElasticBuffer"),
        ({"library": SimpleNamespace(Buffer=object, __version__="0.9")}, "DeepEP 0.9 has no Buffer.get_low_latency"),
        ({"limits": BufferLimits(8, 2000, 3, 4)}, "compiled for hidden 2048, .* this model has 2000"),
        ({"mode": "normal", "group": replace(CUDA, num_ranks=3)}, "tuned for 2, 4, 8, .* here are 3"),
        ({"mode": "normal", "limits": BufferLimits(8, 1000, 3, 4)}, "multiple of 16 here, it is 1000"),
        ({"mode": "elastic", "limits": BufferLimits(8, 1001, 3, 4)}, "multiple of 16 bytes, hidden is 1001"),
        ({"group": replace(CUDA, num_ranks=1, process_group=None)}, "set dispatch.backend: local"),
        ({"machine": Machine(num_hosts=2)}, "on 2 hosts, .* mlx5 device, here is none"),
        ({"machine": Machine(cut_off=((0, 3),))}, "GPUs 0 and 3 cannot reach"),
        ({"mode": "elastic", "wire_dtype": "fp8"}, "fp8 rows here in low_latency .* this is elastic"),
    ],
)
def test_limits_are_checked_at_start(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**changes)


def test_without_deepep_the_error_says_what_to_install() -> None:
    with mock.patch.dict("sys.modules", {"deep_ep": None}), pytest.raises(ConfigError, match="install DeepEP from"):
        deepep.make_deepep(CUDA, TransportRequest("deepep", LIMITS, torch.bfloat16))


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError, match=r"set model.dtype: bfloat16.*up to 11 experts.*this model has 100;"):
        make(dtype=torch.float32, limits=BufferLimits(8, 100, 16, 4))


def test_buffers_that_deepep_cannot_count_are_refused() -> None:
    buffer = SimpleNamespace(get_low_latency_rdma_size_hint=lambda *_: 1 << 36)
    with pytest.raises(CapacityError, match=r"64\.0 GiB for 8 tokens, it can count 32"):
        deepep.DeepEpAllToAll(CUDA, LIMITS, False, "low_latency", SimpleNamespace(Buffer=buffer))  # type: ignore[arg-type]


def test_this_machine_can_be_looked_at() -> None:
    machine = look(EpGroup(0, 1, torch.device("cpu")))
    assert (machine.num_hosts, machine.cut_off) == (1, ())
